"""nbep's kernels that send over a network, broken in one place so that they hang; what the first paragraph must say."""

from collections.abc import Callable
from types import FunctionType

from entries import Broken, Name
from hangs_nbep import NO_STORE, NOTHING
from scenarios import scenario, with_edit

from nbep.device.kernels.internode import cached_notify, combine_forwarder, notify_dispatch
from nbep.device.kernels.low_latency import (
    clean_low_latency_buffer,
    combine_sender,
    deduplicated_combine,
    deduplicated_dispatch,
)
from nbep.device.kernels.parts import arrivals
from nbep.device.network import nic
from nbep.device.network.ibgda import queue_pair, transport
from nbep.device.protocols import grid_barrier
from nbep.emulator import DeadlockError

TRIP = scenario("low_latency")
ONCE = scenario("low_latency", dedup=1)
CLEAN = scenario("low_latency.clean", tokens=1, blocks=2)
# Over the NIC each rank has one expert, and so one queue pair to the other: 65 of rank 0, 64 of rank 1.
NIC = scenario("low_latency", nic=1, experts=1, topk=2, tokens=2)
WRAPPING = scenario("low_latency", nic=1, experts=1, topk=2, tokens=8, hidden=512, rounds=3)
NODES = scenario("internode")
NODES_OVER_NICS = scenario("internode", ibgda=1)

RDMA = "`rdma_buffer` of rank "
GIVEN_UP = "has no thread left that could store to it: all wait here, or for those that do"
ALIKE = " in the same way"
LAST = "The last store to it that is not weak is by"


def hang(
    name: str,
    run: Callable[..., None],
    function: FunctionType,
    old: str,
    new: str,
    names: tuple[Name, ...],
    not_names: tuple[str, ...] = (),
) -> Broken:
    return Broken(name, with_edit(function, old, new, run), DeadlockError, names, not_names, range(1), 1)


ROWS = ": the low-latency combine receiver (kernel `low_latency_combine`, block "
RECEIVER = ": the low-latency dispatch receiver (kernel `low_latency_dispatch`, block "
LOW_LATENCY = [
    hang("low latency: combine tells nobody of its rows", TRIP, combine_sender.notify_sources,
         "amo_add(ctx.network, cell, completion(0), peer, local_expert, True)", NOTHING,
         (ROWS, ": the rows of the peer's experts", "It polls " + RDMA, ": counts[half 1, rank ",
          "expects -1 and sees 0", NO_STORE, GIVEN_UP), ("Next to it", "circle")),
    hang("low latency: combine tells of the next expert's rows", TRIP, combine_sender.notify_sources,
         "ctx.network.rank, local_expert)", "ctx.network.rank, local_expert + 1)",
         (ROWS, RDMA, ": counts[half 1, rank ", ", local expert 0] (byte ", "expects -1 and sees 0", NO_STORE,
          "Next to it, ", ", local expert 1] (byte ", " is -", ", stored by rank "), ("circle",)),
    hang("once a rank: messages are not counted", ONCE, deduplicated_dispatch.put_to_ranks,
         "add_to_arrival(ctx, choice.peer, TAG, True)", NOTHING,
         (RECEIVER, ": arrivals[half 0, rank ", "expects -1 and sees -", LAST),
         ("circle", "counts[")),
    hang("once a rank: how many messages there are is not told", ONCE, deduplicated_dispatch.notify_counts,
         "add_to_arrival(ctx, peer, completion(num_messages), False)", NOTHING,
         (RECEIVER, ": arrivals[half 0, rank ", "expects -1 and sees ", LAST),
         ("sees -",)),
    hang("once a rank: how many parts there are is not told", ONCE, deduplicated_combine.announce_parts,
         "add_to_arrival(ctx, peer, completion(num_messages * num_parts), False)", NOTHING,
         (ROWS, ": arrivals[half 1, rank ", "expects -1 and sees "), ("sees -", "counts[")),
    hang("clean: nobody is told", CLEAN, clean_low_latency_buffer.barrier_network,
         "amo_add(network, signal, ptx.s32(number - previous), peer, 0, True)", NOTHING,
         ("rank 0: the clean_low_latency_buffer", "waits for rank 0: the peer's arrival at the barrier",
          "It polls `rdma_buffer` of rank 0: barrier_signal[rank 0] (byte ", "expects 1 and sees 0", NO_STORE,
          "Rank 1 waits for rank 0" + ALIKE, GIVEN_UP), ("Next to it",)),
    hang("clean: the signal of the peer in place of its own", CLEAN, clean_low_latency_buffer.barrier_network,
         "network.num_ranks, network.rank)", "network.num_ranks, peer)",
         (": the clean_low_latency_buffer", "It polls " + RDMA, ": barrier_signal[rank ", "expects 1 and sees 0",
          ("In the memory of rank 0 the same byte was stored by rank ",
            "In the memory of rank 1 the same byte was stored by rank "),
          ("barrier_signal[rank 1] (byte 23556) is 2, stored by rank 0, kernel `clean_low_latency_buffer`",
           "barrier_signal[rank 0] (byte 23552) is 2, stored by rank 1, kernel `clean_low_latency_buffer`"),
          "They wait in a circle")),
    hang("stages: lanes miss a phase of their mbarrier", TRIP, combine_sender.put_row,
         "put_nbi_warp(ctx.network, to, stage.data, part, ctx.lane)\n        ptx.syncwarp(ptx.FULL_MASK)",
         "put_nbi_warp(ctx.network, to, stage.data, part, ctx.lane)",
         ("It waits for the mbarrier at shared byte ", " phases of it are over; the last thread to arrive was rank ",
          "warp ", ", lane 0")),
]  # fmt: skip

GRID = "the grid barrier (kernel `internode_notify_dispatch`, block "
OWN_BLOCKS = "waits for the other blocks of its own launch"
BETWEEN_NODES = [
    hang("grid barrier: for one block more", NODES, grid_barrier.barrier_grid, "TOP - (ptx.grid_dim() - 1)",
         "TOP - ptx.grid_dim()",
         ("rank 0: " + GRID + "0-6, warp 0, lane 0) " + OWN_BLOCKS,
          "It polls `internode workspace` of rank 0: grid arrivals (byte 1408), expects 7 and sees 6",
          "Ranks 1-3 wait" + ALIKE, "Rank 0 " + GIVEN_UP), ("circle", "wait for each other", "Next to it")),
    hang("grid barrier: a block leaves it out", NODES, notify_dispatch.internode_notify_dispatch,
         "    barrier_grid(progress.grid_arrivals, bounds)",
         "    if ptx.block_idx() != 3:\n        barrier_grid(progress.grid_arrivals, bounds)",
         ("rank 0: " + GRID + "0-2, 4-6, warp 0, lane 0) " + OWN_BLOCKS,
          "It polls `internode workspace` of rank 0: grid arrivals (byte 1408), expects 7 and sees 6",
          "Threads that have left kernel `internode_notify_dispatch` of rank 0: block 3, warp 0", "Rank 0 " + GIVEN_UP),
         ("circle", "wait for each other")),
    hang("between nodes: a cached notify tells nobody", scenario("internode.cached"), cached_notify.come_together,
         "amo_add(ctx.network, arrived, ctx.call.signal, rank_at(ctx, node), 0, True)",
         NOTHING,
         ("rank 0: the internode notify (kernel `internode_cached_notify`, block 0, warp 0, lane 0)",
          "It polls `rdma_buffer` of rank 0: arrived[node 0] (byte 21760), expects 1 and sees 0",
          "by rank 0, kernel `internode_notify_dispatch`, block 0, warp 0, lane 0", "which has ended"), ("circle",)),
    hang("between nodes: combine does not publish its heads inside a node", scenario("internode", tokens=8),
         combine_forwarder.publish_nvl_heads, "ptx.st_relaxed_sys_s32", "max",
         ("the internode combine NVL sender (kernel `internode_combine`, block 1, warp 1, lane 0) waits for rank 1",
          ": head[channel 0, src 0] (byte ", "expects 2 or more and sees 0", NO_STORE,
          "rank 0 internode combine NVL sender -> rank 1 internode combine forwarder -> rank 0")),
]  # fmt: skip

COUNT = ": counts[half 0, rank 1, local expert 0] (byte 6148), expects -1 and"
FROM_1 = "On rank 1, the network to rank 0: queue 0 (queue pair 64): "
SENDER = "the sender on a queue pair (kernel `low_latency_"
TURN, DONE = "waits for the entries before its own to be written", "waits for the NIC to be done with an entry"
OVER_THE_NIC = [
    hang("queue pair: the turn is not passed on", NIC, queue_pair.submit,
         "ptx.st_release_gpu_s32(qp + 8 * READY, ptx.s32(after))", NOTHING,
         (SENDER, TURN, "It polls `queue pairs` of rank ", ": READY of queue pair 6", "and sees 0", NO_STORE,
          ", the network to rank ", ": queue 0 (queue pair 6", "): 0 entries of ", " that are reserved, none done"),
         ("They wait in a circle",)),
    hang("queue pair: a slot too many is reserved", NIC, transport.post_add, "index = reserve(qp, 1)",
         "index = reserve(qp, 2)",
         (SENDER, TURN, "`queue pairs` of rank ", ": READY of queue pair 6", " entries of ",
          " that are reserved, done up to entry "), ("They wait in a circle",)),
    hang("queue pair: the doorbell is not rung", NIC, queue_pair.submit,
         "ring(field(qp, DOORBELL), after, field(qp, QPN))", NOTHING,
         ("rank 0" + RECEIVER, " waits for rank 1: ", COUNT,
          NO_STORE, FROM_1, " entries, rung for 0, none done")),
    hang("queue pair: an add waits for others to ring", NIC, transport.post_add,
         "submit(network, qp, peer, queue, (index, 1), True)", "submit(network, qp, peer, queue, (index, 1), False)",
         ("rank 0" + RECEIVER, " waits for rank 1: ", COUNT,
          NO_STORE, FROM_1 + "5 entries, rung for 4, done up to entry 3")),
    hang("queue pair: the doorbell is not rung between nodes", NODES_OVER_NICS, queue_pair.submit,
         "ring(field(qp, DOORBELL), after, field(qp, QPN))", NOTHING,
         ("rank 0: the internode notify (kernel `internode_notify_dispatch`, block 0, warp 0, lane 1) waits for rank 2",
          "It polls `rdma_buffer` of rank 0: arrived[node 1] (byte 21764), expects 1 and sees 0", NO_STORE,
          "On rank 2, the network to rank 0: queue 0 (queue pair 64): 2 entries, rung for 0, none done")),
    hang("NIC: it does not tell what it has done", WRAPPING, nic.serve_entry, "complete(qp, index, error)", NOTHING,
         (SENDER, DONE, "It polls `queue pairs` of rank 0: completion of queue pair 65 (queue 0 to rank 1) + 60 (byte ",
          "and sees 65535", NO_STORE, "(queue pair 65): 6", ", none done", "; its NIC has nothing to do"),
         ("circle", "record of", "doorbell of")),
    hang("NIC: an add goes to the next cell", NIC, arrivals.notify,
         "amo_add(network, place.dst, total, place.peer, place.queue, True)",
         "amo_add(network, place.dst + 4, total, place.peer, place.queue, True)",
         ("rank 0" + RECEIVER, " waits for rank 1: ", COUNT,
          "Next to it, `rdma_buffer` of rank 0: counts[half 0, rank 0, local expert 1] (byte 6152) is -",
          ", stored by the NIC of rank 1, kernel `software_nic`",
          FROM_1 + "5 entries, done up to entry 4")),
    hang("NIC: it adds nothing", NIC, nic.execute_add,
         "ptx.atom_add_acq_rel_sys_s32(cell, ptx.s32(ptx.byteswap_u32(words[0])))",
         "ptx.ld_relaxed_sys_s32(cell)",
         ("rank 0" + RECEIVER, COUNT + " sees 0", NO_STORE,
          FROM_1 + "5 entries, done up to entry 4")),
]  # fmt: skip
ENTRIES = [*LOW_LATENCY, *BETWEEN_NODES, *OVER_THE_NIC]
