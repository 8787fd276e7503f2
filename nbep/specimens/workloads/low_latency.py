"""The low-latency verbs through `nbep.Buffer`, and their outputs compared with `nbep.reference`, bit for bit.

A `Trip` is one dispatch and one combine of a rank, in four steps, so that the steps of several trips can be mixed:

 send_dispatch -> receive_dispatch -> send_combine -> receive_combine

Rows of one expert and source come in any order: `LowLatencyDispatched.in_order` sorts them before they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nbep
from nbep import reference
from nbep.device.cards import SM90, ComputeCapability
from nbep.device.layout.low_latency import NUM_HALVES, shape_of
from nbep.host.low_latency.memory import quarter_bytes_needed
from nbep.specimens.workloads.cases import Case, Report, assert_kind, assign, is_exact, to_numpy, to_target

# What experts multiply by, in turn: all are powers of two but the tiny ones, and 1, tiny, -1 cancel.
FACTORS = np.array([1, -1, 1.5 * 2**-18, 1, -1, 1.25 * 2**-17, 0.5], np.float32)
BOTH, HOOK, ASYNC = "both", "hook", "async"
STATS_BEFORE = 7  # statistics are added to what was there
LOGFMT_ON_A_GPU = 1e-6  # calc_diff: its logarithms are approximations


@dataclass(frozen=True)
class Options:
    """How one dispatch and one combine are called.

    dispatch_as, combine_as: BOTH phases in one launch, with a HOOK, or ASYNC
    spare: by how much num_max_dispatch_tokens_per_rank exceeds the largest number of tokens
    compute_capability: of the card whose paths kernels take; on the emulator only
    over_nic: everything between ranks goes through the software NIC
    """

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    deduplicate: bool = False
    dispatch_as: str = BOTH
    use_logfmt: bool = False
    zero_copy: bool = False
    combine_as: str = BOTH
    with_out: bool = False
    with_stats: bool = False
    spare: int = 0
    compute_capability: ComputeCapability = SM90
    over_nic: bool = False


@dataclass
class Outcome:
    """What one rank got back, in NumPy arrays."""

    dispatched: reference.LowLatencyDispatched
    num_max_tokens: int
    hidden: int
    num_experts: int
    combined_x: np.ndarray | None = None
    stats: list[np.ndarray] = field(default_factory=list)  # recv_stats, wait of dispatch, wait of combine


def num_max_tokens(case: Case, options: Options) -> int:
    return max(1, *case.num_tokens) + options.spare


def num_rdma_bytes(case: Case, options: Options) -> int:
    """Exactly what the calls need, so that a write past the halves is out of bounds."""
    num_topk = case.topk_idx[0].shape[1]
    most = num_max_tokens(case, options)
    shape = shape_of(case.num_ranks, case.num_experts, most, case.hidden, num_topk, 0, int(options.deduplicate), 0)
    return 2 * NUM_HALVES * quarter_bytes_needed(shape)


def make_buffer(comm, trips: Sequence[tuple[Case, Options]], **arguments: Any) -> nbep.Buffer:
    """A buffer that is just large enough for some calls. NBEP_TRANSPORT chooses its network."""
    num_bytes = max(num_rdma_bytes(case, options) for case, options in trips)
    if any(options.over_nic for _, options in trips):
        # So small that queues wrap, and that a message lies in several chunks.
        nic = nbep.NicOptions(num_entries=64, chunk_bytes=256, seed=1)
        arguments = {"transport": "ibgda", "num_nvl_peers": 1, "nic": nic, **arguments}
    arguments = {"num_qps_per_rank": max(case.num_experts // case.num_ranks for case, _ in trips), **arguments}
    if any(options.with_stats for _, options in trips):
        arguments = {"check_calls": True, **arguments}  # else combine waits for no rank that has no rows for this one
    return nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True, **arguments)


def expert_output(dispatched: reference.LowLatencyDispatched, rank: int) -> np.ndarray:
    """What the experts of a rank make of their rows: something that differs from expert to expert.

    Rows past recv_count become NaN, so that one that is read shows.
    """
    values, scales = dispatched.recv_x, dispatched.recv_x_scales
    num_local_experts = len(values)
    out = np.full(values.shape, np.nan, reference.BF16)
    for local_expert in range(num_local_experts):
        used = values[local_expert, : dispatched.recv_count[local_expert]]
        if scales is not None:
            factors = scales[local_expert, : len(used)]
            used = reference.per_token_cast_back(
                used, reference.unpack_ue8m0(factors) if factors.dtype == np.int32 else factors
            )
        factor = FACTORS[(rank * num_local_experts + local_expert) % len(FACTORS)]
        out[local_expert, : len(used)] = (used.astype(np.float32) * factor).astype(reference.BF16)
    return out


class Trip:
    """One dispatch and one combine of one rank; the steps come in order, those of other trips may lie between them."""

    def __init__(self, buffer: nbep.Buffer, case: Case, options: Options):
        self.buffer = buffer
        self.case = case
        self.options = options
        rank = buffer.rank
        self.topk_idx, self.topk_weights = to_target((case.topk_idx[rank], case.topk_weights[rank]))
        self.outcome: Any = None  # an Outcome, from receive_dispatch on
        self._stats: list[Any] = [None, None, None]
        if options.with_stats:
            num_local_experts = case.num_experts // case.num_ranks
            before = [
                np.full(num_local_experts, STATS_BEFORE, np.int32),
                *np.full((2, case.num_ranks), STATS_BEFORE, np.int64),
            ]
            self._stats = to_target(before)

    def send_dispatch(self) -> None:
        options, x = self.options, to_target(self.case.x[self.buffer.rank])
        self._recv_x, self._recv_count, self.handle, self.event, hook = self.buffer.low_latency_dispatch(
            x,
            self.topk_idx,
            num_max_tokens(self.case, options),
            self.case.num_experts,
            cumulative_local_expert_recv_stats=self._stats[0],
            dispatch_wait_recv_cost_stats=self._stats[1],
            use_fp8=options.use_fp8,
            round_scale=options.round_scale,
            use_ue8m0=options.use_ue8m0,
            async_finish=options.dispatch_as == ASYNC,
            return_recv_hook=options.dispatch_as == HOOK,
            deduplicate=options.deduplicate,
            topk_weights=self.topk_weights if options.deduplicate else None,
        )
        self._receive = receiver(self.event, hook, options.dispatch_as)

    def receive_dispatch(self) -> None:
        self._receive()
        recv_x, scales = self._recv_x if isinstance(self._recv_x, tuple) else (self._recv_x, None)
        src_info, layout_range, most, hidden, num_experts = self.handle
        assert_kind(recv_x, scales, self._recv_count, src_info, layout_range)
        if isinstance(scales, np.ndarray) or callable(getattr(scales, "stride", None)):
            stride = scales.strides[1] // scales.itemsize if isinstance(scales, np.ndarray) else scales.stride()[1]
            assert stride == 1, "scales of neighbouring rows do not lie side by side"
        on_host = to_numpy([recv_x, scales, self._recv_count, src_info, layout_range])
        self.outcome = Outcome(reference.LowLatencyDispatched(*on_host), most, hidden, num_experts)

    def expert_output(self) -> np.ndarray:
        """What combine sends back for the rows of dispatch."""
        return expert_output(self.outcome.dispatched, self.buffer.rank)

    def send_combine(self, handle: Any = None) -> None:
        """handle: in place of that of the dispatch."""
        options, rank = self.options, self.buffer.rank
        x = self.expert_output()
        handle = self.handle if handle is None else handle
        if options.zero_copy:
            place = self.buffer.get_next_low_latency_combine_buffer(handle)
            assert_kind(place)
            assign(place, x)
            x = np.full_like(x, np.nan)  # it must not be read
        out = None
        if options.with_out:
            out = to_target(np.zeros(self.case.x[rank].shape, reference.BF16))
        self._combined_x, self.event, hook = self.buffer.low_latency_combine(
            to_target(x),
            self.topk_idx,
            self.topk_weights,
            handle,
            use_logfmt=options.use_logfmt,
            zero_copy=options.zero_copy,
            async_finish=options.combine_as == ASYNC,
            return_recv_hook=options.combine_as == HOOK,
            out=out,
            combine_wait_recv_cost_stats=self._stats[2],
        )
        assert out is None or self._combined_x is out
        self._receive = receiver(self.event, hook, options.combine_as)

    def receive_combine(self) -> None:
        self._receive()
        assert_kind(self._combined_x)
        self.outcome.combined_x = to_numpy(self._combined_x)
        if self.options.with_stats:
            self.outcome.stats = to_numpy(self._stats)

    def whole(self) -> Outcome:
        """All four steps."""
        self.send_dispatch()
        self.receive_dispatch()
        self.send_combine()
        self.receive_combine()
        return self.outcome


def receiver(event: Any, hook: Any, called_as: str) -> Callable[[], None]:
    """What has to be called before the outputs of a call are there."""
    assert (hook is not None) == (called_as == HOOK)
    if called_as == HOOK:
        return hook
    return event.current_stream_wait if called_as == ASYNC else lambda: None


def check(case: Case, options: Options, outcomes: Sequence[Outcome], where: str, leave_out: Sequence[int] = ()) -> None:
    """Compare all outputs of all ranks but some. A failure names rank, array and the first wrong token's way.

    where: seeds and all else that begins each message
    """
    dispatched = expected_dispatch(case, options)
    combined = expected_combine(case, options, dispatched)
    for rank, outcome in enumerate(outcomes):
        if rank in leave_out:
            continue
        report = Report(f"{where}, rank {rank}")
        check_dispatched(report, case, options, rank, dispatched[rank], outcome)
        check_combined(report, case, options, rank, combined[rank], outcome)
        if options.with_stats:
            recv_stats, dispatch_wait, combine_wait = outcome.stats
            report.same("cumulative_local_expert_recv_stats", recv_stats, STATS_BEFORE + dispatched[rank].recv_count)
            assert (dispatch_wait > STATS_BEFORE).all(), f"{report.where}, {dispatch_wait}"
            assert (combine_wait > STATS_BEFORE).all(), f"{report.where}, {combine_wait}"


def expected_dispatch(case: Case, options: Options) -> list[reference.LowLatencyDispatched]:
    """What the reference says that every rank receives."""
    return reference.low_latency_dispatch(
        case.x,
        case.topk_idx,
        num_max_tokens(case, options),
        case.num_experts,
        use_fp8=options.use_fp8,
        round_scale=options.round_scale,
        use_ue8m0=options.use_ue8m0,
    )


def expected_combine(
    case: Case, options: Options, dispatched: list[reference.LowLatencyDispatched]
) -> list[np.ndarray]:
    """What the reference says that every rank's tokens add up to."""
    return reference.low_latency_combine(
        [expert_output(of_rank, rank) for rank, of_rank in enumerate(dispatched)],
        case.topk_idx,
        case.topk_weights,
        dispatched,
        use_logfmt=options.use_logfmt,
        deduplicate=options.deduplicate,
    )


def check_dispatched(
    report: Report, case: Case, options: Options, rank: int, want: reference.LowLatencyDispatched, outcome: Outcome
) -> None:
    got = outcome.dispatched
    sizes = (outcome.num_max_tokens, outcome.hidden, outcome.num_experts)
    assert sizes == (num_max_tokens(case, options), case.hidden, case.num_experts), report.where
    num_local_experts = len(want.recv_count)
    experts = [f"r{rank}e{local_expert}" for local_expert in range(num_local_experts)]
    report.same("recv_count", got.recv_count, want.recv_count, experts)
    report.same("layout_range", got.layout_range, want.layout_range, experts)
    for name in ("recv_x", "recv_x_scales", "src_info"):
        whole_got, whole_want = getattr(got, name), getattr(want, name)
        assert (whole_got is None) == (whole_want is None), f"{report.where}, {name}"
        if whole_want is not None:
            shapes = (whole_got.shape, whole_got.dtype), (whole_want.shape, whole_want.dtype)
            assert shapes[0] == shapes[1], f"{report.where}, {name}"
    got = got.in_order()
    for local_expert in range(num_local_experts):
        used = int(want.recv_count[local_expert])
        sources = [src for src in range(case.num_ranks) for _ in want.rows_of(local_expert, src)]
        rows = [
            case.provenance(src, int(token))
            for src, token in zip(sources, want.src_info[local_expert, :used], strict=True)
        ]
        for name in ("src_info", "recv_x", "recv_x_scales"):
            whole_got, whole_want = getattr(got, name), getattr(want, name)
            if whole_want is not None:
                where = f"{name} of {experts[local_expert]}"
                report.same(where, whole_got[local_expert, :used], whole_want[local_expert, :used], rows)


def check_combined(report: Report, case: Case, options: Options, rank: int, want: np.ndarray, outcome: Outcome) -> None:
    if outcome.combined_x is None:
        return
    got = outcome.combined_x
    if options.use_logfmt and not is_exact():
        assert (got.shape, got.dtype) == (want.shape, want.dtype), report.where
        assert reference.calc_diff(got, want) < LOGFMT_ON_A_GPU, report.where
        return
    report.same("combined_x", got, want, [case.provenance(rank, token) for token in range(len(want))])
