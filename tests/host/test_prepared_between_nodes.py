"""Calls between nodes with a handle that were prepared: what the driver gets, and what is still refused. No GPU."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
import no_gpu

import nbep
from nbep.host.internode.handle import InternodeHandle
from nbep.host.target.cuda.launcher import LoadedKernel

pytestmark = pytest.mark.emulator_only("its GPU is none")
NUM_TOKENS, NUM_ROWS, NUM_PASSED, HIDDEN, NUM_TOPK, NUM_NODES, CHANNELS = 16, 24, 40, 512, 4, 2, 4
NUM_RANKS = fake_gpu.NUM_RANKS


class Gpu:
    """A buffer between nodes, a handle of it, and the launches of its calls."""

    def __init__(self, monkeypatch):
        self.torch = fake_gpu.install(monkeypatch)
        self.launches: list[tuple[str, dict]] = []

        def note(loaded, config, parameters):
            values = parameters._format.unpack_from(parameters._bytes)
            paths = [param.path for param in loaded.spec.params]
            self.launches.append((loaded.spec.name, dict(zip(paths, values, strict=True))))

        monkeypatch.setattr(LoadedKernel, "start", note)
        self.buffer = no_gpu.make_buffer(NUM_RANKS, 1 << 28, NUM_RANKS // NUM_NODES, low_latency_mode=False)
        of_nodes, of_ranks = (NUM_NODES, CHANNELS), (NUM_RANKS, CHANNELS)
        shapes = of_nodes, of_ranks, of_nodes, (NUM_NODES,), of_ranks, (NUM_RANKS,), (NUM_ROWS, 2)
        arrays = [self.tensor("int32", *shape) for shape in shapes]
        heads = self.tensor("int32", NUM_TOKENS, NUM_NODES), self.tensor("int32", NUM_PASSED, NUM_RANKS // NUM_NODES)
        in_rank = self.tensor("bool", NUM_TOKENS, NUM_RANKS)
        self.handle = InternodeHandle(in_rank, *arrays, *heads).owned_by(self.buffer._memory.identity, 1)

    def tensor(self, dtype, *shape, strides=None):
        return self.torch.Tensor(shape, getattr(self.torch, dtype), strides)

    def tokens(self, fp8=False):
        if not fp8:
            return self.tensor("bfloat16", NUM_TOKENS, HIDDEN)
        scales = self.tensor("float32", NUM_TOKENS, HIDDEN // 128, strides=(1, NUM_TOKENS))
        return self.tensor("float8_e4m3fn", NUM_TOKENS, HIDDEN), scales

    def rows(self, num_rows=NUM_ROWS):
        return self.tensor("bfloat16", num_rows, HIDDEN)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def address(value):
    return 0 if value is None else value.address


@pytest.mark.parametrize("fp8", [False, True])
def test_cached_dispatches_launch_with_their_own_arrays(gpu, fp8):
    for _ in range(3):
        given = gpu.tokens(fp8)
        received = gpu.buffer.dispatch(given, handle=gpu.handle)[0]
        (first, notify), (second, sent) = gpu.launches
        gpu.launches.clear()
        assert (first, second) == ("internode_cached_notify", "internode_dispatch")
        assert notify["heads.send_rdma_head"] == notify["heads.send_nvl_head"] == 0
        for of, name in ((given, "inputs.x"), (received, "out.recv_x")):
            x, scales = of if fp8 else (of, None)
            assert (sent[name], sent[f"{name}_scales"]) == (address(x), address(scales))
        for name in ("is_token_in_rank", "rdma_channel_prefix_matrix", "recv_gbl_rank_prefix_sum"):
            assert sent[f"inputs.{name}"] == getattr(gpu.handle, name).address
        assert sent["out.recv_src_meta"] == sent["out.send_nvl_head"] == sent["inputs.topk_idx"] == 0
        assert (sent["sizes.num_recv_tokens"], sent["sizes.num_rdma_recv_tokens"]) == (NUM_ROWS, NUM_PASSED)
    assert len(gpu.buffer._memory.cached_plans) == 1


@pytest.mark.parametrize("with_weights", [False, True])
def test_combines_launch_with_their_own_arrays(gpu, with_weights):
    for _ in range(3):
        x, bias = gpu.rows(), gpu.rows(NUM_TOKENS)
        weights = gpu.tensor("float32", NUM_ROWS, NUM_TOPK) if with_weights else None
        combined_x, combined_weights, _ = gpu.buffer.combine(x, gpu.handle, weights, (None, bias))
        (first, notify), (second, sent) = gpu.launches
        gpu.launches.clear()
        assert (first, second) == ("internode_cached_notify", "internode_combine")
        for name in ("send_rdma_head", "send_nvl_head"):
            assert notify[f"heads.{name}"] == sent[f"inputs.{name}"] == getattr(gpu.handle, name).address
        wanted = {"inputs.x": x, "inputs.topk_weights": weights, "inputs.bias_0": None, "inputs.bias_1": bias}
        wanted |= {"out.combined_x": combined_x, "out.combined_topk_weights": combined_weights}
        assert all(sent[path] == address(array) for path, array in wanted.items())
        assert tuple(combined_x.shape) == (NUM_TOKENS, HIDDEN)
    assert len(gpu.buffer._memory.combine_plans) == 1


def test_what_is_prepared_does_not_hide_what_is_wrong_with_the_next_call(gpu):
    dispatch = {"x": gpu.tokens(), "handle": gpu.handle}
    combine = {"x": gpu.rows(), "handle": gpu.handle, "topk_weights": gpu.tensor("float32", NUM_ROWS, NUM_TOPK)}
    strided = gpu.tensor("bfloat16", NUM_TOKENS, HIDDEN, strides=(2 * HIDDEN, 1))
    other = InternodeHandle(*gpu.handle).owned_by(no_gpu.make_buffer(2)._memory.identity, 1)
    wrong = [
        (dispatch, "x: got a strided bfloat16", {"x": strided}),
        (dispatch, "x: got 17 tokens", {"x": gpu.tensor("bfloat16", NUM_TOKENS + 1, HIDDEN)}),
        (dispatch, r"x\[1\]: got NoneType", {"x": (gpu.tokens(), None)}),
        (dispatch, "topk_idx: got Tensor; must be None", {"topk_idx": gpu.tensor("int64", NUM_TOKENS, NUM_TOPK)}),
        (dispatch, "handle: got the handle of another buffer", {"handle": other}),
        (dispatch, "config.num_sms: got 4", {"config": nbep.Config(4, 4, 16)}),
        (combine, r"x: got bfloat16 \[16", {"x": gpu.rows(NUM_TOKENS)}),
        (combine, "x: got float16", {"x": gpu.tensor("float16", NUM_ROWS, HIDDEN)}),
        (combine, "topk_weights: got int32", {"topk_weights": gpu.tensor("int32", NUM_ROWS, NUM_TOPK)}),
        (combine, "bias_1: got bfloat16", {"bias": (None, gpu.rows())}),
        (combine, "bias: got a tuple of 3", {"bias": (None, None, None)}),
        (combine, "handle: got the handle of another buffer", {"handle": other}),
        (combine, "config.num_sms: got 4", {"config": nbep.Config(4, 4, 16)}),
        (combine, "async_finish: got 1", {"async_finish": 1}),
    ]
    gpu.buffer.dispatch(**dispatch)
    gpu.buffer.combine(**combine)
    gpu.launches.clear()
    for right, message, arguments in wrong:
        verb = gpu.buffer.dispatch if right is dispatch else gpu.buffer.combine
        with pytest.raises(ValueError, match=message):
            verb(**right | arguments)
    assert gpu.launches == []
    assert len(gpu.buffer._memory.cached_plans) == len(gpu.buffer._memory.combine_plans) == 1
