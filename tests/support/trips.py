"""What one rank does with handles and buffers that it uses more than once; inside a node and between nodes."""

from collections.abc import Sequence

from arrays import to_numpy, to_target
from cases import Case, routes_of
from intranode import (
    Options,
    Outcome,
    check,
    combine,
    dispatch,
    dispatch_arguments,
    dispatch_input,
    kept,
    make_buffer,
    make_buffer_for,
    outcome_of,
)
from target import spawn

import nbep

Round = tuple[Case, Options]


def cached_dispatch(buffer, x, handle, options: Options):
    """recv_x of a dispatch of x along the routes of a handle."""
    return kept(options, buffer.dispatch(x, handle=handle, config=options.config, **options.way)[0])


def cached_dispatch_after_combine(comm, case: Case, options: Options) -> Outcome:
    buffer = make_buffer(comm, case, options)
    outcome = dispatch(buffer, case, options, comm.rank)
    combine(buffer, case, options, comm.rank, outcome)
    x = to_target(dispatch_input(case, options, comm.rank))
    outcome.cached_x = cached_dispatch(buffer, x, outcome.handle, options)
    combine(buffer, case, options, comm.rank, outcome)
    buffer.destroy()
    return outcome


def combine_twice(comm, case: Case, options: Options) -> Outcome:
    buffer = make_buffer(comm, case, options)
    outcome = dispatch(buffer, case, options, comm.rank)
    combine(buffer, case, options, comm.rank, outcome)
    first = to_numpy(outcome.combined_x).tobytes()
    combine(buffer, case, options, comm.rank, outcome)
    buffer.destroy()
    assert to_numpy(outcome.combined_x).tobytes() == first
    return outcome


def chained_by_events(comm, case: Case, options: Options) -> Outcome:
    """Layout and dispatch without waiting for either, then combine."""
    rank = comm.rank
    buffer = make_buffer(comm, case, options)
    overlap = {"async_finish": True, "allocate_on_comm_stream": True}
    topk_idx = to_target(case.topk_idx[rank])
    *layout, event = buffer.get_dispatch_layout(topk_idx, case.num_experts, previous_event=buffer.capture(), **overlap)
    _, arguments = dispatch_arguments(buffer, case, options, rank)
    arguments |= routes_of(layout)
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(
        **arguments, previous_event=event, **overlap
    )
    event.current_stream_wait()
    outcome = outcome_of(options, tuple(layout), recv_x, recv_topk_idx, recv_topk_weights, counts, handle)
    combine(buffer, case, options, rank, outcome)
    buffer.destroy()
    return outcome


def back_to_back(comm, rounds: Sequence[Round]) -> list[Outcome]:
    """Dispatch and combine of each on one buffer."""
    buffer = make_buffer_for(comm, rounds)
    outcomes = []
    for case, options in rounds:
        outcomes.append(dispatch(buffer, case, options, comm.rank))
        combine(buffer, case, options, comm.rank, outcomes[-1])
    buffer.destroy()
    return outcomes


def dispatches_first(comm, rounds: Sequence[Round]) -> list[Outcome]:
    """All dispatches, then all combines, on one buffer."""
    buffer = make_buffer_for(comm, rounds)
    outcomes = [dispatch(buffer, case, options, comm.rank) for case, options in rounds]
    for (case, options), outcome in zip(rounds, outcomes, strict=True):
        combine(buffer, case, options, comm.rank, outcome)
    buffer.destroy()
    return outcomes


def two_handles_in_turns(comm, rounds: Sequence[Round]) -> list[Outcome]:
    """Of two rounds on one buffer."""
    (first, options), (second, others) = rounds
    buffer = make_buffer_for(comm, rounds)
    a = dispatch(buffer, first, options, comm.rank)
    b = dispatch(buffer, second, others, comm.rank)
    combine(buffer, first, options, comm.rank, a)
    x = to_target(dispatch_input(second, others, comm.rank))
    b.cached_x = cached_dispatch(buffer, x, b.handle, others)
    combine(buffer, second, others, comm.rank, b)
    combine(buffer, first, options, comm.rank, a)
    buffer.destroy()
    return [a, b]


def two_buffers_at_once(comm, rounds: Sequence[Round]) -> list[Outcome]:
    """A round on each."""
    buffers = [make_buffer(comm, case, options) for case, options in rounds]
    outcomes = [
        dispatch(buffer, case, options, comm.rank) for buffer, (case, options) in zip(buffers, rounds, strict=True)
    ]
    for buffer, (case, options), outcome in zip(buffers, rounds, outcomes, strict=True):
        combine(buffer, case, options, comm.rank, outcome)
    for buffer in buffers:
        buffer.destroy()
    return outcomes


def run_rounds(fn, rounds: Sequence[Round], seed: int = 0, **spawn_options) -> None:
    """Run fn(comm, rounds) on every rank and compare what it returns with the reference."""
    by_rank = spawn(fn, rounds[0][0].num_ranks, (rounds,), seed, **spawn_options)
    for (case, options), outcomes in zip(rounds, zip(*by_rank, strict=True), strict=True):
        check(case, options, list(outcomes), seed)


def blocking_call_on_default_config(comm, case: Case, num_bytes: dict[str, int]) -> tuple:
    """recv_x and combined_x, with no config given."""
    rank = comm.rank
    buffer = nbep.Buffer(comm, **num_bytes)
    layout = buffer.get_dispatch_layout(to_target(case.topk_idx[rank]), case.num_experts)
    recv_x, *_, handle, _ = buffer.dispatch(to_target(case.x[rank]), **routes_of(layout))
    combined_x, _, _ = buffer.combine(recv_x, handle)
    buffer.destroy()
    return to_numpy((recv_x, combined_x))
