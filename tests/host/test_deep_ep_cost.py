"""What nbep.deep_ep and torch's modes may not add to the cost of a call."""

import copy
import pickle
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
import no_gpu
from bench_host import FOR_THE_CPU, low_latency_verbs, normal_verbs

import nbep
import nbep.deep_ep as deep_ep
from nbep.host.low_latency.handle import LowLatencyTuple

pytestmark = pytest.mark.emulator_only("its GPU is none")
NUM_TOKENS, HIDDEN, NUM_EXPERTS = 8, 512, 16
RDMA_BYTES = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, fake_gpu.NUM_RANKS, NUM_EXPERTS)


@pytest.mark.parametrize("front", [nbep.Buffer, deep_ep.Buffer], ids=["nbep", "deep_ep"])
def test_no_attribute_of_a_tensor_passes_through_a_mode_of_torch(front):
    torch = pytest.importorskip("torch")
    entered = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            entered.append(function)
            return function(*args, **(kwargs or {}))

    hint = nbep.Buffer.get_low_latency_rdma_size_hint(8, 512, 2, FOR_THE_CPU.low_latency_experts)
    with no_gpu.tensors_of_the_cpu():
        buffer = no_gpu.make_buffer(2, hint, front=front)
        verbs = low_latency_verbs(buffer, torch, FOR_THE_CPU, "cpu") | normal_verbs(buffer, torch, FOR_THE_CPU, "cpu")
        for verb, call in verbs.items():
            call()
            with Mode():
                call()
            assert entered == [], verb
    with Mode():
        torch.zeros(1).add_(1)
    assert entered


@pytest.fixture
def dispatched(monkeypatch):
    """A low-latency dispatch of nbep.deep_ep that returns its handle, and a combine, on a GPU that is none."""
    torch = fake_gpu.install(monkeypatch)
    buffer = no_gpu.make_buffer(fake_gpu.NUM_RANKS, RDMA_BYTES, front=deep_ep.Buffer)
    x, topk_idx = torch.Tensor((NUM_TOKENS, HIDDEN), torch.bfloat16), torch.Tensor((NUM_TOKENS, 4), torch.int64)
    weights = torch.Tensor((NUM_TOKENS, 4), torch.float32)
    rows = torch.Tensor((NUM_EXPERTS // fake_gpu.NUM_RANKS, fake_gpu.NUM_RANKS * NUM_TOKENS, HIDDEN), torch.bfloat16)

    def dispatch():
        return buffer.low_latency_dispatch(x, topk_idx, NUM_TOKENS, NUM_EXPERTS)[2]

    return dispatch, lambda given: buffer.low_latency_combine(rows, topk_idx, weights, given)


def test_arrays_of_a_handle_are_made_when_somebody_reads_them(dispatched):
    dispatch, combine = dispatched
    combine(dispatch())  # which checks all
    handle = dispatch()
    combine(handle)
    parts = handle.arrays
    assert parts._arrays is None
    src_info, layout_range, *sizes = handle
    assert parts._arrays is not None
    assert sizes == [NUM_TOKENS, HIDDEN, NUM_EXPERTS]
    assert handle[0] is src_info
    assert handle[1] is layout_range
    combine(handle)
    combine(tuple(handle))


def test_a_handle_is_a_tuple_for_whoever_asks(dispatched):
    handle = dispatched[0]()
    assert isinstance(handle, tuple)
    assert len(handle) == 5
    assert handle[2:] == (NUM_TOKENS, HIDDEN, NUM_EXPERTS)
    assert list(handle) == [*handle]
    assert (1, *handle)[1:] == tuple(handle)
    assert (handle + (1,))[:5] == ((1,) + handle)[1:] == tuple(handle)  # noqa: RUF005
    assert HIDDEN in handle
    assert handle.hidden == HIDDEN
    with pytest.raises(TypeError, match="__class__"):
        handle.__class__ = list
    with pytest.raises(TypeError):
        "%s %s" % handle  # a tuple's own memory, which is not there  # noqa: UP031


def test_a_copy_of_a_handle_is_a_handle():
    handle = LowLatencyTuple(((1,), (2,)), (3, 4, 5))
    for made in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert type(made) is LowLatencyTuple
        assert tuple(made) == tuple(handle) == ((1,), (2,), 3, 4, 5)
