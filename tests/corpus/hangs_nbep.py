"""nbep's own kernels in all three modes, each broken in one place so that it hangs; what the first paragraph must say."""

import contextlib
import io
from collections.abc import Callable
from types import FunctionType
from typing import Any

import internode
import intranode
import low_latency
from cases import make_case
from entries import Broken

import nbep
from nbep.device.kernels.internode import coordinator, dispatch_forwarder, notify_dispatch
from nbep.device.kernels.intranode import combine, dispatch
from nbep.device.kernels.low_latency import dispatch_sender, journal, send_once
from nbep.device.network import direct
from nbep.device.protocols import barrier, teams
from nbep.emulator import DeadlockError
from nbep.notebook import edit

Run = Callable[[], object]
Names = tuple[str | tuple[str, ...], ...]


def inside_a_node(seed: int, **arguments: Any) -> None:
    case = make_case(1, num_ranks=2, num_tokens=12, num_topk=2, routing="everywhere")
    intranode.run(case, intranode.Options(nbep.Config(2, 2, 5)), seed=seed, **arguments)


def between_nodes(seed: int, **arguments: Any) -> None:
    case = internode.make_node_case(1, num_tokens=(16, 4, 9, 5), num_topk=4, routing="everywhere")
    internode.run(case, internode.Options(nbep.Config(2, 2, 8, 2, 4)), seed=seed, **arguments)


def with_low_latency(seed: int, **arguments: Any) -> None:
    case = low_latency.make_low_latency_case(1, num_ranks=2, num_tokens=(7, 4), num_topk=2)
    low_latency.run(case, low_latency.Options(), seed=seed, **arguments)


def three_trips(comm: Any, case: Any, options: Any) -> Any:
    buffer = low_latency.make_buffer(comm, [(case, options)])
    for _ in range(3):
        outcome = low_latency.Trip(buffer, case, options).whole()
    buffer.destroy()
    return outcome


def low_latency_thrice(seed: int) -> None:
    with_low_latency(seed, fn=three_trips)


def sent_once(seed: int) -> None:
    case = low_latency.make_low_latency_case(1, num_ranks=2, num_tokens=(7, 4), num_topk=2)
    low_latency.run(case, low_latency.Options(use_fp8=True, deduplicate=True), seed=seed)


def edited(
    name: str,
    run: Callable[[int], None],
    function: FunctionType,
    old: str,
    new: str,
    names: Names,
    not_names: tuple[str, ...] = (),
) -> Broken:
    """A run with another text in the source of one function."""

    def broken(seed: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()), edit(function, old, new):
            run(seed)

    return Broken(name, broken, DeadlockError, names, not_names, range(2), 2)


NOTHING = "pass"

INTRANODE = [
    edited(
        "dispatch: the head is not published",
        inside_a_node,
        dispatch.receive_tokens,
        "st_relaxed_sys_s32(ring.head, head)",
        NOTHING,
        (),
    ),
    edited(
        "dispatch: the head of the next ring",
        inside_a_node,
        dispatch.receive_tokens,
        "st_relaxed_sys_s32(ring.head, head)",
        "st_relaxed_sys_s32(ring.head + 4, head)",
        (),
    ),
    edited(
        "dispatch: the tail is not published",
        inside_a_node,
        teams.publish_tail,
        "st_release_sys_s32(ring.tail, tail)",
        NOTHING,
        (),
    ),
    edited(
        "dispatch: the tail of the ring before",
        inside_a_node,
        teams.publish_tail,
        "st_release_sys_s32(ring.tail, tail)",
        "st_release_sys_s32(ring.tail - 4, tail)",
        (),
    ),
    edited(
        "dispatch: a tail that is one too small",
        inside_a_node,
        teams.publish_tail,
        "st_release_sys_s32(ring.tail, tail)",
        "st_release_sys_s32(ring.tail, tail - 1)",
        (),
    ),
    edited(
        "dispatch: counts are not announced",
        inside_a_node,
        dispatch.announce_tokens,
        "st_relaxed_sys_s32(ring.end, -end - 1)",
        NOTHING,
        (),
    ),
    edited(
        "dispatch: the end is announced at the start",
        inside_a_node,
        dispatch.announce_tokens,
        "st_relaxed_sys_s32(ring.end, -end - 1)",
        "st_relaxed_sys_s32(ring.start, -end - 1)",
        (),
    ),
    edited(
        "dispatch: a ring with too few slots",
        inside_a_node,
        dispatch.send_tokens,
        "shape.num_slots,\n                        sizes.num_max",
        "shape.num_slots - 4,\n                        sizes.num_max",
        (),
    ),
    edited(
        "barrier: the signal of another pair",
        inside_a_node,
        barrier.barrier_block,
        "+ 4 * peers.rank, -1)",
        "+ 4 * peer, -1)",
        (),
    ),
    edited("barrier: counts that differ", inside_a_node, barrier.barrier_block, "own_signal, 1)", "own_signal, 2)", ()),
    edited(
        "combine: the head is not published",
        inside_a_node,
        combine.coordinate,
        "st_relaxed_sys_s32(ring.head, head)",
        NOTHING,
        (),
    ),
    edited(
        "combine: a team's barrier for too many",
        inside_a_node,
        combine.send_tokens,
        "bar_red_and(1 + peer, 32 * num_warps, may_fill)",
        "bar_red_and(1 + peer, 32 * num_warps + 32, may_fill)",
        (),
    ),
    edited(
        "combine: the tail of another peer for the block",
        inside_a_node,
        combine.coordinate,
        "board.tails + 4 * peer, tail",
        "board.tails + 4 * (peer ^ 1), tail",
        (),
    ),
    edited(
        "combine: the tail is not published",
        inside_a_node,
        combine.send_tokens,
        "st_release_sys_s32(ring.tail, tail)",
        NOTHING,
        (),
    ),
]
LOW = [
    edited(
        "low latency: the counts are not told",
        with_low_latency,
        dispatch_sender.count_choices,
        "add_to_count(network, work, call, shape, goal, completion(num_chosen), False)",
        NOTHING,
        (),
    ),
    edited(
        "low latency: counts that differ",
        with_low_latency,
        dispatch_sender.count_choices,
        "completion(num_chosen)",
        "completion(num_chosen + 1)",
        (),
    ),
    edited(
        "low latency: a message is not counted",
        with_low_latency,
        dispatch_sender.put_token,
        "if slot >= 0:",
        "if slot >= 1:",
        (),
    ),
    edited(
        "low latency: the count of another expert",
        with_low_latency,
        dispatch_sender.add_to_count,
        "network.rank, local_expert)",
        "network.rank, local_expert ^ 1)",
        (),
    ),
    edited(
        "low latency: no half is given back",
        low_latency_thrice,
        journal.empty_half,
        "amo_add(network, credit_offset(call.num_rdma_bytes, half, network.rank), 1, lane, 0, True)",
        NOTHING,
        (),
    ),
    edited(
        "low latency: the other half is given back",
        low_latency_thrice,
        journal.empty_half,
        "credit_offset(call.num_rdma_bytes, half, network",
        "credit_offset(call.num_rdma_bytes, 1 - half, network",
        (),
    ),
    edited(
        "low latency: the arrivals are told at another rank's place",
        sent_once,
        send_once.add_to_arrival,
        "tell(network",
        "tell(network",
        (),
    ),
]
INTER = [
    edited(
        "internode notify: nobody is told",
        between_nodes,
        notify_dispatch.send_message,
        "amo_add(network, arrived_offset(sizes.cells, own), 1, peer, 0, True)",
        NOTHING,
        (),
    ),
    edited(
        "internode notify: the place of another node",
        between_nodes,
        notify_dispatch.send_message,
        "arrived_offset(sizes.cells, own), 1,",
        "arrived_offset(sizes.cells, node), 1,",
        (),
    ),
    edited(
        "internode dispatch: the heads are not told",
        between_nodes,
        coordinator.tell_heads,
        "amo_add(network, head, freed - told, peer, here.channel, True)",
        NOTHING,
        (),
    ),
    edited(
        "internode dispatch: the tails are not told",
        between_nodes,
        coordinator.tell_tails,
        "amo_add(network, tail, filled - told, peer, here.channel, True)",
        NOTHING,
        (),
    ),
    edited(
        "internode dispatch: the tails one too small",
        between_nodes,
        coordinator.tell_tails,
        "amo_add(network, tail, filled - told, peer",
        "amo_add(network, tail, filled - told - 1, peer",
        (),
    ),
    edited(
        "internode dispatch: a tail that the forwarder does not publish",
        between_nodes,
        teams.publish_tail,
        "st_release_sys_s32(ring.tail, tail)",
        NOTHING,
        (),
    ),
    edited(
        "internode dispatch: a rank of another node",
        between_nodes,
        coordinator.tell_heads,
        "amo_add(network, head, freed - told, peer,",
        "amo_add(network, head, freed - told, network.rank,",
        (),
    ),
]
ENTRIES = [*INTRANODE, *LOW, *INTER]
