"""What prepared calls cost the CPU between the call and the driver: counted in calls of Python, not in time."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
from cuda.bindings import driver as cu

import nbep

pytestmark = pytest.mark.emulator_only("its GPU is none")
NUM_TOKENS, HIDDEN = 128, 7168
MOST_CALLS = 120  # of functions, Python's own and built in; 234 to 317 before anything was prepared
NUM_EXPERTS, NUM_RANKS = 64, fake_gpu.NUM_RANKS
RDMA_BYTES = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, NUM_RANKS, NUM_EXPERTS)
MOST_LOW_LATENCY_CALLS = {"plain": 78, "hook": 99, "async": 114}  # 144 to 250 before they were prepared


@pytest.fixture
def gpu(monkeypatch):
    """torch, a buffer and a handle of it, on a GPU that is none."""
    torch = fake_gpu.install(monkeypatch)
    buffer = fake_gpu.make_buffer(RDMA_BYTES, num_zero_copy_bytes=1 << 28)
    return torch, buffer, fake_gpu.handle_of(torch, buffer, NUM_TOKENS, 4)


def tokens(torch, fp8: bool):
    if not fp8:
        return torch.Tensor((NUM_TOKENS, HIDDEN), torch.bfloat16)
    scales = torch.Tensor((NUM_TOKENS, HIDDEN // 128), torch.float32, (1, NUM_TOKENS))
    return torch.Tensor((NUM_TOKENS, HIDDEN), torch.float8_e4m3fn), scales


def calls_of(function) -> int:
    """How many functions are called while this one runs."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("config", [None, nbep.Config(8, 4, 16)], ids=["default", "given"])
def test_a_cached_dispatch_is_prepared_by_the_first_calls(gpu, config, fp8, zero_copy):
    torch, buffer, handle = gpu

    x = tokens(torch, fp8)

    def call():
        return buffer.dispatch(x, handle=handle, config=config, zero_copy=zero_copy)[0]

    first, *_, later = (calls_of(call) for _ in range(4))
    assert later <= MOST_CALLS
    assert later < first / 2
    received = call()[0] if fp8 else call()
    assert tuple(received.shape) == (3 * NUM_TOKENS, HIDDEN)


def test_outputs_are_on_the_card_of_x_in_a_process_with_two(gpu):
    torch, buffer, handle = gpu
    there = tokens(torch, False)
    there.card = 1
    for x in (tokens(torch, False), there):
        for _ in range(3):
            assert buffer.dispatch(x, handle=handle)[0].get_device() == x.get_device()


def rows(torch, num_rows=3 * NUM_TOKENS):
    return torch.Tensor((num_rows, HIDDEN), torch.bfloat16)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("config", [None, nbep.Config(8, 4, 16)], ids=["default", "given"])
def test_a_combine_is_prepared_by_the_first_calls(gpu, config, with_weights, zero_copy):
    torch, buffer, handle = gpu
    weights = torch.Tensor((3 * NUM_TOKENS, 8), torch.float32) if with_weights else None
    x = rows(torch)

    def call():
        return buffer.combine(x, handle, weights, None, config, zero_copy=zero_copy)

    first, *_, later = (calls_of(call) for _ in range(4))
    assert later <= MOST_CALLS
    assert later < first / 2
    assert len(buffer._memory.combine_plans) == 1
    combined_x, combined_weights, _ = call()
    assert tuple(combined_x.shape) == (NUM_TOKENS, HIDDEN)
    assert (combined_weights is None) == (weights is None)


LOW_LATENCY = {
    "fp8": {},
    "bf16": {"use_fp8": False},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
    "deduplicate": {"deduplicate": True},
}


@pytest.mark.parametrize("way", ["plain", "hook", "async"])
@pytest.mark.parametrize("options", LOW_LATENCY.values(), ids=LOW_LATENCY)
def test_low_latency_calls_are_prepared_by_the_first_ones(gpu, options, way):
    torch, buffer, _ = gpu
    x, topk_idx = torch.Tensor((NUM_TOKENS, HIDDEN), torch.bfloat16), torch.Tensor((NUM_TOKENS, 8), torch.int64)
    weights = torch.Tensor((NUM_TOKENS, 8), torch.float32)
    expert_output = torch.Tensor((NUM_EXPERTS // NUM_RANKS, NUM_RANKS * NUM_TOKENS, HIDDEN), torch.bfloat16)
    out = torch.Tensor((NUM_TOKENS, HIDDEN), torch.bfloat16)
    ways = {"return_recv_hook": way == "hook", "async_finish": way == "async"}
    sent = options | ways | ({"topk_weights": weights} if "deduplicate" in options else {})

    def dispatch():
        *received, hook = buffer.low_latency_dispatch(x, topk_idx, NUM_TOKENS, NUM_EXPERTS, **sent)
        if hook is not None:
            hook()
        return received

    def combine(**more):
        hook = buffer.low_latency_combine(expert_output, topk_idx, weights, handle, **ways, **more)[-1]
        if hook is not None:
            hook()

    handle = dispatch()[2]
    for call in (dispatch, combine, lambda: combine(out=out)):
        *_, later = (calls_of(call) for _ in range(4))
        assert later <= MOST_LOW_LATENCY_CALLS[way]


def test_events_that_are_free_are_used_again_but_for_those_of_a_graph(gpu, monkeypatch):
    torch, buffer, handle = gpu
    made, destroyed = [], []

    def create(flags):
        made.append(len(made) + 1)
        return fake_gpu.SUCCESS, made[-1]

    monkeypatch.setattr(cu, "cuEventCreate", create)
    monkeypatch.setattr(cu, "cuEventDestroy", lambda event: destroyed.append(event) or (fake_gpu.SUCCESS,))
    x = tokens(torch, False)
    for _ in range(4):
        buffer.dispatch(x, handle)
    enough = len(made)
    held = [buffer.dispatch(x, handle)[-1] for _ in range(3)]
    assert len({overlap.event.event.event for overlap in held}) == 3
    for _ in range(8):
        buffer.dispatch(x, handle)
    assert len(made) <= enough + 3
    assert destroyed == []
    active = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (fake_gpu.SUCCESS, active))
    captured = [buffer.dispatch(x, handle)[-1] for _ in range(3)]
    numbers = {overlap.event.event.event for overlap in captured}
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (fake_gpu.SUCCESS, 0))
    del captured
    for _ in range(3):
        buffer.dispatch(x, handle)
    assert set(destroyed) == numbers
    for overlap in held:
        overlap.event.event.event = None  # none to destroy without the driver that made it
