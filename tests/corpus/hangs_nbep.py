"""nbep's own kernels in all three modes, broken in one place so that they hang; what the first paragraph must say."""

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
from nbep.device.kernels.internode import coordinator, notify_dispatch
from nbep.device.kernels.intranode import combine, dispatch
from nbep.device.kernels.low_latency import coordinator as low_latency_coordinator
from nbep.device.kernels.low_latency import dispatch_sender
from nbep.device.protocols import barrier, teams
from nbep.emulator import DeadlockError
from nbep.lab.notebook import edit


def inside_a_node(seed: int, **arguments: Any) -> None:
    case = make_case(1, num_ranks=2, num_tokens=12, num_topk=2, routing="everywhere")
    intranode.run(case, intranode.Options(nbep.Config(2, 2, 5)), seed=seed, **arguments)


def between_nodes(seed: int, **arguments: Any) -> None:
    case = internode.make_node_case(1, num_tokens=(16, 4, 9, 5), num_topk=4, routing="everywhere")
    internode.run(case, internode.Options(nbep.Config(2, 2, 8, 2, 4)), seed=seed, **arguments)


def with_low_latency(seed: int, **arguments: Any) -> None:
    case = low_latency.make_low_latency_case(1, num_ranks=2, num_tokens=(7, 4), num_topk=2)
    low_latency.run(case, low_latency.Options(), seed=seed, **arguments)


def one_rank_leaves(comm: Any, case: Any, options: Any) -> None:
    """The last rank makes its buffer and goes."""
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
    if comm.rank < comm.size - 1:
        intranode.dispatch(buffer, case, options, comm.rank)


def with_eight_ranks(seed: int) -> None:
    case = make_case(1, num_ranks=8, num_tokens=4, num_topk=2, routing="everywhere")
    intranode.run(case, intranode.Options(nbep.Config(2, 2, 5)), seed=seed, fn=one_rank_leaves)


def three_trips(comm: Any, case: Any, options: Any) -> Any:
    buffer = low_latency.make_buffer(comm, [(case, options)])
    for _ in range(3):
        outcome = low_latency.Trip(buffer, case, options).whole()
    buffer.destroy()
    return outcome


def low_latency_thrice(seed: int) -> None:
    with_low_latency(seed, fn=three_trips)


def over_a_nic_that_loses_a_message(seed: int) -> None:
    def lossy(comm: Any, case: Any, options: Any) -> Any:
        nic = nbep.NicOptions(num_entries=64, chunk_bytes=256, lost=(0, 1, 1, 1))
        return low_latency.Trip(low_latency.make_buffer(comm, [(case, options)], nic=nic), case, options).whole()

    case = low_latency.make_low_latency_case(1, num_ranks=2, num_tokens=(7, 4), num_topk=2)
    low_latency.run(case, low_latency.Options(over_nic=True), seed=seed, fn=lossy)


def edited(
    name: str,
    run: Callable[[int], None],
    function: FunctionType,
    old: str,
    new: str,
    names: tuple,
    not_names: tuple[str, ...] = (),
) -> Broken:
    """A run with another text in the source of one function."""

    def broken(seed: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()), edit(function, old, new):
            run(seed)

    return Broken(name, broken, DeadlockError, names, not_names, range(2), 2)


NOTHING = "pass"
NO_STORE = "So far only weak stores, or none, have written it"
ROUND = "They wait in a circle: rank 0 dispatch {} -> rank 1 dispatch {} -> rank 0 dispatch {}"
SENDER_FIRST = ROUND.format("sender", "receiver", "sender")
RECEIVER_FIRST = ROUND.format("receiver", "sender", "receiver")


def waits(who: str, peer: str, awaited: str, cell: str) -> str:
    """Two lines of the paragraph: who waits for whom, and for which cell."""
    return f"{who} waits{peer}: {awaited}\nIt polls {cell}"


SENDER = "rank 0: the dispatch sender (kernel `dispatch`, block 0, warp 1, lane 0)"
RECEIVER = "rank 0: the dispatch receiver (kernel `dispatch`, block 1, warp 1, lane 0)"
NOTIFY = "rank 0: the notify (kernel `notify_dispatch`, block 0, warp 0, lane 1)"
FOR_1 = " for rank 1"
FREE = "free slots in the peer's ring"
CHUNK = "the peer's next chunk of tokens"
ANNOUNCED = "the peer's announcement of its tokens"
ARRIVAL = "the peer's arrival at the barrier"
HEAD = "`nvl_buffer` of rank 1: head[channel 0, src 0] (byte 4368), expects "
TAIL = "`nvl_buffer` of rank 0: tail[channel 0, src 1] (byte 4380), expects "
END = "`nvl_buffer` of rank 0: end[channel 0, src 1] (byte 4364), expects "
SIGNAL = "`nvl_buffer` of rank 0: barrier_signal[rank 1] (byte 7044), expects "
PUBLISH_HEAD = "ptx.st_relaxed_sys_s32(ring.head, head)"
PUBLISH_TAIL = "ptx.st_release_sys_s32(ring.tail, tail)"

INSIDE_A_NODE = [
    edited("dispatch: the head is not published", inside_a_node, dispatch.receive_tokens, PUBLISH_HEAD, NOTHING,
        (waits(SENDER, FOR_1, FREE, HEAD + "1 or more and sees 0"), NO_STORE,
            "polls `nvl_buffer` of rank 1: tail[channel 0, src 0] (byte 4376), expects 5 or more and sees 4",
            SENDER_FIRST), ("Next to it, `nvl_buffer` of rank 1: head",)),
    edited("dispatch: the head of the next ring", inside_a_node, dispatch.receive_tokens, PUBLISH_HEAD,
        "ptx.st_relaxed_sys_s32(ring.head + 4, head)", (waits(SENDER, FOR_1, FREE, HEAD + "1 or more and sees 0"),
            "Next to it, `nvl_buffer` of rank 1: head[channel 0, src 1] (byte 4372) is 4, stored by rank 1, kernel",
            SENDER_FIRST)),
    edited("dispatch: the tail is not published", inside_a_node, teams.publish_tail, PUBLISH_TAIL, NOTHING,
        (waits(RECEIVER, FOR_1, CHUNK, TAIL + "1 or more and sees 0"), NO_STORE,
            "polls `nvl_buffer` of rank 0: head[channel 0, src 1] (byte 4372), expects 1 or more and sees 0",
            RECEIVER_FIRST), ("Next to it, `nvl_buffer` of rank 0: tail",)),
    edited("dispatch: the tail of the ring before", inside_a_node, teams.publish_tail, PUBLISH_TAIL,
        "ptx.st_release_sys_s32(ring.tail - 4, tail)", (waits(RECEIVER, FOR_1, CHUNK, TAIL + "1 or more and sees 0"),
            "Next to it, `nvl_buffer` of rank 0: tail[channel 0, src 0] (byte 4376) is 4, stored by rank 1, kernel",
            RECEIVER_FIRST)),
    edited("dispatch: a tail that is one too small", inside_a_node, teams.publish_tail, PUBLISH_TAIL,
        "ptx.st_release_sys_s32(ring.tail, tail - 1)", (waits(RECEIVER, FOR_1, CHUNK, TAIL + "12 or more and sees 11"),
            "The last store to it that is not weak is by rank 1, kernel `dispatch`, block 0, warp 0, lane 0",
            "which has ended"), ("circle",)),
    edited("dispatch: the end is not announced", inside_a_node, dispatch.announce_tokens,
        "ptx.st_relaxed_sys_s32(ring.end, -end - 1)", NOTHING, (
            waits(RECEIVER, FOR_1, ANNOUNCED, END + "anything but 0 and sees 0"),
            "Next to it, `nvl_buffer` of rank 0: start[channel 0, src 1] (byte 4356) is -1, stored by rank 1",
            RECEIVER_FIRST)),
    edited("dispatch: the end is announced at the start", inside_a_node, dispatch.announce_tokens,
        "ptx.st_relaxed_sys_s32(ring.end, -end - 1)", "ptx.st_relaxed_sys_s32(ring.start, -end - 1)",
        (waits(RECEIVER, FOR_1, ANNOUNCED, END + "anything but 0 and sees 0"),
            "Next to it, `nvl_buffer` of rank 0: start[channel 0, src 1] (byte 4356) is -13, stored by rank 1")),
    edited("dispatch: a ring with too few slots", inside_a_node, dispatch.send_tokens, "shape.num_slots, wanted",
        "shape.num_slots - 4, wanted", (waits(SENDER, FOR_1, FREE, HEAD + "5 or more and sees 4"),
            "The last store to it that is not weak is by rank 1, kernel `dispatch`, block 1, warp 0, lane 0",
            "polls `nvl_buffer` of rank 1: tail[channel 0, src 0] (byte 4376), expects 5 or more and sees 4",
            SENDER_FIRST), ("Next to it", "which has ended")),
    edited("barrier: the signal of another pair", inside_a_node, barrier.meet_by_adding, "+ 4 * peers.rank, -signal)",
        "+ 4 * peer, -signal)", (waits(NOTIFY, FOR_1, ARRIVAL, SIGNAL + "its value >> 24 <= 0 and sees "),
            "The last store to it that is not weak is the waiting thread's own", "rank 0 notify -> rank 1 notify")),
    edited("barrier: counts that differ", inside_a_node, barrier.meet_by_adding, "own_signal, signal)",
        "own_signal, 2 * signal)", ("the peer's arrival at the barrier\nIt polls",
            "expects its value >> 24 <= 0 and sees ", "last store to it that is not weak is the waiting thread's own"),
        ("runs no kernel",)),
    Broken("barrier: one of eight ranks has left", with_eight_ranks, DeadlockError, (
            "rank 0: the notify (kernel `notify_dispatch`, block 0, warp 0, lane 7) waits for rank 7: " + ARRIVAL,
            "It polls `nvl_buffer` of rank 0: barrier_signal[rank 7] (byte 65564), expects its value >> 24 <= 0 and",
            "Ranks 1-6 wait for rank 7 in the same way", "Rank 7 runs no kernel: its host has returned"),
        ("circle", "Next to it"), range(2), 2),
    edited("combine: the head is not published", inside_a_node, combine.coordinate, PUBLISH_HEAD, NOTHING,
        (waits(SENDER.replace("dispatch", "combine"), FOR_1, FREE, HEAD + "1 or more and sees 0"),
            "rank 1: the combine coordinator (kernel `combine`, block 1, warp 0, lane 0)",
            "rank 0 combine sender -> rank 1 combine coordinator -> rank 0 combine sender")),
    edited("combine: the barrier of a team for too many threads", inside_a_node, combine.send_tokens,
        "bar_red_and(1 + peer, 32 * team.num_warps, may_fill)",
        "bar_red_and(1 + peer, 32 * team.num_warps + 32, may_fill)", ((
                "barrier 1 of rank 1, kernel `combine`, block 0 can never",
                "barrier 2 of rank 0, kernel `combine`, block 0 can never"), "it takes 64 threads")),
    edited("combine: the tail of another peer for the block", inside_a_node, combine.coordinate,
        "board.tails + 4 * peer, tail", "board.tails + 4 * (peer ^ 1), tail", (
            "rank 0: the combine receiver (kernel `combine`, block 1, warp 1, lane 1) waits for " + CHUNK,
            "It polls `shared memory`: shared_tails[src 1] (byte 356), expects 1 or more and sees 0",
            "Next to it, `shared memory`: shared_tails[src 0] (byte 352) is 4, stored by rank 0, kernel `combine`",
            "rank 0 combine receiver -> rank 0 combine coordinator -> rank 0 combine receiver")),
    edited("combine: the tail is not published", inside_a_node, combine.send_tokens, PUBLISH_TAIL, NOTHING,
        ("rank 0: the combine coordinator (kernel `combine`, block 1, warp 0, lane 1) waits for the receivers of",
            "It polls `nvl_buffer` of rank 0: tail[channel 0, src 1] (byte 4380), expects anything but 0 and sees 0",
            "polls `nvl_buffer` of rank 0: head[channel 0, src 1] (byte 4372), expects 1 or more and sees 0",
            "rank 0 combine coordinator -> rank 1 combine sender -> rank 0 combine coordinator")),
]  # fmt: skip

COUNTS = "`rdma_buffer` of rank 0: counts[half 0, rank 0, local expert 0] (byte 43008), expects "
LOW_LATENCY_RECEIVER = (
    "rank 0: the low-latency dispatch receiver (kernel `low_latency_dispatch`, block 0, warp 0-1, lane 0)"
)
TOKENS = "the peer's tokens and their number"
LOW_LATENCY = [
    edited("low latency: the counts are not told", with_low_latency, dispatch_sender.count_choices,
        "add_to_count(ctx, dst_expert, completion(num_chosen), False)", NOTHING, (
            waits(LOW_LATENCY_RECEIVER, " for rank 0", TOKENS, COUNTS + "-1 and sees 65536"),
            "Rank 1 waits for rank 0 in the same way"), ("circle",)),
    edited(
        "low latency: counts that differ",
        with_low_latency,
        dispatch_sender.count_choices,
        "completion(num_chosen)",
        "completion(num_chosen + 1)",
        (waits(LOW_LATENCY_RECEIVER, " for rank 0", TOKENS, COUNTS + "-1 and sees -16390"),),
        ("circle",),
    ),
    edited("low latency: a message is not counted", with_low_latency, dispatch_sender.put_token, "if slot >= 0:",
        "if slot >= 1:", (waits(LOW_LATENCY_RECEIVER, " for rank 0", TOKENS, COUNTS + "-1 and sees -16389"),),
        ("circle",)),
    edited("low latency: no half is given back", low_latency_thrice, low_latency_coordinator.empty_half,
        "amo_add(ctx.network, layout.credit_offset(num_bytes, num_ranks, half, ctx.network.rank), 1, rank, 0, True)",
        NOTHING, ("rank 0: the low-latency sender (kernel `low_latency_dispatch`,",
            " waits for rank 0: the peer's half of the buffer to be free again",
            "It polls `rdma_buffer` of rank 0: credits[half 0, rank 0] (byte 60160), expects 2 and sees 1",
            "Rank 1 waits for rank 0 in the same way")),
]  # fmt: skip

LOW_LATENCY.append(
    Broken(
        "low latency: a NIC loses a message",
        over_a_nic_that_loses_a_message,
        DeadlockError,
        (
            "rank 1: the low-latency dispatch receiver (kernel `low_latency_dispatch`, block 0, warp 2, lane 0; ",
            "`rdma_buffer` of rank 1: counts[half 0, rank 0, local expert 1] (byte 43016), expects -1 and sees 0",
            "counts[half 0, rank 0, local expert 0] (byte 43008) is -4, stored by the NIC of rank 0,",
            "rank 1 low-latency dispatch receiver -> rank 0 low-latency combine receiver -> rank 1",
        ),
        ("circle",),
        range(2),
        2,
    )
)

ARRIVED = "the peer's arrival, and its counts if it sends some"
RDMA_SENDER = "rank 0: the internode dispatch RDMA sender (kernel `internode_dispatch`, block 1, warp 0-1, lane 1)"
FORWARDER = "rank 0: the internode dispatch forwarder (kernel `internode_dispatch`, block 0, "
NODE_NOTIFY = "rank 0: the internode notify (kernel `internode_notify_dispatch`, block 0, warp 0, lane 0)"
BETWEEN_NODES = [
    edited("between nodes: notify tells nobody", between_nodes, notify_dispatch.send_message,
        "amo_add(ctx.network, arrived, ctx.call.signal, rank_at(ctx, node), 0, True)", NOTHING,
        (NODE_NOTIFY + " waits for rank 0: " + ARRIVED,
            "It polls `rdma_buffer` of rank 0: arrived[node 0] (byte 21760), expects 1 and sees 0", NO_STORE),
        ("circle", "Next to it")),
    edited("between nodes: notify tells at the place of another node", between_nodes, notify_dispatch.send_message,
        "arrived_offset(ctx.sizes.cells, ctx.here.rdma_rank)", "arrived_offset(ctx.sizes.cells, node)",
        (("It polls `rdma_buffer` of rank 1: arrived[node 1] (byte 21764), expects 1 and sees 0",
                "It polls `rdma_buffer` of rank 2: arrived[node 0] (byte 21760), expects 1 and sees 0"),
            ("Next to it, `rdma_buffer` of rank 2: arrived[node 1] (byte 21764) is ",
                "Next to it, `rdma_buffer` of rank 1: arrived[node 0] (byte 21760) is ",
                "Next to it, `rdma_buffer` of rank 3: arrived[node 1] (byte 21764) is "),
            ("rank 1 internode notify -> rank 3 internode notify",
                "rank 2 internode notify -> rank 0 internode notify"))),
    edited("between nodes: the heads are not told", between_nodes, coordinator.publish_heads, "head, total, Column",
        "head, 0, Column", (f"{RDMA_SENDER} waits for rank 2: free slots in the peer's RDMA ring",
            "It polls `rdma_buffer` of rank 0: head[channel 0, node 1] (byte 22412), expects 1 and sees 0", NO_STORE,
            "The ranks wait for each other: rank 0 internode dispatch RDMA sender -> rank 2 "),
        ("Next to it, `rdma_buffer` of rank 0: head",)),
    edited("between nodes: the heads go to another node", between_nodes, coordinator.publish_heads,
        "publish_slots(ctx, ", "publish_slots(ctx._replace(lane=ctx.here.rdma_rank), ", (
            f"{RDMA_SENDER} waits for rank 2: free slots in the peer's RDMA ring",
            "It polls `rdma_buffer` of rank 0: head[channel 0, node 1] (byte 22412), expects 1 and sees 0",
            "In the memory of rank 2 the same byte was stored by rank 2",
            "Next to it, `rdma_buffer` of rank 0: head[channel 0, node 0] (byte 22408) is")),
    edited("between nodes: the tails are not told", between_nodes, coordinator.publish_tails, "tail, total, column",
        "tail, 0, column", (FORWARDER + "warp 0, lane 0) waits for rank 0: the next tokens in an RDMA ring",
            "It polls `rdma_buffer` of rank 0: tail[channel 0, node 0] (byte 21768), expects 1 and sees 0",
            "It polls `rdma_buffer` of rank 0: head[channel 0, node 0] (byte 22408), expects 1 and sees 0",
            "They wait in a circle: rank 0 internode dispatch forwarder -> rank 0 internode dispatch RDMA sender",
            NO_STORE), ("Next to it, `rdma_buffer` of rank 0: tail",)),
    edited("between nodes: tails that are one too small", between_nodes, coordinator.publish_tails,
        "tail, total, column", "tail, total - 1, column", (FORWARDER + "warp 0, lane 1) waits for rank 2: ",
            "It polls `rdma_buffer` of rank 0: tail[channel 0, node 1] (byte 21772), expects 9 and sees 8",
            "The last store to it that is not weak is by rank 2, kernel `internode_dispatch`, block 1, warp 3")),
    edited(
        "between nodes: the forwarder does not publish its tail",
        between_nodes,
        teams.publish_tail,
        PUBLISH_TAIL,
        NOTHING,
        (
            (
                FORWARDER + "warp 1, lane 0) waits for rank 1: ",
                "(kernel `internode_dispatch`, block 0, warp 3, lane 0) waits for the forwarders of its own block",
            ),
            (
                "It polls `nvl_buffer` of rank 1: head[channel 0, src 0] (byte 4624), expects 2 or more and sees 0",
                "It polls `nvl_buffer` of rank 0: head[channel 0, src 1] (byte 4628), expects 2 or more and sees 0",
                "It polls `shared memory`: board[warp 1, 0] (byte 272), expects 16 and sees 0",
            ),
            (  # or the circle goes through the other node's forwarder and the coordinators
                "It polls `nvl_buffer` of rank 1: tail[channel 0, src 0] (byte 4632), expects 1 or more and sees 0",
                "rank 1 internode dispatch forwarder -> rank 0 internode forwarder coordinator",
                "rank 0 internode forwarder coordinator -> rank 0 internode dispatch RDMA sender -> rank 0 ",
            ),
        ),
    ),
]  # fmt: skip
ENTRIES = [*INSIDE_A_NODE, *LOW_LATENCY, *BETWEEN_NODES]
