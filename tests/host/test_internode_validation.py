"""Bad arguments between nodes get a ValueError that says what came and what is allowed, before anything starts."""

import re

import ml_dtypes
import numpy as np
import pytest
from arrays import array_name, to_numpy
from internode import CONFIG, Options, make_node_case
from intranode import dispatch_arguments, make_buffer
from parts import both_parts
from refusals import check_refused
from target import spawn

import nbep
from nbep.host.handles import InternodeHandle
from nbep.host.low_latency.handle import LowLatencyHandle

ARRAY = array_name()
CASE = make_node_case(1, num_tokens=3, routing="everywhere", num_topk=4)  # a token to each of 2 x 2 ranks
OPTIONS = Options()
MOST_THREADS = 640

emulator_only = pytest.mark.emulator_only("the host looks into arrays")


def config(**changes):
    return {"config": nbep.Config(**{"num_sms": 4, "num_max_nvl_chunked_send_tokens": 2, **changes})}


CONFIGS = {
    "config type": ({"config": (4, 2, 8, 2, 4)}, "config: got tuple; must be an nbep.Config or None"),
    "odd SMs": (config(num_sms=3), "config.num_sms: got 3; must be even, from 2 to 160"),
    "no SMs": (config(num_sms=0), "config.num_sms: got 0; must be even, from 2 to 160"),
    "too many SMs": (config(num_sms=162), "config.num_sms: got 162; must be even, from 2 to 160"),
    "few threads": (
        config(num_threads=96),
        f"config.num_threads: got 96; must be a multiple of 32 from 128 to {MOST_THREADS}",
    ),
    "many threads": (
        config(num_threads=MOST_THREADS + 32),
        f"config.num_threads: got {MOST_THREADS + 32}; must be a multiple of 32 from 128 to {MOST_THREADS}",
    ),
    "NVL buffer too small": ({"config": nbep.Config(4, 2, 512, 2, 4)}, "num_nvl_bytes: got "),
    "RDMA buffer too small": ({"config": nbep.Config(4, 2, 8, 2, 512)}, "num_rdma_bytes: got "),
}
DISPATCH = {
    "no node counts": ({"num_tokens_per_rdma_rank": None},
        "num_tokens_per_rdma_rank: got None; must be given between nodes; get_dispatch_layout returns it"),
    "node counts as a list": ({"num_tokens_per_rdma_rank": [3, 3]},
        "num_tokens_per_rdma_rank: got list; must be an array of int32 [2]"),
    "node counts dtype": ({"num_tokens_per_rdma_rank": np.full(2, 3)},
        "num_tokens_per_rdma_rank: got int64 [2]; must be int32 [2]"),
    "counts of ranks for nodes": ({"num_tokens_per_rdma_rank": np.full(4, 3, np.int32)},
        "num_tokens_per_rdma_rank: got int32 [4]; must be int32 [2]"),
    "wrong node counts": pytest.param({"num_tokens_per_rdma_rank": np.array([3, 2], np.int32)},
        "num_tokens_per_rdma_rank: got [3, 2]; must be [3, 3], as is_token_in_rank says", marks=emulator_only),
    **CONFIGS,
}  # fmt: skip
# Those of inside a node and of the low-latency mode are others.
HANDLES = {
    "handle of inside a node": ({"handle": nbep.DispatchHandle(*[None] * 6)},
        "handle: got DispatchHandle; must be the handle that a dispatch between nodes returned, or a tuple of its ten"),
    "tuple of six": ({"handle": (None,) * 6}, "handle: got tuple; must be the handle that a dispatch between nodes"),
    "low-latency handle": ({"handle": LowLatencyHandle((None, None), (4, 16, 8))},
        "handle: got LowLatencyHandle; must be the handle that a dispatch between nodes returned, or a tuple of"),
    "no handle": ({"handle": 5}, "handle: got int; must be the handle that a dispatch between nodes returned, or a"),
    "other SMs": (config(num_sms=2), "config.num_sms: got 2; must be 4, as in the dispatch that made the handle"),
}  # fmt: skip
CACHED = {
    **HANDLES,
    **{name: CONFIGS[name] for name in ("config type", "odd SMs", "many threads")},
    "choices": ({"topk_idx": np.zeros((3, 4), np.int64)},
        f"topk_idx: got {ARRAY}; must be None together with a handle"),
    "tokens": ({"x": np.ones((4, 16), ml_dtypes.bfloat16)},
        "x: got 4 tokens; must be 3 tokens, as in the dispatch of the handle"),
}  # fmt: skip
COMBINE = {
    **HANDLES,
    **CONFIGS,
    "chunk larger than a node's share": ({"config": nbep.Config(4, 5, 8, 2, 4)},
        "config.num_max_nvl_chunked_send_tokens: got 5; must be at most 4 in combine, a node's share of"),
    "rows": ({"x": np.ones((3, 16), ml_dtypes.bfloat16)}, "x: got bfloat16 [3, 16]; must be bfloat16 [12, hidden]"),
}  # fmt: skip


@pytest.fixture
def on_two_nodes():
    """Run fn(buffer) on two ranks of each of two nodes."""

    def run(fn):
        def main(comm):
            buffer = make_buffer(comm, CASE, OPTIONS)
            fn(buffer)
            buffer.destroy()

        spawn(main, 4)

    return run


def arguments_of(buffer):
    return dispatch_arguments(buffer, CASE, OPTIONS, buffer.rank)[1]


def test_dispatch_refuses(on_two_nodes, starts_nothing):
    on_two_nodes(lambda buffer: check_refused(buffer.dispatch, arguments_of(buffer), DISPATCH, starts_nothing))


def test_cached_dispatch_and_combine_refuse(on_two_nodes, starts_nothing):
    def main(buffer):
        arguments = arguments_of(buffer)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        cached = {"x": arguments["x"], "handle": handle, "config": CONFIG}
        check_refused(buffer.dispatch, cached, CACHED, starts_nothing)
        check_refused(buffer.combine, {"x": recv_x, "handle": handle, "config": CONFIG}, COMBINE, starts_nothing)

    on_two_nodes(main)


def test_inside_a_node_a_handle_from_between_nodes_is_refused(on_two_ranks, inputs, starts_nothing):
    message = "^handle: got InternodeHandle; must be the handle that dispatch returned, or a tuple of its six arrays"
    handle = InternodeHandle(*[None] * 10)

    def main(buffer):
        arguments = inputs(buffer)
        with starts_nothing():
            with pytest.raises(ValueError, match=message):
                buffer.combine(arguments["x"], handle)
            with pytest.raises(ValueError, match=message):
                buffer.dispatch(arguments["x"], handle=handle)

    on_two_ranks(main)


@pytest.mark.emulator_only("it takes shared memory away")
def test_more_threads_than_shared_memory_has_room_for_are_refused(on_two_nodes, starts_nothing, monkeypatch):
    def main(buffer):
        arguments = arguments_of(buffer)
        monkeypatch.setattr(type(buffer.group.runtime), "max_smem_bytes", 100 << 10)
        with (
            starts_nothing(),
            pytest.raises(ValueError, match=r"config\.num_threads: got 640; must be .* to \d+$") as e,
        ):
            buffer.dispatch(**{**arguments, **config(num_threads=MOST_THREADS)})
        assert 128 <= int(str(e.value).split()[-1]) < MOST_THREADS

    on_two_nodes(main)


# The buffer


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"num_nvl_bytes": 1 << 17},
            r"num_rdma_bytes: got 0; must be positive between 2 nodes; see Config\.get_rdma_buffer_size_hint",
        ),
        ({"num_nvl_bytes": 1 << 17, "num_rdma_bytes": 1000}, "num_rdma_bytes: got 1000; must be a multiple of 128"),
    ],
    ids=["no RDMA buffer", "odd size"],
)
def test_a_buffer_between_nodes_without_the_bytes_for_it_is_refused(sizes, message, starts_nothing):
    def main(comm):
        with starts_nothing(), pytest.raises(ValueError, match=message):
            nbep.Buffer(comm, num_nvl_peers=2, **sizes)

    spawn(main, 4)


def test_a_buffer_without_nvl_bytes_serves_the_low_latency_mode_alone(starts_nothing):
    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=1 << 17, low_latency_mode=True, num_nvl_peers=2)
        for verb, call in (("dispatch", buffer.dispatch), ("combine", buffer.combine)):
            message = f"num_nvl_bytes: got 0; must be positive at construction for {verb}"
            with starts_nothing(), pytest.raises(ValueError, match=message):
                call(None, None)
        buffer.destroy()

    spawn(main, 4)


def test_more_nodes_than_a_block_of_combine_has_warps_for_are_refused(starts_nothing):
    def main(comm):
        with starts_nothing(), pytest.raises(ValueError, match="group: got 21 nodes of 1 ranks; must be at most 20"):
            nbep.Buffer(comm, num_nvl_bytes=1 << 17, num_rdma_bytes=1 << 17, num_nvl_peers=1)

    spawn(main, 21)


def test_the_bytes_that_an_error_asks_for_are_enough():
    """First of the one buffer, then of the other."""
    wanted = nbep.Config(4, 2, 100, 2, 60)
    sizes = {"num_nvl_bytes": 16384, "num_rdma_bytes": 4096}

    def main(comm, sizes):
        buffer = nbep.Buffer(comm, num_nvl_peers=2, **sizes)
        try:
            buffer.dispatch(**{**arguments_of(buffer), "config": wanted})
        except ValueError as error:
            return re.match(r"(num_\w+_bytes): got .* must be at least (\d+)", str(error)).groups()
        finally:
            buffer.destroy()
        return None

    for name in ("num_nvl_bytes", "num_rdma_bytes"):
        [(found, needed)] = set(spawn(main, 4, (sizes,)))
        assert found == name
        sizes[name] = int(needed) - 128
        assert set(spawn(main, 4, (sizes,))) == {(name, needed)}
        sizes[name] = int(needed)
    assert set(spawn(main, 4, (sizes,))) == {None}


# Ranks that differ

ALIKE = {
    "SMs": (nbep.Config(2, 2, 8, 2, 4), "num_sms", 4, 2),
    "NVL slots": (nbep.Config(4, 2, 6, 2, 4), "num_max_nvl_chunked_recv_tokens", 8, 6),
    "RDMA chunk": (nbep.Config(4, 2, 8, 1, 4), "num_max_rdma_chunked_send_tokens", 2, 1),
    "RDMA slots": (nbep.Config(4, 2, 8, 2, 6), "num_max_rdma_chunked_recv_tokens", 4, 6),
}
LARGER = Options(nbep.Config(4, 2, 8, 2, 6))
# A handle knows the SMs.
VERBS = [(verb, name) for verb in ("dispatch", "cached dispatch", "combine") for name in ALIKE]
VERBS = [(verb, name) for verb, name in VERBS if verb == "dispatch" or name != "SMs"]
SHORT = [*VERBS[: len(ALIKE)], ("cached dispatch", "NVL slots"), ("combine", "RDMA chunk")]


@pytest.mark.emulator_only("a rank that fails leaves its peers' kernels waiting")
@pytest.mark.parametrize(("verb", "what"), both_parts(SHORT, thorough=[one for one in VERBS if one not in SHORT]))
def test_configs_that_differ_between_ranks_are_reported(verb, what):
    other, name, of_most, of_last = ALIKE[what]

    def main(comm):
        buffer = make_buffer(comm, CASE, LARGER)
        arguments = arguments_of(buffer)
        config = other if comm.rank == 3 else CONFIG
        if verb == "dispatch":
            buffer.dispatch(**{**arguments, "config": config})
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        if verb == "combine":
            buffer.combine(recv_x, handle, config=config)
        buffer.dispatch(arguments["x"], handle=handle, config=config)

    of_3_last = rf"{of_most} on ranks? [\d to,]+, {of_last} on rank 3"
    of_3_first = rf"{of_last} on rank 3, {of_most} on rank \d"
    with pytest.raises(ValueError, match=rf"^config\.{name}: got ({of_3_last}|{of_3_first}) in ") as failure:
        spawn(main, 4)
    assert str(failure.value).endswith("; must be the same on all ranks")


@pytest.mark.thorough
def test_what_only_concerns_a_rank_itself_may_differ(on_two_nodes):
    """Chunks inside a node, and threads."""

    def main(buffer):
        last = buffer.rank == 3
        own = {"config": nbep.Config(4, 1 if last else 2, 8, 2, 4, num_threads=128 if last else 256)}
        recv_x, _, _, _, handle, _ = buffer.dispatch(**{**arguments_of(buffer), **own})
        combined_x, _, _ = buffer.combine(recv_x, handle, **own)
        four_times = (4 * CASE.x[buffer.rank].astype(np.float32)).astype(ml_dtypes.bfloat16)
        assert to_numpy(combined_x).tobytes() == four_times.tobytes()

    on_two_nodes(main)
