"""What clients of DeepEP pass and read, against the signatures of nbep.deep_ep and what its verbs return."""

import re
from inspect import signature
from operator import attrgetter

import ml_dtypes
import numpy as np
import pytest
from arrays import to_target
from client_calls import SOURCES
from elastic_calls import ELASTIC_SOURCES
from target import spawn

import nbep
import nbep.deep_ep as deep_ep
from nbep.deep_ep.calls import FORKS

CALLS = [
    pytest.param(call, id=f"{source.client.split('/')[1]}-{source.file.split('/')[-1]}-{call.line}-{call.callee}")
    for source in (*SOURCES, *ELASTIC_SOURCES)
    for call in source.calls
]
WITHOUT_SELF = re.compile(r"get_\w+_config|get_low_latency_rdma_size_hint|get_buffer_size_hint|set_num_sms|capture")


def taken(callee, before, behind):
    """Name -> value of a call whose values are the names of the parameters that they are meant for."""
    called = attrgetter(callee)(deep_ep)
    verb = callee.partition(".")[2]
    first = [] if not verb or WITHOUT_SELF.fullmatch(verb) else ["self"]
    values = signature(called).bind(*first, *before, **{name: name for name in behind}).arguments
    if callee == "Buffer":  # its options go to nbep.Buffer
        values.update(signature(nbep.Buffer).bind_partial(**values.pop("options", {})).arguments)
    values.pop("self", None)
    return values


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_clients_are_taken_for_what_they_mean(call):
    before, _, behind = (part.split() for part in call.given.partition("/"))
    values = taken(call.callee, before, behind)
    assert sorted(values) == sorted(values.values()) == sorted(before + behind)
    for name in call.forks.split():
        assert name in FORKS
        with pytest.raises(TypeError, match=f"{name}: not in DeepEP's main"):
            attrgetter(call.callee)(deep_ep)(None, *before, **dict.fromkeys([*behind, name]))


@pytest.fixture(scope="module")
def results():
    """Callee -> what it returns, of rank 0 of two."""

    def main(comm):
        buffer = deep_ep.Buffer(comm, 1 << 20, 1 << 20, True)
        x, topk_idx, weights = (to_target(each) for each in routed_tokens())
        layout = buffer.get_dispatch_layout(topk_idx, 4)
        names = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank"
        of_layout = dict(zip(names, layout[:4], strict=True))
        config = deep_ep.Config(2, 2, 4)
        received = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, config=config, **of_layout)
        combined = buffer.combine(received[0], received[4], config=config)
        low_latency = buffer.low_latency_dispatch(x, topk_idx, 3, 4, return_recv_hook=True)
        low_latency[4]()
        rows = buffer.get_next_low_latency_combine_buffer(low_latency[2])
        summed = buffer.low_latency_combine(
            rows, topk_idx, weights, low_latency[2], zero_copy=True, return_recv_hook=True
        )
        summed[2]()
        elastic = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=3, hidden=128, num_topk=2)
        of_elastic = elastic.dispatch(x, topk_idx, weights, num_experts=4, async_with_compute_stream=True)
        of_elastic[4].current_stream_wait()
        return {
            "ElasticBuffer": elastic,
            "ElasticBuffer.dispatch": of_elastic,
            "ElasticBuffer.combine": elastic.combine(of_elastic[0], of_elastic[3]),
            "Buffer": buffer,
            "Buffer.get_dispatch_layout": layout,
            "Buffer.dispatch": received,
            "Buffer.combine": combined,
            "Buffer.low_latency_dispatch": low_latency,
            "Buffer.low_latency_combine": summed,
        }

    return spawn(main, 2)[0]


def routed_tokens():
    topk_idx = np.array([[0, 1], [2, 3], [1, 2]])
    return np.ones((3, 128), ml_dtypes.bfloat16), topk_idx, np.ones((3, 2), np.float32)


def parts(read):
    """The parts of a result that are read: words, and lists for parts in parentheses."""
    return [group.split() if group else word for group, word in re.findall(r"\(((?:\w+ )+\w+)\)|(\S+)", read)]


def check_read(read, value):
    if isinstance(read, list):
        assert isinstance(value, tuple)
        for each, part in zip(read, value, strict=True):
            check_read(each, part)
        return
    _, *attributes = read.removesuffix("()").split(".")
    found = [getattr(value, attribute) for attribute in attributes] or [value]
    assert callable(found[-1]) or not read.endswith("()")


@pytest.mark.parametrize("call", [param for param in CALLS if param.values[0].read])
def test_what_clients_read_is_there(call, results):
    result, read = results[call.callee], parts(call.read)
    check_read(read, result) if isinstance(result, tuple) else [check_read(each, result) for each in read]
