"""Dispatch and combine through `nbep.ElasticBuffer`, and their outputs compared with `nbep.reference`, bit for bit.

The bodies run once per rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nbep
from nbep import reference
from nbep.specimens.workloads.cases import Case, Report, assert_kind, to_numpy, to_target
from nbep.specimens.workloads.internode import NIC
from nbep.specimens.workloads.intranode import Options as IntranodeOptions
from nbep.specimens.workloads.intranode import biases, dispatch_input, expert_output, expert_weights

STATS_BEFORE = 7  # statistics are added to what was there


@dataclass(frozen=True)
class ElasticOptions:
    """How one dispatch and one combine are called.

    fp8: see intranode.Options
    spare: by how much num_max_tokens_per_rank exceeds the largest number of tokens
    num_sms: blocks of each kernel, at most
    is_cached: dispatch is called again with its handle, and combine takes what comes then
    own_weights: each rank gives combine weights of its own for all choices; else it gives back what it received
    is_shared: x of dispatch and combine lies in shared rows
    num_nodes, transport, nic: between nodes, see Buffer
    """

    do_expand: bool = False
    do_cpu_sync: bool = True
    expert_alignment: int = 1
    fp8: str | None = None
    with_weights: bool = True
    own_weights: bool = False
    num_biases: int = 0
    do_zero_padding: bool = False
    by_column: bool = False
    do_handle_copy: bool = True
    with_stats: bool = False
    is_cached: bool = False
    allow_multiple_reduction: bool = True
    allow_hybrid_mode: bool = True
    spare: int = 1
    num_sms: int = 2
    is_shared: bool = False
    num_nodes: int = 1
    transport: str = "direct"
    nic: nbep.NicOptions = NIC

    def num_nvl_ranks(self, num_ranks: int) -> int:
        """How many ranks add up their sums of a token before one of them sends it."""
        is_hybrid = self.allow_hybrid_mode and self.allow_multiple_reduction and self.num_nodes > 1
        return num_ranks // self.num_nodes if is_hybrid else 1

    @property
    def as_intranode(self) -> IntranodeOptions:
        """For what is the same there."""
        return IntranodeOptions(fp8=self.fp8, num_biases=self.num_biases)


@dataclass
class ElasticOutcome:
    """What one rank got back, in NumPy arrays."""

    recv_x: Any
    recv_topk_idx: Any
    recv_topk_weights: Any
    handle: dict[str, Any] = field(default_factory=dict)
    stats: Any = None
    cached: tuple = field(default_factory=tuple)
    combined_x: Any = None
    combined_topk_weights: Any = None


HANDLE_ARRAYS = (
    "topk_idx",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_of_ranks",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


def num_max_tokens(case: Case, options: ElasticOptions) -> int:
    return max(1, *case.num_tokens) + options.spare


def make_elastic_buffer(comm: Any, calls: list[tuple[Case, ElasticOptions]]) -> nbep.ElasticBuffer:
    """A buffer that is large enough for the calls of some cases."""
    options = calls[0][1]

    class OfNodes(nbep.ElasticBuffer):
        _network = options.transport, comm.size // options.num_nodes, options.nic

    buffer = (nbep.ElasticBuffer if options.num_nodes == 1 else OfNodes)(
        comm,
        num_max_tokens_per_rank=max(num_max_tokens(case, options) for case, options in calls),
        hidden=max(case.hidden for case, _ in calls),
        num_topk=max(case.topk_idx[0].shape[1] for case, _ in calls),
        allow_multiple_reduction=options.allow_multiple_reduction,
        allow_hybrid_mode=options.allow_hybrid_mode,
    )
    if options.is_shared:
        rows = sum(comm.size * num_max_tokens(case, options) for case, options in calls)
        buffer.make_rows(rows, max(case.hidden for case, _ in calls))
    return buffer


def dispatch_arguments(case: Case, options: ElasticOptions, rank: int) -> dict[str, Any]:
    """What a rank's dispatch is called with, but for statistics."""
    topk_idx, topk_weights = to_target((case.topk_idx[rank], case.topk_weights[rank]))
    return {
        "x": to_target(dispatch_input(case, options.as_intranode, rank)),
        "topk_idx": topk_idx,
        "topk_weights": topk_weights if options.with_weights else None,
        "num_experts": case.num_experts,
        "num_max_tokens_per_rank": num_max_tokens(case, options),
        "expert_alignment": options.expert_alignment,
        "num_sms": options.num_sms,
        "do_cpu_sync": options.do_cpu_sync,
        "do_handle_copy": options.do_handle_copy,
        **form(options),
    }


def form(options: ElasticOptions) -> dict[str, Any]:
    """What a dispatch with a handle takes, too."""
    return {
        "do_expand": options.do_expand,
        "do_zero_padding": options.do_zero_padding,
        "use_tma_aligned_col_major_sf": options.by_column,
    }


def received_trips(
    buffer: nbep.ElasticBuffer, cases: Iterable[Case], options: ElasticOptions, is_async: bool = True
) -> list[Trip]:
    """A trip for each case, all dispatched one behind the other, and then received."""
    trips: list[Trip] = []
    for case in cases:
        trips.append(Trip(buffer, case, options, is_async, sum(trip.num_shared for trip in trips)))
    for trip in trips:
        trip.dispatch()
    for trip in trips:
        trip.receive()
    return trips


class Trip:
    """One dispatch and one combine of a rank, in steps, so that those of several trips can be mixed.

    dispatch -> receive -> combine -> end; until receive and end nothing is waited for if the calls are asynchronous
    """

    def __init__(
        self, buffer: nbep.ElasticBuffer, case: Case, options: ElasticOptions, is_async: bool = False, begin: int = 0
    ):
        """begin: of its rows, where x lies in shared ones"""
        self.buffer, self.case, self.options, self.begin = buffer, case, options, begin
        self.num_shared = case.num_ranks * num_max_tokens(case, options)
        self.way: dict[str, Any] = {"async_with_compute_stream": is_async}
        self.arguments = dispatch_arguments(case, options, buffer.rank_idx)
        self.stats: Any = None
        self.outcome: Any = None  # an ElasticOutcome, from receive on
        self.shared: Any = None  # x of the latest call, if it lies in shared rows

    def share(self, array: Any) -> Any:
        """The array, or a copy in shared rows."""
        if not self.options.is_shared:
            return array
        memory = self.buffer._memory
        assert memory is not None
        assert memory.elastic is not None
        assert memory.elastic.rows is not None
        rows = memory.elastic.rows
        begin = self.begin * self.case.hidden // rows.hidden
        if isinstance(array, tuple):
            like = tuple(np.empty((begin + len(each), each.shape[1]), each.dtype) for each in array)
            shared = tuple(each[begin:] for each in rows.like(like))
            for to, values in zip(shared, array, strict=True):
                to[:] = values
            self.shared = (shared[0], array[1]) if self.options.fp8 == "mixed" else shared
        else:
            self.shared = rows.like(np.empty(begin + len(array)), array.dtype.name)[begin:]
            self.shared[:] = array
        return self.shared

    def dispatch(self) -> None:
        options, case = self.options, self.case
        self.arguments["x"] = self.share(self.arguments["x"])
        if options.with_stats:
            self.stats = to_target(np.full(case.num_experts // case.num_ranks, STATS_BEFORE, np.int32))
        *self.received, self.handle, self.event = self.buffer.dispatch(
            **self.arguments, cumulative_local_expert_recv_stats=self.stats, **self.way
        )
        self.first = self.received
        if options.is_cached:
            again = {name: self.arguments[name] for name in ("x", "topk_weights")}
            *self.received, same, self.event = self.buffer.dispatch(
                **again, **form(options), handle=self.handle, **self.way
            )
            assert same is self.handle

    def receive(self) -> None:
        self.event.current_stream_wait()
        handle = self.handle
        assert_kind(*self.received, *self.first)
        assert (handle.topk_idx is self.arguments["topk_idx"]) == (not self.options.do_handle_copy)
        of_handle = {name: to_numpy(getattr(handle, name)).copy() for name in HANDLE_ARRAYS}
        of_handle["num_recv_tokens_per_expert_list"] = handle.num_recv_tokens_per_expert_list
        for recv_x in (self.first[0], self.received[0]):
            if isinstance(recv_x, tuple):
                check_strides(recv_x[1], self.options.by_column)
        recv_x, recv_topk_idx, recv_topk_weights = map(to_numpy, self.first)
        self.outcome = ElasticOutcome(recv_x, recv_topk_idx, recv_topk_weights, of_handle, to_numpy(self.stats))
        if self.options.is_cached:
            self.outcome.cached = tuple(map(to_numpy, self.received))

    def combine(self) -> None:
        rank, options, case = self.buffer.rank_idx, self.options, self.case
        recv_x, _, weights = self.received
        weights = to_target(expert_weights(options, to_numpy(weights), rank))
        x = to_target(expert_rows(case, options, to_numpy(recv_x), rank))
        *self.combined, self.event = self.buffer.combine(
            x if options.do_expand else self.share(x),  # an expanded combine refuses shared rows
            self.handle,
            topk_weights=weights,
            bias=to_target(biases(case, options.as_intranode, rank)),
            **self.way,
        )

    def end(self) -> ElasticOutcome:
        self.event.current_stream_wait()
        for each in self.shared if isinstance(self.shared, tuple) else (self.shared,):
            if each is not None:
                each[:] = 0  # all ranks have met behind their reads
        self.outcome.combined_x, self.outcome.combined_topk_weights = map(to_numpy, self.combined)
        for name in HANDLE_ARRAYS:
            is_same = (to_numpy(getattr(self.handle, name)) == self.outcome.handle[name]).all()
            assert is_same, f"{name}: changed by a later call"
        return self.outcome


def call(buffer: nbep.ElasticBuffer, case: Case, options: ElasticOptions) -> ElasticOutcome:
    """Dispatch and combine of one rank."""
    trip = Trip(buffer, case, options)
    trip.dispatch()
    trip.receive()
    if options.by_column:  # torch loads a kernel to read gaps, and that waits for ranks of the card that spin already
        buffer.group.barrier()
    trip.combine()
    return trip.end()


def round_trip(comm: Any, case: Case, options: ElasticOptions) -> ElasticOutcome:
    """One rank's dispatch and combine with a buffer of its own."""
    buffer = make_elastic_buffer(comm, [(case, options)])
    outcome = call(buffer, case, options)
    buffer.destroy()
    return outcome


def expert_rows(case: Case, options: ElasticOptions, recv_x: Any, rank: int) -> np.ndarray:
    """What the experts of a rank make of its rows; if expanded, rows of different experts differ, too."""
    rows = expert_output(case, options.as_intranode, recv_x, rank)
    if not options.do_expand:
        return rows
    with np.errstate(all="ignore"):
        factors = np.array([1, -2, 1.5 * 2**-18, 4, 1], np.float32)[np.arange(len(rows)) % 5]
        return (rows.astype(np.float32) * factors[:, None]).astype(reference.BF16)


class ElasticExpected:
    """What the reference says that every rank gets."""

    def __init__(self, case: Case, options: ElasticOptions):
        self.case, self.options = case, options
        x = [dispatch_input(case, options.as_intranode, rank) for rank in range(case.num_ranks)]
        self.dispatched = reference.elastic_dispatch(
            x,
            case.topk_idx,
            case.topk_weights,
            case.num_experts,
            num_max_tokens(case, options),
            expert_alignment=options.expert_alignment,
            do_expand=options.do_expand,
            num_rows=None if options.do_cpu_sync else self.worst_rows,
        )
        received = [(d.recv_x, d.recv_x_scales) if options.fp8 else d.recv_x for d in self.dispatched]
        weights = [expert_weights(options, d.recv_topk_weights, rank) for rank, d in enumerate(self.dispatched)]
        self.combined = reference.elastic_combine(
            [self.rows_of_experts(rows, rank) for rank, rows in enumerate(received)],
            self.dispatched,
            case.topk_idx,
            topk_weights=weights if options.with_weights else None,
            bias=[biases(case, options.as_intranode, rank) for rank in range(case.num_ranks)],
            reduces=options.allow_multiple_reduction,
            num_nvl_ranks=options.num_nvl_ranks(case.num_ranks),
        )

    def rows_of_experts(self, recv_x: Any, rank: int) -> np.ndarray:
        """What a rank gives to combine."""
        return expert_rows(self.case, self.options, recv_x, rank)

    @property
    def worst_rows(self) -> int:
        """Of the outputs without CPU sync."""
        case, options = self.case, self.options
        tokens = case.num_ranks * num_max_tokens(case, options)
        if not options.do_expand:
            return tokens
        num_local_experts, alignment = case.num_experts // case.num_ranks, options.expert_alignment
        rows = tokens * min(case.topk_idx[0].shape[1], num_local_experts) + (alignment - 1) * num_local_experts
        return -(-rows // alignment) * alignment

    def check(self, rank: int, outcome: ElasticOutcome, where: str) -> None:
        """Compare all outputs of one rank."""
        case, options, want, report = self.case, self.options, self.dispatched[rank], Report(where)
        self._check_received(report, want, (outcome.recv_x, outcome.recv_topk_idx, outcome.recv_topk_weights))
        if options.is_cached:
            self._check_received(report, want, outcome.cached)
        self._check_handle(report, want, outcome.handle, rank)
        if options.with_stats:
            report.same("stats", outcome.stats, want.num_tokens_per_expert + np.int32(STATS_BEFORE))
        sent = [case.provenance(rank, token) for token in range(len(case.x[rank]))]
        combined_x, combined_weights = self.combined[rank]
        report.same("combined_x", outcome.combined_x, combined_x, sent)
        assert (outcome.combined_topk_weights is None) == (combined_weights is None), where
        if combined_weights is not None:
            report.same("combined_topk_weights", outcome.combined_topk_weights, combined_weights, sent)

    def _check_received(self, report: Report, want: reference.ElasticDispatched, received: tuple) -> None:
        options, used = self.options, want.row_is_token
        values, scales = received[0] if isinstance(received[0], tuple) else (received[0], None)
        assert len(values) == len(want.recv_x), report.where
        compared = used.copy()
        if options.do_zero_padding:  # rows that pad an expert are 0; what is past all experts holds anything
            compared[: sum(want.num_aligned)] = True
        report.same("recv_x", values[compared], want.recv_x[compared])
        assert (scales is None) == (want.recv_x_scales is None), report.where
        if scales is not None and want.recv_x_scales is not None:
            report.same("scales", np.ascontiguousarray(scales[compared]), want.recv_x_scales[compared])
        assert (received[1] is None) == options.do_expand, report.where
        if want.recv_topk_idx is not None:
            report.same("recv_topk_idx", received[1], want.recv_topk_idx)
        assert (received[2] is None) == (not options.with_weights), report.where
        if received[2] is not None:
            report.same("recv_topk_weights", received[2], want.recv_topk_weights)

    def _check_handle(
        self, report: Report, want: reference.ElasticDispatched, handle: dict[str, Any], rank: int
    ) -> None:
        case, options = self.case, self.options
        report.same("topk_idx", handle["topk_idx"], case.topk_idx[rank])
        report.same("psum of ranks", handle["psum_of_ranks"], want.psum_per_rank)
        num_scaleup_ranks = case.num_ranks // (options.num_nodes if options.allow_hybrid_mode else 1)
        report.same(
            "psum of scaleup ranks",
            handle["psum_num_recv_tokens_per_scaleup_rank"],
            want.psum_by_local_index(num_scaleup_ranks),
        )
        report.same("psum of experts", handle["psum_num_recv_tokens_per_expert"], want.psum_per_expert)
        report.same("unaligned", handle["num_unaligned_recv_tokens_per_expert"], want.num_tokens_per_expert)
        report.same("dst_buffer_slot_idx", handle["dst_buffer_slot_idx"], want.dst_idx)
        metadata = handle["recv_src_metadata"]
        report.same("recv_src_metadata", metadata[: len(want.metadata)], want.metadata)
        assert (metadata[len(want.metadata) :] == -1).all(), report.where
        counts = want.num_aligned if options.do_cpu_sync else []
        assert handle["num_recv_tokens_per_expert_list"] == counts, report.where


def check_strides(scales: Any, by_column: bool) -> None:
    """Scales lie by row without gaps; by column, each of which begins at a multiple of 16 bytes."""
    num_rows, num_columns = scales.shape
    if hasattr(scales, "stride"):  # torch's
        row, column = scales.stride()
    else:
        row, column = (stride // scales.dtype.itemsize for stride in scales.strides)
    if num_rows * num_columns > 0:
        wanted = (1, -(-num_rows // 4) * 4) if by_column else (num_columns, 1)
        found = row if num_rows > 1 else wanted[0], column if num_columns > 1 else wanted[1]
        assert found == wanted, f"strides of scales: {found}, expected {wanted}"


def check(case: Case, options: ElasticOptions, outcomes: list[ElasticOutcome], where: str) -> None:
    """Compare all outputs of all ranks."""
    expected = ElasticExpected(case, options)
    for rank, outcome in enumerate(outcomes):
        expected.check(rank, outcome, f"inputs {case.seed}, {where}, rank {rank}")
