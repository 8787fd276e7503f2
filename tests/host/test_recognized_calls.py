"""Calls that torch's own test recognizes as like the one before: their launches, and what is still refused."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
import no_gpu

import nbep
from nbep.host.node import Received
from nbep.host.target import libraries
from nbep.host.target.cuda.runtime import CudaRuntime

pytestmark = pytest.mark.emulator_only("its GPU is none")
TOKENS, HIDDEN, TOPK, EXPERTS, RANKS = 16, 512, 4, 8, 2
RDMA_BYTES = nbep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, RANKS, EXPERTS)


class Calls:
    """The calls of a buffer with tensors of torch, their launches, and how often arrays were looked at."""

    def __init__(self, torch, monkeypatch, **sizes):
        self.torch = torch
        self.launches = fake_gpu.noted_launches(monkeypatch)
        self.looks = 0
        look_at = CudaRuntime.look_at

        def count(*args):
            self.looks += 1
            return look_at(*args)

        monkeypatch.setattr(CudaRuntime, "look_at", count)
        self.buffer = no_gpu.make_buffer(RANKS, RDMA_BYTES, num_zero_copy_bytes=1 << 26, **sizes)
        self.x, self.topk_idx = self.rows(TOKENS), torch.zeros((TOKENS, TOPK), dtype=torch.int64)
        self.weights = torch.ones((TOKENS, TOPK), dtype=torch.float32)
        self.expert_rows = torch.zeros((EXPERTS // RANKS, RANKS * TOKENS, HIDDEN), dtype=torch.bfloat16)

    def rows(self, num_rows):
        return self.torch.zeros((num_rows, HIDDEN), dtype=self.torch.bfloat16)

    def layout(self, topk_idx=None):
        return self.buffer.get_dispatch_layout(self.topk_idx if topk_idx is None else topk_idx, EXPERTS)

    def counted(self, num_rows, monkeypatch, **changed):
        """A dispatch without a handle, to which so many rows come."""
        monkeypatch.setattr(type(self.buffer._memory.counters), "poll", lambda *_: Received(num_rows, [num_rows], 0))
        per_rank, _, per_expert, in_rank, _ = self.layout()
        counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        given = {"x": self.x, **counts, "topk_idx": self.topk_idx, "topk_weights": self.weights}
        received, _, recv_weights, _, handle, _ = self.buffer.dispatch(**given | changed)
        return received, recv_weights, handle

    def low_latency_dispatch(self, x=None, **options):
        return self.buffer.low_latency_dispatch(self.x if x is None else x, self.topk_idx, TOKENS, EXPERTS, **options)

    def low_latency_combine(self, x=None, handle=None, **options):
        handle = self.low_latency_dispatch()[2] if handle is None else handle
        x = self.expert_rows if x is None else x
        return self.buffer.low_latency_combine(x, self.topk_idx, self.weights, handle, **options)


@pytest.fixture
def calls(monkeypatch):
    pytest.importorskip("torch")
    with no_gpu.tensors_of_the_cpu() as torch:
        yield Calls(torch, monkeypatch)


def test_arrays_of_calls_like_the_one_before_are_not_looked_at_again(calls, monkeypatch):
    x, rows = calls.x, calls.expert_rows
    handle, low_latency = calls.counted(8, monkeypatch)[2], calls.low_latency_dispatch()[2]
    for call in (
        calls.layout,
        lambda: calls.counted(8, monkeypatch),
        lambda: calls.buffer.dispatch(calls.x, handle=handle),
        lambda: calls.buffer.dispatch(calls.x, handle=handle, zero_copy=True),
        lambda: calls.buffer.combine(calls.rows(8), handle),
        calls.low_latency_dispatch,
        lambda: calls.low_latency_combine(handle=low_latency),
    ):
        for _ in range(2):
            call()
        calls.x, calls.expert_rows = calls.rows(TOKENS), rows.clone()  # others of the same kinds
        calls.looks = 0
        call()
        assert calls.looks == 0
        calls.x, calls.expert_rows = x, rows


def test_arrays_of_elastic_calls_like_the_one_before_are_not_looked_at_again(calls):
    elastic = no_gpu.make_elastic(RANKS, TOKENS, HIDDEN)
    way = {"topk_idx": calls.topk_idx, "topk_weights": calls.weights, "num_experts": EXPERTS, "do_cpu_sync": False}
    received, _, recv_weights, handle, _ = elastic.dispatch(calls.x, **way)
    for call in (
        lambda: elastic.dispatch(calls.x, **way),
        lambda: elastic.dispatch(calls.x, handle=handle),
        lambda: elastic.dispatch(calls.x, handle=handle, topk_weights=calls.weights),
        lambda: elastic.combine(received, handle),
        lambda: elastic.combine(received, handle, topk_weights=recv_weights),
    ):
        for _ in range(2):
            call()
        before = calls.looks
        call()
        assert calls.looks == before


def flawed(calls, x):
    """Tensors that are not as x is, and what is said of them."""
    torch = calls.torch
    wide = torch.zeros((*x.shape[:-1], 2 * HIDDEN), dtype=x.dtype)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    aside = torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : x.numel() + 1].view(x.shape)
    return {
        "got a strided bfloat16": wide[..., :HIDDEN],
        "got float": x.float(),
        r"got (bfloat16|int64|\d+ tokens)": x[:-1].clone(),
        "negative or conjugate bit": torch._neg_view(x),
        "without memory": freed,
        "got an array that starts 2 bytes past": aside,
    }


@pytest.mark.parametrize("verb", ["low_latency_dispatch", "low_latency_combine", "combine"])
def test_what_is_recognized_does_not_hide_what_is_wrong_with_the_next_tensor(calls, monkeypatch, verb):
    handle = calls.counted(TOKENS, monkeypatch)[2]
    call, x = getattr(calls, verb, None), calls.x
    if verb == "combine":

        def call(x):
            return calls.buffer.combine(x, handle)

    elif verb == "low_latency_combine":
        x = calls.expert_rows
    for message, wrong in flawed(calls, x).items():
        for _ in range(3):
            call(x)
        calls.launches.clear()
        with pytest.raises(ValueError, match=f"^(x|topk_idx): .*{message}"):
            call(wrong)
        assert [name for name, _ in calls.launches if name != "low_latency_dispatch"] == []
    call(x)


def test_options_of_another_type_and_arrays_that_were_absent_are_not_taken_for_those_before(calls):
    for _ in range(3):
        calls.low_latency_dispatch(use_fp8=True)
        calls.low_latency_combine()
    with pytest.raises(ValueError, match="use_fp8: got 1"):
        calls.low_latency_dispatch(use_fp8=1)
    with pytest.raises(ValueError, match=r"num_experts: got 8\.0"):
        calls.buffer.low_latency_dispatch(calls.x, calls.topk_idx, TOKENS, float(EXPERTS))
    with pytest.raises(ValueError, match="cumulative_local_expert_recv_stats: got int64"):
        calls.low_latency_dispatch(cumulative_local_expert_recv_stats=calls.topk_idx[0])
    out = calls.expert_rows[0, :TOKENS]
    for _ in range(3):
        calls.low_latency_combine(out=calls.rows(TOKENS))
    with pytest.raises(ValueError, match="out: got memory that x lies in too"):
        calls.low_latency_combine(out=out)


def test_a_tuple_of_one_behind_calls_with_scales_is_refused_with_a_handle_too(calls, monkeypatch):
    *_, handle = calls.counted(8, monkeypatch)
    x = calls.x.to(calls.torch.float8_e4m3fn), calls.torch.ones((TOKENS, HIDDEN // 128))
    for _ in range(3):
        calls.buffer.dispatch(x, handle=handle)
    for wrong in (x[:1], (*x, x[1])):
        with pytest.raises(ValueError, match=f"x: got a tuple of {len(wrong)}; must be an array, or a tuple"):
            calls.buffer.dispatch(wrong, handle=handle)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_new_handle_of_the_same_sizes_goes_with_its_own_arrays_and_rows(calls, monkeypatch, zero_copy):
    cached, combined = calls.buffer._memory.cached_plans, calls.buffer._memory.combine_plans
    for num_rows in (8, 8, 3, 12, 0, 5):
        *_, handle = calls.counted(num_rows, monkeypatch)
        calls.launches.clear()
        received = calls.buffer.dispatch(calls.x, handle=handle, zero_copy=zero_copy)[0]
        assert tuple(received.shape) == (num_rows, HIDDEN)
        _, (_, sent) = calls.launches
        assert sent["sizes.num_recv_tokens"] == num_rows
        assert sent["inputs.rank_prefix_matrix"] == handle.rank_prefix_matrix.data_ptr()
        calls.launches.clear()
        combined_x = calls.buffer.combine(calls.rows(num_rows), handle, zero_copy=zero_copy)[0]
        assert tuple(combined_x.shape) == (TOKENS, HIDDEN)
        launched, prefix, head = dict(calls.launches), handle.rank_prefix_matrix.data_ptr(), handle.send_head.data_ptr()
        if zero_copy:
            sent, laid, offered = (launched[name] for name in ("direct_combine", "lay_out_rows", "offer_rows"))
            assert (laid["inputs.prefix"], laid["sizes.num_rows"]) == (prefix, num_rows)
            assert (offered["inputs.prefix"], offered["begins.num_rows"]) == (prefix, num_rows)
            assert sent["inputs.channel_prefix_matrix"] == handle.channel_prefix_matrix.data_ptr()
        else:
            sent = launched["combine"]
            assert (launched["cached_notify_combine"]["send_head"], sent["inputs.rank_prefix_matrix"]) == (head, prefix)
            assert sent["inputs.channel_prefix_matrix"] == handle.recv_channel_prefix_matrix.data_ptr()
        assert sent["inputs.send_head"] == head
        for wrong in (num_rows + 1, num_rows + 3):
            with pytest.raises(
                ValueError, match=rf"x: got bfloat16 \[{wrong}, {HIDDEN}\]; must be bfloat16 \[{num_rows}"
            ):
                calls.buffer.combine(calls.rows(wrong), handle, zero_copy=zero_copy)
    assert (len(cached), len(combined)) == (1, 2)  # no rows have no address, which is a kind of its own


def test_a_handle_of_other_sizes_or_of_another_buffer_has_a_plan_of_its_own(calls, monkeypatch):
    *_, handle = calls.counted(8, monkeypatch)
    for _ in range(3):
        calls.buffer.combine(calls.rows(8), handle)
    calls.x, calls.topk_idx, calls.weights = (
        calls.x[:-4].clone(),
        calls.topk_idx[:-4].clone(),
        calls.weights[:-4].clone(),
    )
    *_, smaller = calls.counted(8, monkeypatch)
    calls.launches.clear()
    assert tuple(calls.buffer.combine(calls.rows(8), smaller)[0].shape) == (TOKENS - 4, HIDDEN)
    assert calls.launches[1][1]["sizes.num_combined_tokens"] == TOKENS - 4
    with pytest.raises(ValueError, match="x: got 16 tokens; must be 12 tokens"):
        calls.buffer.dispatch(calls.rows(TOKENS), handle=smaller)
    other = Calls(calls.torch, monkeypatch)
    with pytest.raises(ValueError, match="handle: got the handle of another buffer"):
        other.buffer.combine(other.rows(8), handle)


def test_with_check_calls_each_dispatch_is_distinguished(monkeypatch):
    pytest.importorskip("torch")
    with no_gpu.tensors_of_the_cpu() as torch:
        calls = Calls(torch, monkeypatch, check_calls=True)
        digests = set()
        for _ in range(3):
            *_, handle = calls.counted(8, monkeypatch)
            calls.launches.clear()
            calls.buffer.combine(calls.rows(8), handle)
            digests.add(calls.launches[0][1]["call.signal"])
        assert len(digests) == 3


def test_behind_an_event_outputs_are_the_comm_streams_and_torch_records_those_that_are_there(calls, monkeypatch):
    torch, recorded, current = calls.torch, [], [(0, -1, 1)]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **of: current.append(tuple(of.values())), raising=False)
    monkeypatch.setattr(libraries, "_external_stream", lambda torch, handle, ordinal: (handle, ordinal, 1))
    monkeypatch.setattr(libraries, "_stream_of", lambda torch, *of: of)
    monkeypatch.setattr(calls.buffer._memory.comm_stream, "ordinal", -1)  # as _cuda_getDevice says
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    *_, handle = calls.counted(8, monkeypatch)
    for fp8, weights in ((False, None), (True, torch.ones((8, TOPK)))):
        x = calls.x
        if fp8:
            x = x.to(torch.float8_e4m3fn), torch.ones((TOKENS, HIDDEN // 128))
        for call in (
            lambda x=x, **order: calls.buffer.dispatch(x, handle=handle, **order),
            lambda weights=weights, **order: calls.buffer.combine(calls.rows(8), handle, weights, **order),
        ):
            recorded.clear()
            event = calls.buffer.capture()
            made = call(previous_event=event, async_finish=True, allocate_on_comm_stream=True)
            made[-1].current_stream_wait()
            outputs = made[0] if isinstance(made[0], tuple) else tuple(each for each in made[:2] if each is not None)
            assert len(outputs) == 1 + fp8
            assert [id(tensor) for tensor, _ in recorded] == [id(output) for output in outputs]
            assert {stream for _, stream in recorded} == {(0, -1, 1)}
            assert current[-2:] == [(7, -1, 1), (0, -1, 1)]  # the comm stream, and back
