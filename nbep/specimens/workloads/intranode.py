"""Layout, dispatch and combine through `nbep.Buffer`, and their outputs compared with `nbep.reference`, bit for bit.

The bodies run once per rank. They serve the mode between nodes, too: what differs there is a method of `Options`, and
internode.py has other methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

import nbep
from nbep import reference
from nbep.device.layout.direct import DirectShape, num_direct_bytes_needed
from nbep.device.layout.intranode import num_nvl_bytes_needed
from nbep.specimens.workloads.cases import Case, Report, assert_kind, routes_of, to_numpy, to_target

# What the experts of each rank multiply by. 1, -2, tiny, 1 cancel: another order, or rounding in between, shows.
# All are powers of two but the tiny ones, so that nothing else is rounded.
FACTORS = np.array([1, -2, 1.5 * 2**-18, 1, 0.5, -4, 1.25 * 2**-17, 4], np.float32)
CONFIG = nbep.Config(4, 2, 4)  # two channels, chunks of two tokens, rings of four: smaller than most traffic


# Of Options; tests of several ways and of other numbers of channels change them.
DEFAULTS: dict[str, Any] = {"zero_copy": False, "num_channels": 2}


def with_channels(config: nbep.Config) -> nbep.Config:
    """A config with as many channels as DEFAULTS say."""
    return replace(config, num_sms=2 * DEFAULTS["num_channels"])


@dataclass(frozen=True)
class Options:
    """How one dispatch and one combine are called.

    fp8: None for bf16; "row" and "column" are the order of the scales in memory, "mixed" the one on even ranks and the
         other on odd ones; "packed" are int32 scales
    num_biases: 0, 1 or 2
    handle_type: of the buffer
    own_weights: each rank gives combine weights of its own for all choices; else it gives back what it received
    zero_copy: dispatch and combine without rings; see both_ways
    """

    config: nbep.Config = field(default_factory=lambda: with_channels(CONFIG))
    with_topk: bool = True
    fp8: str | None = None
    expert_alignment: int = 1
    num_worst_tokens: int = 0
    num_biases: int = 0
    handle_type: str = "ipc"
    own_weights: bool = False
    zero_copy: bool = field(default_factory=lambda: DEFAULTS["zero_copy"])

    # What a mode has of its own

    def buffer_arguments(self, case: Case) -> dict[str, Any]:
        """What a buffer is made with; those that end with _bytes are exactly what the calls need."""
        return {
            "num_nvl_bytes": 0 if self.zero_copy else num_nvl_bytes(case, self),
            "num_zero_copy_bytes": num_zero_copy_bytes(case, self) if self.zero_copy else 0,
            "handle_type": self.handle_type,
        }

    @property
    def way(self) -> dict[str, Any]:
        """What both verbs take to go without rings."""
        return {"zero_copy": True} if self.zero_copy else {}

    def factors(self, case: Case, rank: int) -> np.ndarray:
        """What the experts of a rank multiply by: a number, or one for each column."""
        return FACTORS[rank]

    def heads(self, handle: Any) -> tuple:
        """The arrays of a handle that combine rewrites."""
        return (handle.send_head,)

    def reference_dispatch(self, case: Case, x: list, **options: Any) -> list:
        return reference.dispatch(x, case.layouts, self.config.num_channels, **options)

    def reference_combine(self, case: Case, x: list[np.ndarray], dispatched: list, **options: Any) -> list:
        return reference.combine(x, dispatched, **options)

    def check_layout(self, report: Report, case: Case, rank: int, layout: tuple, sent: list[str]) -> None:
        check_layout(report, case.layouts[rank], layout, sent)

    def check_handle(
        self, report: Report, case: Case, want: Any, outcome: Outcome, sent: list[str], received: list[str]
    ) -> None:
        check_handle(report, want, outcome, sent, received, combine_encodes=not self.zero_copy)


@dataclass
class Outcome:
    """What one rank got back, in arrays of the target but for the heads."""

    layout: tuple
    recv_x: Any
    recv_topk_idx: Any
    recv_topk_weights: Any
    counts: list[int]
    handle: Any
    heads: tuple  # before combine rewrote them
    combined_x: Any = None
    combined_topk_weights: Any = None
    cached_x: Any = None

    def on_host(self) -> Outcome:
        """The same in NumPy arrays, the handle as a tuple of them."""
        arrays = {f.name: to_numpy(getattr(self, f.name)) for f in fields(self) if f.name != "handle"}
        return Outcome(**arrays, handle=to_numpy(tuple(self.handle)))


def num_nvl_bytes(case: Case, options: Options) -> int:
    """Exactly what the calls need, so that a write past the rings is out of bounds."""
    num_topk = case.topk_idx[0].shape[1] if options.with_topk else 0
    shape = options.config.ring_shape(case.num_ranks, 2 * case.hidden, num_topk, case.hidden // 128, 1)
    return num_nvl_bytes_needed(shape)


def num_zero_copy_bytes(case: Case, options: Options) -> int:
    """What the calls need: a half has room for a bf16 row of each token that comes to the busiest rank, or for
    num_worst_tokens, and what the sizes of the shares and of small parts leave over.
    """
    num_topk = case.topk_idx[0].shape[1] if options.with_topk else 0
    config, num_ranks = options.config, case.num_ranks
    num_rows = max(sum(layout.num_tokens_per_rank[rank] for layout in case.layouts) for rank in range(num_ranks))
    num_scales = case.hidden // 128 if options.fp8 else 0
    shape = DirectShape(config.num_channels, 2 * case.hidden, num_topk, num_scales, 1)
    return num_direct_bytes_needed(max(num_rows, options.num_worst_tokens, 1), num_ranks, shape)


def dispatch_input(case: Case, options: Options, rank: int):
    """x of one rank as dispatch takes it."""
    if options.fp8 is None:
        return case.x[rank]
    if options.fp8 == "packed":
        # Four opaque bytes a scale; dispatch must not look into them.
        rng = np.random.default_rng(case.seed + rank)
        scales = rng.integers(-(2**31), 2**31, (len(case.x[rank]), case.hidden // 128), dtype=np.int32)
        return reference.per_token_cast_to_fp8(case.x[rank])[0], scales
    x_fp8, scales = reference.per_token_cast_to_fp8(case.x[rank])
    by_column = options.fp8 == "column" or (options.fp8 == "mixed" and rank % 2 == 1)
    return x_fp8, (np.asfortranarray(scales) if by_column else scales)


def expert_output(case: Case, options: Options, recv_x, rank: int) -> np.ndarray:
    """What the experts of a rank make of its tokens: something that differs from rank to rank."""
    values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    with np.errstate(all="ignore"):  # rows that num_worst_tokens added hold anything
        if scales is not None and scales.dtype == np.float32:
            values = reference.per_token_cast_back(values, scales)
        return (values.astype(np.float32) * options.factors(case, rank)).astype(reference.BF16)


def expert_weights(options: Any, recv_topk_weights: Any, rank: int) -> Any:
    """The weights that a rank gives to combine."""
    if recv_topk_weights is None or not options.own_weights:
        return recv_topk_weights
    with np.errstate(all="ignore"):
        return (recv_topk_weights + np.float32(1)) / np.float32(rank + 3)


def biases(case: Case, options: Options, rank: int):
    rng = np.random.default_rng(case.seed + 100 + rank)
    # Every other row is tiny, for the same reason as FACTORS.
    size = np.where(np.arange(len(case.x[rank])) % 2, np.float32(2**-17), np.float32(1))[:, None]
    arrays = [
        (rng.standard_normal(case.x[rank].shape, np.float32) * size).astype(reference.BF16)
        for _ in range(options.num_biases)
    ]
    return {0: None, 1: arrays[0] if arrays else None, 2: tuple(arrays)}[options.num_biases]


def dispatch_arguments(buffer: nbep.Buffer, case: Case, options: Options, rank: int) -> tuple[tuple, dict[str, Any]]:
    """The layout of one rank, and what its dispatch is called with."""
    topk_idx, topk_weights = to_target((case.topk_idx[rank], case.topk_weights[rank]))
    layout = buffer.get_dispatch_layout(topk_idx, case.num_experts)[:4]
    topk = {"topk_idx": topk_idx, "topk_weights": topk_weights} if options.with_topk else {}
    return layout, {
        "x": to_target(dispatch_input(case, options, rank)),
        **routes_of(layout),
        "expert_alignment": options.expert_alignment,
        "num_worst_tokens": options.num_worst_tokens,
        "config": options.config,
        **topk,
        **options.way,
    }


def dispatch(buffer: nbep.Buffer, case: Case, options: Options, rank: int) -> Outcome:
    """Layout and dispatch of one rank."""
    layout, arguments = dispatch_arguments(buffer, case, options, rank)
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, _ = buffer.dispatch(**arguments)
    return outcome_of(options, layout, recv_x, recv_topk_idx, recv_topk_weights, counts, handle)


def outcome_of(options: Options, layout: tuple, recv_x, recv_topk_idx, recv_topk_weights, counts, handle) -> Outcome:
    """What a dispatch gave, which is done."""
    assert_kind(layout, recv_x, recv_topk_idx, recv_topk_weights, tuple(handle))
    received = kept(options, recv_x), kept(options, recv_topk_idx), kept(options, recv_topk_weights)
    if options.zero_copy:
        handle = replace(handle, recv_src_idx=kept(options, handle.recv_src_idx))
    return Outcome(layout, *received, counts, handle, copied_heads(options, handle))


def kept(options: Options, received: Any) -> Any:
    """What was received, copied if it is the caller's for a while only."""
    if not options.zero_copy or received is None:
        return received
    if isinstance(received, tuple):
        return tuple(kept(options, part) for part in received)
    return to_target(to_numpy(received).copy())


def copied_heads(options: Options, handle: Any) -> tuple:
    """Before combine rewrites them."""
    return tuple(to_numpy(head).copy() for head in options.heads(handle))


def combine(buffer: nbep.Buffer, case: Case, options: Options, rank: int, outcome: Outcome) -> None:
    """Combine of one rank; unused rows of num_worst_tokens are not touched by it."""
    weights = outcome.recv_topk_weights
    if options.own_weights:
        weights = to_target(expert_weights(options, to_numpy(weights), rank))
    outcome.combined_x, outcome.combined_topk_weights, _ = buffer.combine(
        to_target(expert_output(case, options, to_numpy(outcome.recv_x), rank)),
        outcome.handle,
        topk_weights=weights,
        bias=to_target(biases(case, options, rank)),
        config=options.config,
        **options.way,
    )
    assert_kind(outcome.combined_x, outcome.combined_topk_weights)


def make_buffer(comm, case: Case, options: Options) -> nbep.Buffer:
    """A buffer that is just large enough for the calls of one case."""
    return make_buffer_for(comm, [(case, options)])


def make_buffer_for(comm, calls: Sequence[tuple[Case, Options]]) -> nbep.Buffer:
    """A buffer that is just large enough for the calls of some cases."""
    of_calls = [options.buffer_arguments(case) for case, options in calls]
    largest = {name: max(of_call[name] for of_call in of_calls) for name in of_calls[0] if name.endswith("_bytes")}
    return nbep.Buffer(comm, **{**of_calls[0], **largest})


def round_trip(comm, case: Case, options: Options) -> Outcome:
    """One rank's layout, dispatch and combine with a buffer of its own."""
    buffer = make_buffer(comm, case, options)
    outcome = dispatch(buffer, case, options, buffer.rank)
    combine(buffer, case, options, buffer.rank, outcome)
    buffer.destroy()
    return outcome


def expected_dispatch(case: Case, options: Options) -> list[reference.Dispatched]:
    """What the reference says that every rank receives."""
    return options.reference_dispatch(
        case,
        [dispatch_input(case, options, rank) for rank in range(case.num_ranks)],
        topk_idx=case.topk_idx if options.with_topk else None,
        topk_weights=case.topk_weights if options.with_topk else None,
        expert_alignment=options.expert_alignment,
        num_worst_tokens=options.num_worst_tokens,
    )


def check(case: Case, options: Options, outcomes: list[Outcome], seed: int) -> None:
    """Compare all outputs of all ranks. A failure names seeds, rank, array and the first wrong token's way."""
    expected = Expected(case, options)
    for rank, outcome in enumerate(outcomes):
        expected.check(rank, outcome, f"inputs {case.seed}, schedule {seed}, rank {rank}")


class Expected:
    """What the reference says that every rank gets."""

    def __init__(self, case: Case, options: Options):
        self.case = case
        self.options = options
        self.dispatched = expected_dispatch(case, options)
        self._combined: list | None = None

    @property
    def combined(self) -> list[tuple[Any, Any]]:
        """combined_x and combined_topk_weights of every rank."""
        if self._combined is None:
            self._combined = expected_combine(self.case, self.options, self.dispatched)
        return self._combined

    def check(self, rank: int, outcome: Outcome, where: str) -> None:
        """Compare all outputs of one rank. Raises: AssertionError if any differs"""
        self.compare(rank, outcome, Report(where))

    def compare(self, rank: int, outcome: Outcome, report: Report) -> None:
        """The same, by a report that may do something else than raise."""
        outcome = outcome.on_host()
        case, want, where = self.case, self.dispatched[rank], report.where
        received = [
            case.provenance(int(src), int(token))
            for src, token in zip(want.recv_src_rank, want.recv_src_idx, strict=True)
        ]
        sent = [case.provenance(rank, token) for token in range(len(case.x[rank]))]
        self.options.check_layout(report, case, rank, outcome.layout, sent)
        check_received(report, want, outcome, received)
        self.options.check_handle(report, case, want, outcome, sent, received)
        if outcome.cached_x is not None:
            check_x(report, "cached recv_x", want, outcome.cached_x, received)
        if outcome.combined_x is not None:
            combined_x, combined_topk_weights = self.combined[rank]
            report.same("combined_x", outcome.combined_x, combined_x, sent)
            assert (outcome.combined_topk_weights is None) == (not self.options.with_topk), where
            if self.options.with_topk:
                report.same("combined_topk_weights", outcome.combined_topk_weights, combined_topk_weights, sent)


def check_layout(
    report: Report,
    want: reference.Layout,
    layout: tuple,
    sent: list[str],
    want_per_rdma_rank: np.ndarray | None = None,
) -> None:
    num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank = layout
    report.same("num_tokens_per_rank", num_tokens_per_rank, want.num_tokens_per_rank)
    if want_per_rdma_rank is None:
        assert num_tokens_per_rdma_rank is None, report.where
    else:
        report.same("num_tokens_per_rdma_rank", num_tokens_per_rdma_rank, want_per_rdma_rank)
    report.same("num_tokens_per_expert", num_tokens_per_expert, want.num_tokens_per_expert)
    report.same("is_token_in_rank", is_token_in_rank, want.is_token_in_rank, sent)


def check_x(report: Report, name: str, want: Any, recv_x, received: list[str]) -> None:
    """Rows that num_worst_tokens added may hold anything."""
    values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    used = len(received)
    assert len(values) == len(want.recv_x), report.where
    report.same(name, values[:used], want.recv_x[:used], received)
    assert (scales is None) == (want.recv_x_scales is None), report.where
    if scales is not None:
        assert scales.flags.c_contiguous, report.where
        assert len(scales) == len(want.recv_x), report.where
        report.same(f"scales of {name}", scales[:used], want.recv_x_scales[:used], received)


def check_received(report: Report, want: Any, outcome: Outcome, received: list[str]) -> None:
    check_x(report, "recv_x", want, outcome.recv_x, received)
    counts = np.array(outcome.counts), np.array(want.num_recv_tokens_per_expert_list)
    report.same("num_recv_tokens_per_expert_list", counts[0], counts[1])
    assert (outcome.recv_topk_idx is None) == (want.recv_topk_idx is None), report.where
    if want.recv_topk_idx is not None:
        report.same("recv_topk_idx", outcome.recv_topk_idx, want.recv_topk_idx, received)
        report.same("recv_topk_weights", outcome.recv_topk_weights, want.recv_topk_weights, received)


def check_handle(
    report: Report,
    want: reference.Dispatched,
    outcome: Outcome,
    sent: list[str],
    received: list[str],
    combine_encodes: bool = True,
) -> None:
    rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, is_token_in_rank, send_head = outcome.handle
    report.same("rank_prefix_matrix", rank_prefix, want.rank_prefix_matrix)
    report.same("channel_prefix_matrix", channel_prefix, want.channel_prefix_matrix)
    report.same("recv_channel_prefix_matrix", recv_channel_prefix, want.recv_channel_prefix_matrix)
    report.same("recv_src_idx", recv_src_idx[: len(received)], want.recv_src_idx, received)
    report.same("is_token_in_rank", is_token_in_rank, want.is_token_in_rank, sent)
    report.same("send_head", outcome.heads[0], want.send_head, sent)
    if outcome.combined_x is not None:
        num_channels = want.channel_prefix_matrix.shape[1]
        after = reference.encode_send_head(want.send_head, num_channels) if combine_encodes else want.send_head
        report.same("send_head after combine", send_head, after, sent)


def expected_combine(case: Case, options: Options, dispatched: list[reference.Dispatched]) -> list[tuple[Any, Any]]:
    """What the reference says that every rank's tokens add up to."""
    if options.num_worst_tokens:
        dispatched = expected_dispatch(case, replace(options, num_worst_tokens=0))
    weights = [expert_weights(options, d.recv_topk_weights, rank) for rank, d in enumerate(dispatched)]
    return options.reference_combine(
        case,
        [
            expert_output(case, options, (d.recv_x, d.recv_x_scales) if options.fp8 else d.recv_x, rank)
            for rank, d in enumerate(dispatched)
        ],
        dispatched,
        topk_weights=weights if options.with_topk else None,
        bias=[biases(case, options, rank) for rank in range(case.num_ranks)],
    )
