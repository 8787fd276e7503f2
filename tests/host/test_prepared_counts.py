"""What the driver gets from a dispatch without a handle that was prepared, and what is still refused. No GPU."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
import no_gpu
from cuda.bindings import driver as cu

import nbep
from nbep.host.counters import Received
from nbep.host.target.cuda.launcher import LoadedKernel

pytestmark = pytest.mark.emulator_only("its GPU is none")
NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS, NUM_RANKS = 16, 512, 4, 32, fake_gpu.NUM_RANKS
ACTIVE = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


class Gpu:
    """A buffer, the arrays of a dispatch, and the launches of its calls."""

    def __init__(self, monkeypatch):
        self.torch = fake_gpu.install(monkeypatch)
        self.launches: list[tuple[str, dict]] = []

        def note(loaded, config, parameters):
            values = parameters._format.unpack_from(parameters._bytes)
            paths = [param.path for param in loaded.spec.params]
            self.launches.append((loaded.spec.name, dict(zip(paths, values, strict=True))))

        monkeypatch.setattr(LoadedKernel, "start", note)
        self.buffer = fake_gpu.make_buffer()

    def tensor(self, dtype, *shape, strides=None):
        return self.torch.Tensor(shape, getattr(self.torch, dtype), strides)

    def given(self, fp8=False, topk=True):
        x = self.tensor("bfloat16", NUM_TOKENS, HIDDEN)
        if fp8:
            scales = self.tensor("float32", NUM_TOKENS, HIDDEN // 128, strides=(1, NUM_TOKENS))
            x = self.tensor("float8_e4m3fn", NUM_TOKENS, HIDDEN), scales
        return {
            "x": x,
            "num_tokens_per_rank": self.tensor("int32", NUM_RANKS),
            "is_token_in_rank": self.tensor("bool", NUM_TOKENS, NUM_RANKS),
            "num_tokens_per_expert": self.tensor("int32", NUM_EXPERTS),
            "topk_idx": self.tensor("int64", NUM_TOKENS, NUM_TOPK) if topk else None,
            "topk_weights": self.tensor("float32", NUM_TOKENS, NUM_TOPK) if topk else None,
        }


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def address(value):
    return 0 if value is None else value.address


@pytest.mark.parametrize("topk", [True, False])
@pytest.mark.parametrize("fp8", [False, True])
def test_each_dispatch_launches_with_its_own_arrays_and_as_many_rows_as_come(gpu, monkeypatch, fp8, topk):
    for num_rows in (5, 9, 5, 0):
        monkeypatch.setattr(type(gpu.buffer._memory.counters), "poll", lambda *_, n=num_rows: Received(n, [n, 0], 0))
        given = gpu.given(fp8, topk)
        received, recv_idx, recv_weights, counts, handle, _ = gpu.buffer.dispatch(**given)
        x, scales = given["x"] if fp8 else (given["x"], None)
        recv_x, recv_scales = received if fp8 else (received, None)
        (first, notify), (second, sent) = gpu.launches
        gpu.launches.clear()
        assert (first, second) == ("notify_dispatch", "dispatch")
        for name in ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"):
            assert notify[f"inputs.{name}"] == given[name].address
        assert notify["out.rank_prefix_matrix"] == sent["inputs.rank_prefix_matrix"] == handle[0].address
        assert notify["out.channel_prefix_matrix"] == sent["inputs.channel_prefix_matrix"] == handle[1].address
        assert sent["inputs.is_token_in_rank"] == handle[4].address == given["is_token_in_rank"].address
        inputs = {"x": x, "x_scales": scales, "topk_idx": given["topk_idx"], "topk_weights": given["topk_weights"]}
        outputs = {"x": recv_x, "x_scales": recv_scales, "topk_idx": recv_idx, "topk_weights": recv_weights}
        outputs |= {"src_idx": handle[3], "channel_prefix_matrix": handle[2]}
        assert all(sent[f"inputs.{name}"] == address(array) for name, array in inputs.items())
        assert all(sent[f"out.recv_{name}"] == address(array) for name, array in outputs.items())
        assert sent["out.send_head"] == handle[5].address
        assert sent["sizes.num_recv_tokens"] == num_rows
        assert all(
            array.shape[0] == num_rows for array in (recv_x, recv_scales, recv_idx, handle[3]) if array is not None
        )
        assert counts == [num_rows, 0]
    assert len(gpu.buffer._memory.counted_plans) == 1


WRONG = {
    "x: got a strided bfloat16": {"x": ("bfloat16", (NUM_TOKENS, HIDDEN), (2 * HIDDEN, 1))},
    "x: got int32": {"x": ("int32", (NUM_TOKENS, HIDDEN))},
    r"is_token_in_rank: got bool \[17": {"is_token_in_rank": ("bool", (NUM_TOKENS + 1, NUM_RANKS))},
    "is_token_in_rank: got uint8": {"is_token_in_rank": ("uint8", (NUM_TOKENS, NUM_RANKS))},
    "num_tokens_per_rank: got int64": {"num_tokens_per_rank": ("int64", (NUM_RANKS,))},
    "num_tokens_per_rank: got None": {"num_tokens_per_rank": None},
    "size of num_tokens_per_expert: got 31": {"num_tokens_per_expert": ("int32", (NUM_EXPERTS - 1,))},
    "topk_idx: got int32": {"topk_idx": ("int32", (NUM_TOKENS, NUM_TOPK))},
    "topk_weights: got None": {"topk_weights": None},
    "num_worst_tokens: got -1": {"num_worst_tokens": -1},
    "expert_alignment: got 0": {"expert_alignment": 0},
    "config: got list": {"config": []},
    "config.num_sms: got 3": {"config": nbep.Config(3, 4, 16)},
    "async_finish: got 1": {"async_finish": 1},
}


def test_what_is_prepared_does_not_hide_what_is_wrong_with_the_next_dispatch(gpu, monkeypatch):
    right = {**gpu.given(), "num_worst_tokens": 64}
    gpu.buffer.dispatch(**right)
    gpu.launches.clear()
    for message, arguments in WRONG.items():
        for name, value in arguments.items():
            given = value
            if isinstance(value, tuple):
                dtype, shape, strides = (*value, None)[:3]
                given = gpu.tensor(dtype, *shape, strides=strides)
            with pytest.raises(ValueError, match=message):
                gpu.buffer.dispatch(**right | {name: given})
    with pytest.raises(ValueError, match=r"x\[1\]: got NoneType"):
        gpu.buffer.dispatch(**right | {"x": (right["x"], None)})
    assert gpu.launches == []
    gpu.buffer.dispatch(**right)
    assert len(gpu.launches) == 2


def test_a_capture_cannot_wait_for_counts_that_were_prepared_outside_of_one(gpu, monkeypatch):
    monkeypatch.setattr(type(gpu.buffer._memory.counters), "poll", lambda *_: Received(3, [3, 0], 0))
    gpu.buffer.dispatch(**gpu.given())
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (fake_gpu.SUCCESS, ACTIVE))
    with pytest.raises(ValueError, match="num_worst_tokens: got 0; must be positive in a CUDA graph"):
        gpu.buffer.dispatch(**gpu.given())


def test_a_capture_cannot_wait_for_counts_between_nodes_either(gpu, monkeypatch):
    buffer = no_gpu.make_buffer(NUM_RANKS, 1 << 28, 2, low_latency_mode=False)
    given = gpu.given() | {"num_tokens_per_rdma_rank": gpu.tensor("int32", 2)}
    buffer.dispatch(**given, num_worst_tokens=64)
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (fake_gpu.SUCCESS, ACTIVE))
    buffer.dispatch(**given, num_worst_tokens=64)
    with pytest.raises(ValueError, match="num_worst_tokens: got 0; must be positive in a CUDA graph"):
        buffer.dispatch(**given)
