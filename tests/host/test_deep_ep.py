"""What programs that are written for DeepEP do with its names, and with those of nbep.deep_ep in their place."""

import gc
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from arrays import to_numpy, to_target
from cases import make_case
from intranode import Options, round_trip, run
from target import spawn

import nbep
import nbep.deep_ep as deep_ep
from nbep.deep_ep import cpp as deep_ep_cpp
from nbep.deep_ep.utils import EventHandle, EventOverlap, check_nvlink_connections
from nbep.device.layout.intranode import num_nvl_bytes_needed
from nbep.host.config import deep_ep_bytes

CONFIG = deep_ep.Config(2, 2, 4)


@pytest.fixture
def on_deep_ep(inputs):
    """Run fn(buffer, arguments of a dispatch) on two ranks, each with a buffer of nbep.deep_ep."""

    def go(fn, num_nvl_bytes=1 << 17, **options):
        def main(comm):
            buffer = deep_ep.Buffer(comm, num_nvl_bytes, explicitly_destroy=True, **options)
            result = fn(buffer, inputs(buffer))
            buffer.destroy()
            return result

        return spawn(main, 2)

    return go


def test_names_are_deepeps():
    assert deep_ep.EventHandle is EventHandle is deep_ep_cpp.EventHandle is nbep.EventHandle
    assert deep_ep.EventOverlap is EventOverlap is nbep.EventOverlap
    assert deep_ep.Config is deep_ep_cpp.Config is nbep.Config
    assert deep_ep_cpp.is_sm90_compiled()
    assert not hasattr(deep_ep_cpp, "Buffer")  # the page says that it is not there
    sizes = 16, 128, 2, 4
    assert deep_ep_cpp.get_low_latency_rdma_size_hint(*sizes) == deep_ep.Buffer.get_low_latency_rdma_size_hint(*sizes)
    assert check_nvlink_connections(None) is None
    for module in (deep_ep, deep_ep_cpp):
        with pytest.raises(AttributeError, match="has no attribute 'Bufer'"):
            module.Bufer  # noqa: B018


def test_indices_are_torchs_where_torch_is_in_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert deep_ep.topk_idx_t == deep_ep_cpp.topk_idx_t == np.int64
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(int64="torch's"))
    assert deep_ep.topk_idx_t == deep_ep_cpp.topk_idx_t == "torch's"


def test_round_trips_agree_with_the_reference(monkeypatch):
    monkeypatch.setattr(nbep, "Buffer", deep_ep.Buffer)
    run(make_case(3, num_ranks=4, num_tokens=(5, 0, 7, 1)), Options(CONFIG), fn=round_trip)


def test_after_a_blocking_call_there_is_no_event(on_deep_ep):
    def main(buffer, arguments):
        *_, handle, event = buffer.dispatch(**arguments)
        *_, positional = buffer.dispatch(arguments["x"], handle, *[None] * 6, 1, 0, CONFIG, None, False)
        *_, of_layout = buffer.get_dispatch_layout(arguments["topk_idx"], 4)
        assert event.event is positional.event is of_layout.event is None
        recv_x, *_, event = buffer.dispatch(arguments["x"], handle, *[None] * 6, 1, 0, CONFIG, None, True)
        event.current_stream_wait()
        *_, event = buffer.combine(recv_x, handle, async_finish=True)
        assert event.event is not None
        event.current_stream_wait()
        assert buffer.combine(recv_x, handle)[-1].event is None

    on_deep_ep(main)


def test_the_ninth_argument_is_the_communicator_or_whether_the_buffer_shrinks():
    def main(comm):
        first = deep_ep.Buffer(None, 256, 0, False, 24, True, False, True, comm)
        assert (first.group, first.group_size) == (comm, 2)
        first.destroy()
        second = deep_ep.Buffer(comm, 0, 1 << 16, True, 24, True, False, True, True)
        status = to_target(np.ones(2, np.int32))
        second.low_latency_query_mask_buffer(status)
        second.destroy()
        return to_numpy(status).tolist()

    assert spawn(main, 2) == [[0, 0]] * 2


def test_a_permission_to_use_nvlink_between_nodes_is_taken(on_deep_ep):
    on_deep_ep(lambda buffer, arguments: buffer.dispatch(**arguments), allow_mnnvl=True)


@pytest.mark.parametrize("wrap", [lambda event: SimpleNamespace(event=event.event), lambda event: event.event])
def test_whatever_has_an_event_is_a_previous_event(on_deep_ep, wrap):
    def main(buffer, arguments):
        *_, handle, event = buffer.dispatch(**arguments, async_finish=True)
        recv_x, *_ = buffer.dispatch(arguments["x"], handle, config=CONFIG, previous_event=wrap(event))
        return to_numpy(recv_x).tobytes() == to_numpy(buffer.dispatch(**arguments)[0]).tobytes()

    assert on_deep_ep(main) == [True, True]


def test_what_a_handle_knows_need_not_be_left_out(on_deep_ep):
    def main(buffer, arguments):
        per_node = to_target(np.zeros(1, np.int32))
        recv_x, *_, handle, _ = buffer.dispatch(**arguments, num_tokens_per_rdma_rank=per_node)
        again, *_ = buffer.dispatch(arguments["x"], handle=list(handle), num_worst_tokens=99, config=CONFIG)
        assert to_numpy(again).tobytes() == to_numpy(recv_x).tobytes()
        return tuple(buffer.combine(recv_x, list(handle))[0].shape)

    assert on_deep_ep(main) == [(3, 128)] * 2


ROWS = {
    "float16": (lambda rng: rng.standard_normal((3, 24)).astype(np.float16)),
    "float32": (lambda rng: rng.standard_normal((3, 20)).astype(np.float32)),
    "e4m3": (lambda rng: rng.standard_normal((3, 48)).astype(ml_dtypes.float8_e4m3fn)),
    "one scale": (lambda rng: scaled(rng, 1, np.float32)),
    "five scales": (lambda rng: scaled(rng, 5, np.float32)),
    "three packed": (lambda rng: scaled(rng, 3, np.int32)),
}


def scaled(rng, num_scales, dtype):
    x = rng.standard_normal((3, 48)).astype(ml_dtypes.float8_e4m3fn)
    return x, rng.integers(1, 99, (num_scales, 3)).astype(dtype).T


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_rows_of_any_kind_arrive_as_they_are(on_deep_ep, make):
    given = [make(np.random.default_rng(rank)) for rank in range(2)]

    def main(buffer, arguments):
        recv_x, *_, handle, _ = buffer.dispatch(**{**arguments, "x": to_target(given[buffer.rank])})
        return to_numpy(recv_x), to_numpy(handle.recv_src_idx), to_numpy(handle.rank_prefix_matrix)

    for rank, (recv, src_idx, prefix) in enumerate(on_deep_ep(main)):
        for got, sent in zip(parts(recv), zip(*map(parts, given), strict=True), strict=True):
            want = [sent[0 if row < prefix[0, rank] else 1][token] for row, token in enumerate(src_idx)]
            assert got.dtype == sent[0].dtype
            assert got.tobytes() == np.stack(want).tobytes()


def parts(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("positional", [False, True])
def test_a_buffer_of_exactly_deepeps_size_is_large_enough(inputs, positional):
    shape = deep_ep.Config(2, 2, 64).ring_shape(2, 256, 2, 0, 1)
    num_nvl_bytes = -(-deep_ep_bytes(shape) // 128) * 128
    assert num_nvl_bytes < num_nvl_bytes_needed(shape)

    def main(comm):
        buffer = deep_ep.Buffer(comm, num_nvl_bytes)
        arguments = {**inputs(buffer), "config": deep_ep.Config(2, 2, 64)}
        if positional:
            names = ("x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank",
                     "num_tokens_per_expert", "topk_idx", "topk_weights")  # fmt: skip
            recv_x, *_, handle, _ = buffer.dispatch(*map(arguments.get, names), 1, 0, arguments["config"])
        else:
            recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        combined, *_ = buffer.combine(recv_x, handle, None, None, arguments["config"])
        with pytest.raises(ValueError, match=r"num_nvl_bytes: got \d+ at construction; must be at least"):
            buffer.dispatch(**{**arguments, "config": deep_ep.Config(2, 2, 70)})
        buffer.destroy()
        return tuple(combined.shape)

    assert spawn(main, 2) == [(3, 128)] * 2


def test_the_runtime_tells_where_a_rank_is():
    def main(comm):
        buffer = deep_ep.Buffer(comm, 1 << 16, 1 << 16, num_nvl_peers=2, explicitly_destroy=True)
        runtime = buffer.runtime
        numbers = runtime.get_num_rdma_ranks(), runtime.get_rdma_rank(), runtime.get_root_rdma_rank(True)
        assert runtime.is_available()
        assert runtime.is_internode_available()
        assert runtime.get_root_rdma_rank(False) == 0
        device = getattr(comm.runtime, "device", None)
        assert runtime.get_local_device_id() == (-1 if device is None else device.ordinal)
        buffer.destroy()
        assert buffer.runtime is None
        return numbers

    assert spawn(main, 4) == [(2, rank // 2, rank % 2) for rank in range(4)]


def test_the_comm_stream_is_torchs_where_torch_is_in_use(monkeypatch):
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(ExternalStream=lambda handle, device: ("torch's", handle, device))
    monkeypatch.setitem(sys.modules, "torch", torch)
    stream = SimpleNamespace(cuda_stream=77, ordinal=3)
    monkeypatch.setattr(nbep.Buffer, "get_comm_stream", lambda buffer: stream)
    assert deep_ep.Buffer.get_comm_stream(object.__new__(deep_ep.Buffer)) == ("torch's", 77, 3)


# Buffers that are dropped


def test_the_memory_of_a_dropped_buffer_is_given_back_by_the_next_one():
    def main(comm):
        buffer = deep_ep.Buffer(comm, 1 << 16)
        first = buffer._memory
        buffer = deep_ep.Buffer(comm, 1 << 17)  # the first one goes away when the second is made
        gc.collect()
        assert first._is_open
        second = buffer._memory
        del buffer
        gc.collect()
        deep_ep.Buffer(comm, 256, explicitly_destroy=True).destroy()
        return first._is_open, second._is_open, comm.runtime.dropped

    assert spawn(main, 2) == [(False, False, {})] * 2


def test_memory_that_another_rank_still_uses_is_kept():
    def main(comm):
        buffer = deep_ep.Buffer(comm, 256)
        memory = buffer._memory
        if comm.rank == 0:
            del buffer
            gc.collect()
        deep_ep.Buffer(comm, 256, explicitly_destroy=True).destroy()
        was_open = memory._is_open
        if comm.rank == 1:
            del buffer
            gc.collect()
        deep_ep.Buffer(comm, 256, explicitly_destroy=True).destroy()
        return was_open, memory._is_open

    assert spawn(main, 2) == [(True, False)] * 2


def test_memory_of_more_ranks_waits_for_all_of_them():
    def main(comm):
        half = comm.Split(comm.rank // 2)
        memory = deep_ep.Buffer(comm, 256)._memory
        gc.collect()
        deep_ep.Buffer(half, 256, explicitly_destroy=True).destroy()
        was_open = memory._is_open
        deep_ep.Buffer(comm, 256, explicitly_destroy=True).destroy()
        return was_open, memory._is_open

    assert spawn(main, 4) == [(True, False)] * 4


def test_a_buffer_that_is_to_be_destroyed_is_not_given_back_in_its_place():
    def main(comm):
        deep_ep.Buffer(comm, 256, explicitly_destroy=True)
        return comm.runtime.dropped

    with pytest.warns(RuntimeWarning, match="goes away without destroy"):
        assert spawn(main, 2) == [{}] * 2
