"""What a GPU's driver gets from calls that were prepared: each parameter by its name, on a GPU that is none."""

import copy
import sys
import weakref
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu

import nbep
from nbep.device.layout.low_latency import send_offset

pytestmark = pytest.mark.emulator_only("its GPU is none")
NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 16, 512, 4, 32
SEND, RECEIVE, BOTH = 1, 2, 3
MESSAGES = "num_messages", "message_src_idx", "message_rows", "message_weights"
RDMA_BYTES = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, fake_gpu.NUM_RANKS, NUM_EXPERTS)


class Gpu(fake_gpu.Gpu):
    """A buffer, and the arrays of its low-latency calls."""

    def __init__(self, monkeypatch: Any):
        super().__init__(monkeypatch)
        self.buffer = fake_gpu.make_buffer(RDMA_BYTES, num_zero_copy_bytes=1 << 26)
        self.x = self.tensor("bfloat16", NUM_TOKENS, HIDDEN)
        self.topk_idx = self.tensor("int64", NUM_TOKENS, NUM_TOPK)
        self.weights = self.tensor("float32", NUM_TOKENS, NUM_TOPK)
        self.rows = self.tensor("bfloat16", NUM_EXPERTS // fake_gpu.NUM_RANKS, fake_gpu.NUM_RANKS * NUM_TOKENS, HIDDEN)
        self.recv_stats = self.tensor("int32", NUM_EXPERTS // fake_gpu.NUM_RANKS)
        self.cost_stats = self.tensor("int64", fake_gpu.NUM_RANKS)

    def dispatch(self, **options: Any) -> tuple:
        return self.buffer.low_latency_dispatch(self.x, self.topk_idx, NUM_TOKENS, NUM_EXPERTS, **options)

    def combine(self, handle: Any, **options: Any) -> tuple:
        return self.buffer.low_latency_combine(self.rows, self.topk_idx, self.weights, handle, **options)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.mark.parametrize("way", ["plain", "hook", "async"])
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("use_fp8", [False, True])
def test_low_latency_calls_launch_with_their_own_arrays_in_their_own_half(gpu, use_fp8, deduplicate, way):
    options = {"async_finish": way == "async", "return_recv_hook": way == "hook"}
    kind = "-DeduplicatedShape" if deduplicate else ""
    dispatch, combine = (f"low_latency_{verb}{kind}" for verb in ("dispatch", "combine"))
    for number in range(5):
        stats = (gpu.recv_stats, gpu.cost_stats) if number % 2 else (None, None)
        weights = gpu.weights if deduplicate else None
        received, count, handle, _, hook = gpu.dispatch(
            cumulative_local_expert_recv_stats=stats[0],
            dispatch_wait_recv_cost_stats=stats[1],
            use_fp8=use_fp8,
            deduplicate=deduplicate,
            topk_weights=weights,
            **options,
        )
        recv_x, scales = received if use_fp8 else (received, None)
        wanted = {"out__recv_x": recv_x, "out__recv_x_scales": scales, "out__recv_count": count}
        wanted |= {"out__cumulative_recv_stats": stats[0], "out__wait_recv_cost_stats": stats[1]}
        wanted |= {"inputs__x": gpu.x, "inputs__topk_idx": gpu.topk_idx, "inputs__topk_weights": weights}
        wanted |= {"call__half": 0, "call__num_rdma_bytes": RDMA_BYTES, "shape__use_fp8": use_fp8}
        sent = gpu.check(dispatch, **wanted, call__phases=SEND if hook else BOTH)
        if hook:
            hook()
            assert gpu.check(dispatch, call__phases=RECEIVE) == sent | {"call.phases": RECEIVE}
        out = gpu.tensor("bfloat16", NUM_TOKENS, HIDDEN) if number % 2 else None
        combined_x, _, hook = gpu.combine(handle, out=out, combine_wait_recv_cost_stats=stats[1], **options)
        assert out is None or combined_x is out
        wanted = {"out__combined_x": combined_x, "out__wait_recv_cost_stats": stats[1], "inputs__x": gpu.rows}
        wanted |= {"inputs__topk_idx": gpu.topk_idx, "inputs__topk_weights": gpu.weights, "call__half": 1}
        for name in ("recv_src_info", "recv_layout_range", *MESSAGES):
            wanted[f"inputs__{name}"] = sent[f"out.{name}"]
            assert (sent[f"out.{name}"] != 0) == (deduplicate or name not in MESSAGES)
        sent = gpu.check(combine, **wanted, call__phases=SEND if hook else BOTH)
        if hook:
            hook()
            assert gpu.check(combine, call__phases=RECEIVE) == sent | {"call.phases": RECEIVE}
    assert gpu.launches == []


def test_what_low_latency_dispatches_return_lies_apart(gpu):
    first, second = gpu.dispatch(), gpu.dispatch()
    addresses = [array.address for (recv_x, scales), count, *_ in (first, second) for array in (recv_x, scales, count)]
    addresses += [handle.arguments[0] for _, _, handle, *_ in (first, second)]
    assert len(set(addresses)) == 8
    (_, scales), _, handle, _, _ = first
    num_rows = fake_gpu.NUM_RANKS * NUM_TOKENS
    assert scales.stride() == (num_rows * HIDDEN // 128, 1, num_rows)
    src_info, layout_range, *_ = handle
    assert tuple(src_info.shape) == (NUM_EXPERTS // fake_gpu.NUM_RANKS, num_rows)
    assert tuple(layout_range.shape) == (NUM_EXPERTS // fake_gpu.NUM_RANKS, fake_gpu.NUM_RANKS)


def test_a_zero_copy_combine_sends_from_the_half_of_its_call(gpu):
    for number in range(3):
        handle = gpu.dispatch()[2]
        for _ in range(number % 2):
            handle = gpu.dispatch()[2]  # so that combine takes the other half
        gpu.buffer.get_next_low_latency_combine_buffer(handle)
        gpu.launches.clear()
        gpu.combine(handle, zero_copy=True)
        half = gpu.launches[0][1]["call.half"]
        base = gpu.buffer._memory.low_latency.symmetric.address
        gpu.check("low_latency_combine", inputs__x=base + send_offset(RDMA_BYTES, half))
        with pytest.raises(ValueError, match="zero_copy: got True without get_next_low_latency_combine_buffer"):
            gpu.combine(handle, zero_copy=True)


def test_arrays_live_until_the_hook_was_called_and_the_comm_stream_is_done(gpu):
    gpu.x = x = gpu.tensor("bfloat16", NUM_TOKENS, HIDDEN)
    gone = weakref.ref(x)
    hook = gpu.dispatch(return_recv_hook=True)[-1]
    del x, gpu.x
    assert gone() is not None
    hook()
    del hook
    assert gone() is None
    gpu.x = gpu.tensor("bfloat16", NUM_TOKENS, HIDDEN)
    event = gpu.dispatch(async_finish=True)[3]
    gone = weakref.ref(gpu.x)
    del gpu.x
    assert gone() is not None
    event.current_stream_wait()
    assert gone() is None


def test_a_copy_of_a_handle_launches_with_its_own_arrays(gpu):
    handle = fake_gpu.handle_of(gpu.torch, gpu.buffer, NUM_TOKENS, 4)
    rows = gpu.tensor("bfloat16", 3 * NUM_TOKENS, HIDDEN)
    gpu.buffer.combine(rows, handle)
    copied = copy.deepcopy(handle)
    copied.send_head.address += 512
    low_latency = gpu.dispatch(deduplicate=True, topk_weights=gpu.weights)[2]
    moved = copy.deepcopy(low_latency)
    moved.arrays._words.address += 512
    gpu.launches.clear()
    for each in (handle, copied):
        gpu.buffer.combine(rows, each)
        gpu.launches.pop(0)
        gpu.check("combine", inputs__send_head=each.send_head)
    for each in (low_latency, moved):
        gpu.combine(each)
        gpu.check("low_latency_combine-DeduplicatedShape", inputs__recv_src_info=each.arrays._words)


def test_a_handle_whose_hook_was_not_called_is_refused_after_others_were_prepared(gpu):
    gpu.combine(gpu.dispatch()[2])
    handle, _, hook = gpu.dispatch(return_recv_hook=True)[2:]
    with pytest.raises(
        ValueError, match=r"handle: got that of low_latency_dispatch .*, whose hook has not been called"
    ):
        gpu.combine(handle)
    hook()
    gpu.combine(handle)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_cached_dispatches_and_combines_launch_with_their_own_arrays(gpu, fp8, zero_copy):
    handle = fake_gpu.handle_of(gpu.torch, gpu.buffer, NUM_TOKENS, 4)
    num_recv_tokens = 3 * NUM_TOKENS
    for number in range(4):
        given = gpu.tokens(NUM_TOKENS, HIDDEN, fp8)
        x, scales = given if fp8 else (given, None)
        received = gpu.buffer.dispatch(given, handle, zero_copy=zero_copy)[0]
        recv_x, recv_scales = received if fp8 else (received, None)
        assert gpu.launches.pop(0)[0] == "cached_notify_dispatch"
        routes = {f"inputs__{name}": getattr(handle, name) for name in ("rank_prefix_matrix", "channel_prefix_matrix")}
        wanted = {"inputs__x": x, "inputs__x_scales": scales, "inputs__topk_idx": None, **routes}
        if zero_copy:
            gpu.check("direct_dispatch", inputs__send_head=handle.send_head, **wanted)
        else:
            wanted |= {"out__recv_x": recv_x, "out__recv_x_scales": recv_scales, "out__recv_topk_idx": None}
            gpu.check("dispatch", inputs__is_token_in_rank=handle.is_token_in_rank, **wanted)
        rows = gpu.tensor("bfloat16", num_recv_tokens, HIDDEN)
        weights = gpu.tensor("float32", num_recv_tokens, NUM_TOPK) if number % 2 else None
        bias = gpu.tensor("bfloat16", NUM_TOKENS, HIDDEN) if number >= 2 else None
        combined_x, combined_weights, _ = gpu.buffer.combine(rows, handle, weights, (None, bias), zero_copy=zero_copy)
        if zero_copy:
            assert gpu.launches.pop(0)[0] == "lay_out_rows"
        name, notify = gpu.launches.pop(0)
        assert name == ("offer_rows" if zero_copy else "cached_notify_combine")
        assert zero_copy or notify["send_head"] == handle.send_head.address
        prefix = handle.channel_prefix_matrix if zero_copy else handle.recv_channel_prefix_matrix
        wanted = {"inputs__x": rows, "inputs__topk_weights": weights, "inputs__bias_0": None, "inputs__bias_1": bias}
        wanted |= {"out__combined_x": combined_x, "out__combined_topk_weights": combined_weights}
        wanted |= {"inputs__channel_prefix_matrix": prefix}
        if not zero_copy:
            wanted |= {"inputs__rank_prefix_matrix": handle.rank_prefix_matrix}
        gpu.check("direct_combine" if zero_copy else "combine", inputs__send_head=handle.send_head, **wanted)
        if zero_copy:
            assert gpu.launches.pop(0)[0] == "cached_notify_dispatch"
    assert gpu.launches == []
