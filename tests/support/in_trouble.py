"""Calls of all modes, and runs in which one thing goes wrong: a rank gets what is right or spoilt, or it raises."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import internode
import intranode
import low_latency
import numpy as np
from cases import make_case
from target import spawn
from troubles import DEAD, Trouble, planted

import nbep

Result = tuple[str, np.ndarray, np.ndarray]  # what it is called, what came, what should come
NIC_LOSES = "nic"


@dataclass(frozen=True)
class Mode:
    """A buffer and some calls. Each call of a rank yields its event, and what can be used once that is there."""

    num_ranks: int
    buffer: Callable[..., nbep.Buffer]
    calls: Callable[..., Iterator[tuple[Any, Callable[[], list[Result]]]]]


def normal(options: intranode.Options, case) -> Mode:
    """Dispatch, cached dispatch and combine; num_worst_tokens, so that the CPU waits for no counts."""
    options = replace(options, num_worst_tokens=sum(case.num_tokens), with_topk=True)
    expected = intranode.Expected(case, options)
    expected.combined  # noqa: B018 - once for all ranks
    later = {"config": options.config, "async_finish": True, **options.way}

    def calls(buffer, rank):
        want = expected.dispatched[rank]
        num_rows = len(want.recv_src_rank)
        _, arguments = intranode.dispatch_arguments(buffer, case, options, rank)
        recv_x, topk_idx, weights, _, handle, event = buffer.dispatch(**arguments, async_finish=True)
        yield (
            event,
            lambda: [
                ("recv_x", recv_x[:num_rows], want.recv_x[:num_rows]),
                ("recv_topk_idx", topk_idx[:num_rows], want.recv_topk_idx[:num_rows]),
                ("recv_topk_weights", weights[:num_rows], want.recv_topk_weights[:num_rows]),
            ],
        )
        x = intranode.expert_output(case, options, recv_x, rank)
        own_weights = intranode.expert_weights(options, np.array(weights), rank)
        cached_x, *_, event = buffer.dispatch(case.x[rank], handle=handle, **later)
        yield event, lambda: [("cached recv_x", cached_x[:num_rows], want.recv_x[:num_rows])]
        combined_x, combined_weights, event = buffer.combine(x, handle, topk_weights=own_weights, **later)
        yield (
            event,
            lambda: [
                ("combined_x", combined_x, expected.combined[rank][0]),
                ("combined_topk_weights", combined_weights, expected.combined[rank][1]),
            ],
        )

    return Mode(case.num_ranks, lambda comm, **more: intranode.make_buffer(comm, case, replace(options, **more)), calls)


def in_low_latency(options: low_latency.Options, case, **buffer_arguments) -> Mode:
    """Two dispatches and two combines, in both halves."""
    options = replace(options, dispatch_as=low_latency.ASYNC, combine_as=low_latency.ASYNC)
    dispatched = low_latency.expected_dispatch(case, options)
    combined = low_latency.expected_combine(case, options, dispatched)

    def calls(buffer, rank):
        for _ in range(2):
            trip = low_latency.Trip(buffer, case, options)
            trip.send_dispatch()
            counts, want = trip._recv_count, dispatched[rank].recv_count
            yield trip.event, lambda counts=counts, want=want: [("recv_count", counts[:, None], want[:, None])]
            trip.receive_dispatch()
            trip.send_combine()
            yield trip.event, lambda trip=trip: [("combined_x", trip._combined_x, combined[rank])]

    def buffer(comm, **more):
        return low_latency.make_buffer(comm, [(case, options)], **buffer_arguments, **more)

    return Mode(case.num_ranks, buffer, calls)


CASE = make_case(3, num_ranks=2, num_tokens=(5, 3), hidden=16, num_topk=3, routing="everywhere")
NODES = internode.make_node_case(3, num_tokens=[2, 0, 2, 1], num_topk=3, hidden=16, routing="everywhere")
FEW = low_latency.make_low_latency_case(3, num_ranks=3, num_tokens=(3, 1, 2), num_topk=3, hidden=128)
RINGS = nbep.Config(2, 2, 4)
ONE_CHANNEL = nbep.Config(2, 2, 8, 2, 4)
IBGDA = {"transport": "ibgda", "num_nvl_peers": 1, "num_qps_per_rank": 2}
MODES = {
    "intranode": normal(intranode.Options(RINGS), CASE),
    "without rings": normal(intranode.Options(RINGS, zero_copy=True), CASE),
    "internode": normal(internode.Options(ONE_CHANNEL), NODES),
    "internode over ibgda": normal(internode.Options(ONE_CHANNEL, transport="ibgda"), NODES),
    "low latency": in_low_latency(low_latency.Options(), FEW),
    "low latency, deduplicate": in_low_latency(low_latency.Options(deduplicate=True), FEW),
    "low latency over ibgda": in_low_latency(low_latency.Options(use_fp8=True), FEW, **IBGDA),
}


def run(
    mode: Mode, trouble: Trouble, seed: int, raised: list[Exception] | None = None
) -> tuple[list[str], list[Trouble]]:
    """What was wrong in a run with a trouble, and the occasions that there were for such a one.

    raised: fills with what the rank of the trouble raises
    """
    wrong: list[str] = []
    raised = [] if raised is None else raised
    more: dict[str, Any] = {}
    if trouble.kind == NIC_LOSES:
        peer = (trouble.rank + 1 + trouble.number // 64) % mode.num_ranks
        more = {"nic": nbep.NicOptions(num_entries=64, lost=(trouble.rank, peer, 0, trouble.number % 64))}

    def look(rank: int, call: int, results: list[Result], has_failed: bool) -> None:
        for name, came, want in results:
            came = np.asarray(came)
            is_right = came.view(f"u{came.itemsize}") == np.asarray(want).view(f"u{came.itemsize}")
            if not (is_right | (has_failed & is_spoilt(came))).all():
                wrong.append(f"rank {rank}, call {call}, {name}, {'after' if has_failed else 'without'} an exception")

    def main(comm):
        buffer = mode.buffer(comm, **more)
        try:
            for call, (event, results) in enumerate(mode.calls(buffer, comm.rank)):
                has_failed = False
                try:
                    event.current_stream_wait()
                except (nbep.PeerTimeout, nbep.NetworkError, ValueError) as error:
                    has_failed = True
                    raised.extend([error] * (comm.rank == trouble.rank))
                look(comm.rank, call, results(), has_failed)
                if has_failed or trouble == Trouble(DEAD, comm.rank, call):
                    break
        except (nbep.PeerTimeout, nbep.NetworkError, ValueError) as error:  # of an earlier call, in the next one
            raised.extend([error] * (comm.rank == trouble.rank))
        with suppress(nbep.PeerTimeout, nbep.NetworkError):  # of a call that had brought all before it failed
            buffer.destroy()

    with planted(trouble) as occasions:
        spawn(main, mode.num_ranks, seed=seed, on_deadlock="expire", engine="python")  # whose threads it changes
    return wrong, occasions


def is_spoilt(array: np.ndarray) -> np.ndarray:
    """Where it cannot pass for a result: NaN, or -1. A peer that is only late may still bring parts of a row."""
    return np.isnan(array.astype(np.float32)) if array.dtype.kind in "fV" else array == -1
