"""What `nbep bench low-latency` measures: the calls of one shape, their inputs, whether they are right, their bytes.

Source: DeepEP tests/test_low_latency.py (test_main, test_func, large_gemm_with_hook)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import nbep
from nbep.bench.harness.report import Row
from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, header_bytes, header_offset, shape_of

DEVICE = "cuda"
FP8_LIMIT = 9e-4  # DeepEP's, of calc_diff
BF16_LIMIT = 1e-5
GAP_SIZE = 4096  # of the product between send and receive: 2 to 3 ms, and nothing stays in L2


class Variant(NamedTuple):
    """What is measured, besides the sizes that all measurements of a run share."""

    num_tokens: int  # of each rank, and the most that a rank may have
    use_fp8: bool = True
    use_logfmt: bool = False
    deduplicate: bool = False

    @property
    def dispatch(self) -> str:
        """What travels in a dispatch."""
        return "fp8" if self.use_fp8 else "bf16"

    @property
    def combine(self) -> str:
        return "logfmt" if self.use_logfmt else "bf16"

    @property
    def columns(self) -> Row:
        """As the rows of a report begin."""
        names = ("num_tokens", "deduplicate", "dispatch", "combine")
        return {name: getattr(self, name) for name in names}


class Bytes(NamedTuple):
    """Of one call of a rank.

    selections  DeepEP's unit: every choice of this rank's tokens, its own experts included
    wire        what leaves this rank, each message as long as it is there
    """

    selections: float
    wire: float


@dataclass
class Inputs:
    """One rank's, on its GPU."""

    x: Any
    topk_idx: Any
    topk_weights: Any


def make_inputs(rank: int, num_tokens: int, hidden: int, num_topk: int, num_experts: int) -> Inputs:
    """As DeepEP's test makes them: values so small that LogFMT encodes most; one choice in a hundred is unused."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(1 + rank)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, generator=generator)

    x = (0.1 * normal(num_tokens, hidden)).bfloat16()
    topk_idx = torch.topk(normal(num_tokens, num_experts).abs() + 1, num_topk, dim=-1)[1]
    num_choices = num_tokens * num_topk
    unused = torch.randint(num_choices, (num_choices // 100,), device=DEVICE, generator=generator)
    topk_idx.view(-1)[unused] = -1
    return Inputs(x, topk_idx, normal(num_tokens, num_topk).abs())


class Calls:
    """The calls of one variant on one rank: each takes what the one before it has returned."""

    def __init__(self, buffer: nbep.Buffer, variant: Variant, inputs: Inputs, num_experts: int, gap: Gap):
        import torch

        self.buffer = buffer
        self.variant = variant
        self.inputs = inputs
        self.num_experts = num_experts
        self.num_local_experts = num_experts // buffer.group_size
        self.gap = gap
        self.stats = torch.zeros(self.num_local_experts, dtype=torch.int32, device=DEVICE)
        self.expert_output: Any = None  # what combine sends; see `round_trip`
        self.received: Any = None
        self.count: Any = None
        self.handle: Any = None
        self.combined_x: Any = None
        self.hook: Any = None

    def clean(self) -> None:
        """A barrier of all ranks on their GPUs, after which the next call takes the first half of the buffer."""
        self.buffer.clean_low_latency_buffer(self.variant.num_tokens, self.inputs.x.shape[1], self.num_experts)

    def dispatch(self, return_recv_hook: bool = False) -> None:
        variant, inputs = self.variant, self.inputs
        self.received, self.count, self.handle, _, self.hook = self.buffer.low_latency_dispatch(
            inputs.x,
            inputs.topk_idx,
            variant.num_tokens,
            self.num_experts,
            cumulative_local_expert_recv_stats=self.stats,
            use_fp8=variant.use_fp8,
            return_recv_hook=return_recv_hook,
            deduplicate=variant.deduplicate,
            topk_weights=inputs.topk_weights if variant.deduplicate else None,
        )

    def forget_dispatch(self) -> None:
        self.received = self.count = self.handle = self.hook = None

    def forget_combine(self) -> None:
        self.combined_x = self.hook = None

    def combine(self, return_recv_hook: bool = False) -> None:
        self.combined_x, _, self.hook = self.buffer.low_latency_combine(
            self.expert_output,
            self.inputs.topk_idx,
            self.inputs.topk_weights,
            self.handle,
            use_logfmt=self.variant.use_logfmt,
            return_recv_hook=return_recv_hook,
        )

    def both(self) -> None:
        self.dispatch()
        self.combine()

    def send_dispatch(self) -> None:
        self.dispatch(return_recv_hook=True)

    def send_combine(self) -> None:
        self.combine(return_recv_hook=True)

    def receive(self) -> None:
        self.hook()

    def halves(self) -> None:
        self.send_dispatch()
        self.gap()
        self.receive()
        self.send_combine()
        self.gap()
        self.receive()

    def round_trip(self, everyones_choices: Any) -> list[str]:
        """Dispatch and combine once; what is wrong. Combine gets what dispatch has brought, and sends it from now on.

        Args: everyones_choices [num_ranks, num_tokens, num_topk], topk_idx of all ranks
        """
        import torch

        self.dispatch()
        faults = []
        first = self.buffer.rank * self.num_local_experts
        choices = torch.as_tensor(everyones_choices, device=DEVICE)
        wanted = torch.stack([(choices == first + i).sum() for i in range(self.num_local_experts)])
        if not torch.equal(self.count.long(), wanted.long()):
            faults.append(f"recv_count is {self.count.tolist()}, not {wanted.tolist()}")
        self.expert_output = as_bf16(self.received)
        self.combine()
        x, topk_idx, weights = self.inputs.x, self.inputs.topk_idx, self.inputs.topk_weights
        sums = weights.masked_fill(topk_idx == -1, 0).sum(dim=1, keepdim=True)
        limit = FP8_LIMIT if self.variant.use_fp8 or self.variant.use_logfmt else BF16_LIMIT
        difference = calc_diff(x.double() * sums.double(), self.combined_x.double())
        if not difference < limit:  # NaN is not below it either
            faults.append(f"calc_diff of combined_x is {difference:.2g}, not below {limit:g}")
        return faults


class Gap:
    """What a GPU does between send and receive: a product of two matrices, that pushes all else out of L2."""

    def __init__(self) -> None:
        import torch

        shape = (GAP_SIZE, GAP_SIZE)
        self.a, self.b, self.c = (torch.ones(shape, dtype=torch.float32, device=DEVICE) for _ in range(3))

    def __call__(self) -> None:
        import torch

        torch.mm(self.a, self.b, out=self.c)


def as_bf16(received: Any) -> Any:
    """Received rows in bf16, one expert after the other: in float32 all of them would take four times their memory."""
    import torch

    if not isinstance(received, tuple):
        return received
    values, scales = received
    rows = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    for row, value, scale in zip(rows, values, scales, strict=True):
        parts = value.float().view(len(value), -1, COLUMNS_PER_SCALE)
        row.copy_((parts * scale.unsqueeze(-1)).view(value.shape))
    return rows


def calc_diff(x: Any, y: Any) -> float:
    """DeepEP's measure of two float64 tensors, 0 if they are equal.

    Source: DeepEP tests/utils.py, calc_diff
    """
    x, y = x + 1, y + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def bytes_of(variant: Variant, choices: Any, rank: int, hidden: int, num_experts: int) -> dict[str, Bytes]:
    """What one rank's dispatch and combine move, by verb.

    Args: choices [num_ranks, num_tokens, num_topk] NumPy, topk_idx of all ranks
    """
    num_ranks, _, num_topk = choices.shape
    shape = shape_of(
        num_ranks,
        num_experts,
        variant.num_tokens,
        hidden,
        num_topk if variant.deduplicate else 0,
        int(variant.use_fp8),
        int(variant.deduplicate),
        0,
    )
    selection = {
        "dispatch": hidden + hidden / 128 * 4 + 16 if variant.use_fp8 else 2 * hidden,
        "combine": hidden * 10 / 8 + hidden / 128 * 4 if variant.use_logfmt else 2 * hidden,
    }
    message = {"dispatch": header_offset(shape) + header_bytes(shape), "combine": selection["combine"]}
    destinations = choices // (num_experts // num_ranks)  # -1 stays -1
    num_selections = int((choices[rank] >= 0).sum())
    messages = {"dispatch": 0, "combine": 0}
    for peer in range(num_ranks):
        if peer != rank:
            leaves, comes = destinations[rank] == peer, destinations[peer] == rank  # what comes goes back in combine
            messages["dispatch"] += int((leaves.any(1) if variant.deduplicate else leaves).sum())
            messages["combine"] += int((comes.any(1) if variant.deduplicate else comes).sum())
    return {verb: Bytes(num_selections * selection[verb], messages[verb] * message[verb]) for verb in messages}
