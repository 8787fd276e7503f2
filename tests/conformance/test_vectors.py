"""Vectors for implementers: both buffers of nbep pass, also between nodes, and wrong adapters are caught."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import nbep  # noqa: E402
import nbep.deep_ep as deep_ep  # noqa: E402
from nbep.conformance import vectors  # noqa: E402

TOGETHER = vectors.vectors()
CONFIG = deep_ep.Config(2, 4, 8, 4, 8)


class OfBuffer:
    def __init__(self, group, sizes, num_rdma_bytes=0):
        self.b, self.sizes = deep_ep.Buffer(group, 1 << 22, num_rdma_bytes), sizes

    def dispatch(self, x, idx, weights):
        per_rank, per_node, per_expert, in_rank, _ = self.b.get_dispatch_layout(idx, self.sizes["experts"])
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node}
        layout |= {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        return self.b.dispatch(x, topk_idx=idx, topk_weights=weights, config=CONFIG, **layout)[:5]

    def again(self, x, handle):
        return self.b.dispatch(x, handle=handle, config=CONFIG)[0]

    def combine(self, rows, handle, weights):
        return self.b.combine(rows, handle, topk_weights=weights, config=CONFIG)[:2]

    def scaled(self, x, scales, idx, weights):
        return self.dispatch((x, scales), idx, weights)[0]


class OfElasticBuffer:
    def __init__(self, group, sizes):
        self.num_experts = sizes["experts"]
        sizes = {"num_max_tokens_per_rank": sizes["most"], "hidden": sizes["hidden"], "num_topk": sizes["topk"]}
        self.b = deep_ep.ElasticBuffer(group, **sizes)

    def _dispatch(self, x, idx, weights, **options):
        return self.b.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=self.num_experts, num_sms=2, do_cpu_sync=True, **options
        )

    def dispatch(self, x, idx, weights):
        rows, choices, weights, handle, _ = self._dispatch(x, idx, weights)
        return rows, choices, weights, handle.num_recv_tokens_per_expert_list, handle

    def again(self, x, handle):
        return self.b.dispatch(x, handle=handle, num_sms=2)[0]

    def combine(self, rows, handle, weights):
        return self.b.combine(rows, handle=handle, topk_weights=weights, num_sms=2)[:2]

    def scaled(self, x, scales, idx, weights):
        return self._dispatch((x, scales), idx, weights)[0]

    def expanded(self, x, idx, weights):
        rows, _, weights, handle, _ = self._dispatch(x, idx, weights, do_expand=True, expert_alignment=1)
        return rows, handle.num_recv_tokens_per_expert_list, weights, handle


class OfLowLatency(OfBuffer):
    def __init__(self, group, sizes):
        super().__init__(group, sizes)
        self.most = sizes["most"]
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.most, sizes["hidden"], group.size, sizes["experts"])
        self.fast = deep_ep.Buffer(group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=2)

    def low_latency(self, x, idx):
        rows, counts, handle, _, _ = self.fast.low_latency_dispatch(
            x, idx, self.most, self.sizes["experts"], use_fp8=False
        )
        return rows, counts, handle

    def low_latency_combine(self, rows, idx, weights, handle):
        return self.fast.low_latency_combine(rows, idx, weights, handle)[0]


def wrong(adapter, of=TOGETHER, kinds=vectors.KINDS, **options):
    """What is wrong on any rank, by kind."""
    sizes = vectors.json.loads(str(of["meta"]))["sizes"]

    def main(comm):
        made = adapter(comm, sizes)
        found = {kind: vectors.check(made, of, kind, int(comm.rank)) for kind in kinds}
        made.b.destroy()
        return {kind: texts for kind, texts in found.items() if texts}

    return [each for each in nbep.spawn(main, sizes["ranks"], "emulator", **options) if each]


def test_the_file_is_what_the_loops_make():
    with np.load(vectors.FILE) as stored:
        assert sorted(stored) == sorted(TOGETHER)
        assert all(np.array_equal(stored[name], array) for name, array in TOGETHER.items())
    assert vectors.FILE.stat().st_size < 80_000


@pytest.mark.parametrize("adapter", [OfBuffer, OfElasticBuffer, OfLowLatency])
@pytest.mark.parametrize("model", ["sc", "delayed", "checked"])
def test_nbeps_buffers_pass(adapter, model):
    kinds = vectors.KINDS if model == "sc" else vectors.KINDS[:2]
    assert wrong(adapter, kinds=kinds, memory_model=model) == []


def test_two_nodes_pass(monkeypatch):
    monkeypatch.setenv("NBEP_NUM_NVL_PEERS", "2")
    of_four = vectors.vectors(ranks=4, experts=8)
    kinds = vectors.KINDS[:2]
    assert wrong(lambda group, sizes: OfBuffer(group, sizes, 1 << 24), of_four, kinds) == []


class Twice(OfBuffer):
    def combine(self, rows, handle, weights):
        x, weights = super().combine(rows, handle, weights)
        return x + x, weights


class NoMinusOne(OfBuffer):
    def dispatch(self, x, idx, weights):
        rows, choices, *rest = super().dispatch(x, idx, weights)
        return rows, choices.clamp(min=0), *rest


class Aligned(OfBuffer):
    def dispatch(self, x, idx, weights):
        rows, choices, weights, counts, handle = super().dispatch(x, idx, weights)
        return rows, choices, weights, [-(-count // 8) * 8 for count in counts], handle


class OtherOrder(OfBuffer):
    def again(self, x, handle):
        return super().again(x, handle).flip(0)


class LostWeights(OfBuffer):
    def combine(self, rows, handle, weights):
        return super().combine(rows, handle, None)


class NoScales(OfBuffer):
    def scaled(self, x, scales, idx, weights):
        rows, scales = super().scaled(x, scales, idx, weights)
        return rows, torch.ones_like(scales)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (Twice, "combined: wrong in"),
        (NoMinusOne, "local choices: wrong in"),
        (Aligned, "counts: wrong in"),
        (OtherOrder, "gradient of x: wrong in"),
        (LostWeights, "combined weights: None"),
        (NoScales, "sources of FP8 rows times scales: wrong in"),
    ],
)
def test_a_wrong_adapter_is_caught(adapter, said):
    texts = [text for found in wrong(adapter, kinds=["plain"]) for text in found["plain"]]
    assert any(text.startswith(said) for text in texts), texts
