"""What a cached dispatch costs the CPU between the call and the driver: counted in calls of Python, not in time."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu

import nbep

NUM_TOKENS, HIDDEN = 128, 7168
MOST_CALLS = 225  # of functions, Python's own and built in; 234 to 317 before anything was prepared


@pytest.fixture
def gpu(monkeypatch):
    """torch, a buffer and a handle of it, on a GPU that is none."""
    torch = fake_gpu.install(monkeypatch)
    buffer = fake_gpu.make_buffer(num_zero_copy_bytes=1 << 28)
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


def test_other_tokens_and_another_config_are_prepared_anew(gpu):
    torch, buffer, handle = gpu
    for fp8 in (False, True):
        for config in (None, nbep.Config(8, 4, 16), nbep.Config(8, 4, 16)):
            for zero_copy in (False, True):
                buffer.dispatch(tokens(torch, fp8), handle=handle, config=config, zero_copy=zero_copy)
    assert len(handle.plans) == 2 * 2 * 2


def test_what_is_prepared_does_not_hide_what_is_wrong_with_the_next_array(gpu):
    torch, buffer, handle = gpu
    buffer.dispatch(tokens(torch, False), handle=handle)
    strided = torch.Tensor((NUM_TOKENS, HIDDEN), torch.bfloat16, (2 * HIDDEN, 1))
    with pytest.raises(ValueError, match="x: got a strided bfloat16"):
        buffer.dispatch(strided, handle=handle)
    with pytest.raises(ValueError, match=f"x: got {NUM_TOKENS - 1} tokens"):
        buffer.dispatch(torch.Tensor((NUM_TOKENS - 1, HIDDEN), torch.bfloat16), handle=handle)
    with pytest.raises(ValueError, match="topk_idx: got Tensor; must be None together with a handle"):
        buffer.dispatch(tokens(torch, False), handle=handle, topk_idx=torch.Tensor((NUM_TOKENS, 2), torch.int64))


def test_combine_without_rings_gets_to_the_driver(gpu):
    torch, buffer, handle = gpu
    x = torch.Tensor((3 * NUM_TOKENS, HIDDEN), torch.bfloat16)
    combined_x, weights, _ = buffer.combine(x, handle, zero_copy=True)
    assert tuple(combined_x.shape) == (NUM_TOKENS, HIDDEN)
    assert weights is None
