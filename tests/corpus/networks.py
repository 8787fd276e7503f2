"""Kernels that send over a network, broken in one step: low latency, between nodes, queue pairs, the NIC."""

from collections.abc import Callable, Sequence
from functools import partial

from entries import OVERWRITTEN, SLOT, Name, Race, maybe
from own_network import FLAGS, SOURCE, TARGET, fill_source, run, see, wait_flag
from scenarios import scenario, with_edit, with_fault

from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.clean_low_latency_buffer import barrier_network
from nbep.device.network.ibgda.transport import IbgdaNetwork, fetched_32, post_add, post_write, wait_written
from nbep.device.network.seam import Place, own_ptr
from nbep.device.primitives import FULL_MASK, ld_acquire_sys_s32, syncwarp, thread_idx, wait_expired

# Small runs. Over the NIC each rank has one expert, and so one queue pair to the other.
TRIP = scenario("low_latency")
ONCE = scenario("low_latency", dedup=1, fp8=1)
OVERLAP = scenario("low_latency.overlap", rounds=3, tokens=4)
CLEAN = scenario("low_latency.clean", rounds=2, tokens=2, blocks=2)
NIC = scenario("low_latency", nic=1, experts=1, topk=2, tokens=2)
NODES = scenario("internode")
WITHOUT_TMA = scenario("internode", tma=0, tokens=8)

UNORDERED = ("neither waited", "not waited", "gone on", "loader gone on")


def race(
    name: str, fault: str, run, kinds: Name, cells: tuple[Name, ...], seeds: Sequence[int] = range(2), least=None
) -> Race:
    """least: for seeds that show something else first"""
    return Race(name, with_fault(fault, run), kinds, cells, seeds, len(seeds) if least is None else least)


WAIT = "wait_peer(signal, number, bounds, work.mask, peer)"

LOW_LATENCY = [
    Race("clean: nobody waits for the signals of the barrier",
         partial(with_edit(barrier_network, WAIT, "pass", CLEAN), memory_model="checked"), "no wait",
         (": barrier_signal[",), range(1, 4), 3),
    race("low latency: the add behind a message is relaxed", "network.direct.amo_add: release of network-amo", TRIP,
         "store too weak", (": counts[half 0",)),
    race("low latency: the add behind a message is of the GPU",
         "network.direct.amo_add: scope of the release of network-amo", TRIP,
         ("racing store's scope", "store scope"), (": counts[half 0",)),
    race("low latency: relaxed poll of a count", "arrivals.wait_arrival: acquire of network-amo", TRIP,
         "load too weak", (": counts[half 0",)),
    race("low latency: lanes that wait for counts do not meet", "low_latency.dispatch_receiver.wait_counts: syncwarp",
         TRIP, "shuffle passes on", (": counts[half 0",)),
    race("low latency: the copy engine is not told of a count",
         "low_latency.dispatch_receiver.wait_counts: fence_proxy_async_global", TRIP, "no proxy fence",
         (": recv[half 0", ": counts[half 0")),
    race("low latency: the sender does not wait for the casters",
         "low_latency.dispatch_sender.open_to_engine: bar_sync", TRIP, "no barrier", (": stage",)),
    race("low latency: a lane adds before the copies of another are done", "network.direct.quiet: syncwarp", TRIP,
         "another lane signals", (": counts[half 0",), least=1),
    race("low latency: rows are told of that are not there", "low_latency.combine_sender.send_expert_rows: quiet", TRIP,
         "copy writes", (": recv[half 1", maybe(": counts[half 1")), least=1),
    race("low latency: a warp speaks for the others too soon",
         "low_latency.combine_sender.send_expert_rows: syncthreads 2",
         TRIP, "another warp signals", (": counts[half 1",), seeds=(0, 3)),
    race("low latency: the add for rows is relaxed", "low_latency.combine_sender.notify_sources: amo_add", TRIP,
         "store too weak", (": counts[half 1",)),
    race("low latency: the coordinator's lanes do not meet",
         "low_latency.coordinator.end_earlier_calls: syncwarp", TRIP,
         "no syncwarp", (": state[",)),
    race("low latency: a credit before the cells are empty", "low_latency.coordinator.empty_half: syncwarp", OVERLAP,
         ("another lane signals", "warps not met"), (maybe(": counts[half"), maybe(": credits[half")),
         seeds=(0, 1, 3, 5, 6, 7), least=1),
    race("low latency: no credit is waited for", "low_latency.coordinator.may_send: wait for credit", OVERLAP,
         ("no wait", *OVERWRITTEN), ((": counts[half", ": recv[half"),), seeds=(0, 4)),
    race("low latency: relaxed credits", "low_latency.coordinator.empty_half: amo_add", OVERLAP, "store too weak",
         (": credits[half 0",), least=1),
    race("low latency: relaxed poll of a credit", "arrivals.wait_credit: acquire of network-amo", OVERLAP,
         "load too weak", (": credits[half 0",), least=1),
    race("once a rank: the add behind a message is relaxed",
         "low_latency.deduplicated_dispatch.put_to_ranks: add_to_arrival",
         ONCE, "store too weak", (": arrivals[half 0",)),
    race("once a rank: the copy engine is not told of an arrival",
         "low_latency.deduplicated_dispatch.receive_from_ranks: fence_proxy_async_global", ONCE, "no proxy fence",
         (": recv[half 0", ": arrivals[half 0")),
    race("once a rank: the add for sums is relaxed",
         "low_latency.deduplicated_combine.notify_sources: add_to_arrival", ONCE,
         "store too weak", (": arrivals[half 1",)),
    race("once a rank: lanes write and read a part without meeting",
         "low_latency.deduplicated_combine.send_part: syncwarp", ONCE,
         "no syncwarp", (": stage[",), seeds=(0, 4)),
    race("clean: relaxed signals", "low_latency.clean_low_latency_buffer.barrier_network: amo_add", CLEAN,
         "store too weak", (": barrier_signal[",), range(2, 6), least=2),
    race("clean: relaxed polls", "low_latency.clean_low_latency_buffer.wait_peer: acquire of network-amo", CLEAN,
         "load too weak", (": barrier_signal[",), range(2, 6), least=2),
    race("clean: warps do not meet before the signals",
         "low_latency.clean_low_latency_buffer.barrier_network: syncthreads", CLEAN, ("no barrier", "no syncwarp"),
         (": barriers[",), least=1),
]  # fmt: skip

BETWEEN_NODES = [
    race("grid barrier: relaxed arrivals", "grid_barrier.barrier_grid: release of grid-barrier", NODES,
         "store too weak", (": grid arrivals",)),
    race("grid barrier: relaxed polls", "grid_barrier.wait_arrivals: acquire of grid-barrier", NODES, "load too weak",
         (": grid arrivals",)),
    race("grid barrier: of one block", "grid_barrier.wait_arrivals: scope of the acquire of grid-barrier", NODES,
         "racing load's scope", (": grid arrivals",)),
    race("grid barrier: left out", "internode.notify_dispatch.internode_notify_dispatch: barrier_grid", NODES,
         UNORDERED, ("`gbl_channel_prefix_matrix`",)),
    race("grid barrier: a block goes on with its first thread", "grid_barrier.barrier_grid: syncthreads 2", NODES,
         ("loader gone on", "gone on"), ("`gbl_channel_prefix_matrix`", ": grid arrivals"), least=1),
    race("notify: relaxed adds", "internode.notify_dispatch.send_message: amo_add", NODES, "store too weak",
         (": arrived[",)),
    race("notify: relaxed polls", "internode.meet_nodes.wait_arrived: acquire of network-amo", NODES, "load too weak",
         (": arrived[",)),
    race("notify: a block goes on with the lanes that have waited", "internode.notify_dispatch.exchange: bar_red_and",
         NODES, ("loader gone on", "heard by another lane"), (": arrived[", maybe(": count message recv[")),
         seeds=(2, 3)),
    race("between nodes: relaxed tails", "internode.coordinator.publish_slots: amo_add", NODES, "store too weak",
         (": tail[",), range(1)),
    race("between nodes: relaxed polls of tails", "internode.dispatch_forwarder.load_tail: acquire of network-amo",
         NODES, "load too weak", (": tail[",), range(1)),
    race("between nodes: the copy engine is not told of a tail",
         "internode.dispatch_forwarder.next_batch: fence_proxy_async_global", NODES, "no proxy fence",
         (": recv ", ": tail["), range(1)),
    race("between nodes: a warp notes its progress relaxed", "board.note_progress: release of board", NODES,
         "store too weak", (": board[",), range(1)),
    race("between nodes: the coordinator reads progress relaxed", "board.least_progress: acquire of board", NODES,
         "load too weak", (": board[",), range(1)),
    race("between nodes: the notes of a slot are written by lanes that have not met",
         "internode.dispatch_sender.send_token: syncwarp", NODES, "shuffle", (": stage[",), range(1)),
    race("between nodes: the tail of a node does not wait for bulk stores", "teams.publish_tail: tma_store_wait_all",
         NODES, "copy writes", (SLOT, ": tail["), range(1)),
    race("between nodes: a batch before the forwarder's team has read the last one",
         "internode.dispatch_forwarder.deliver_tokens: team_barrier", WITHOUT_TMA, "shuffle", (": batch[",), range(1)),
    race("between nodes: a batch before the receiver's team has read the last one",
         "internode.dispatch_receiver.receive_tokens: team_barrier 2", WITHOUT_TMA, "shuffle", (": batch[",),
         range(1)),
    race("between nodes: the ring of a node overruns", "internode.dispatch_forwarder.forward_tokens: wait for head",
         scenario("internode", tokens=4), OVERWRITTEN, (SLOT,), range(1)),
]  # fmt: skip

OVER_THE_NIC = [
    race("queue pair: the turn is passed on relaxed", "network.ibgda.queue_pair.submit: release of ibgda-turn", NIC,
         "store too weak", (": READY",)),
    race("queue pair: the turn is awaited relaxed", "network.ibgda.queue_pair.wait_turn: acquire of ibgda-turn", NIC,
         "load too weak", (": READY",)),
    race("queue pair: a turn of one block", "network.ibgda.queue_pair.submit: scope of the release of ibgda-turn", NIC,
         "racing store's scope", (": READY",)),
    race("queue pair: a lane submits entries that others write", "network.ibgda.transport.post_few: syncwarp 2", NIC,
         ("another warp signals", "another lane signals"), ((": READY", ": doorbell"),), range(4), 1),
    race("queue pair: the doorbell is relaxed", "network.ibgda.queue_pair.ring: release of ibgda-doorbell", NIC,
         ("load too weak", "store too weak"), ((": doorbell", ": record"),)),
    race("queue pair: the doorbell is rung for the GPU",
         "network.ibgda.queue_pair.ring: scope of the release of ibgda-doorbell", NIC, "racing store's scope",
         (": doorbell",)),
    race("NIC: the doorbell is read relaxed", "network.nic.rung: acquire of ibgda-doorbell", NIC, "load too weak",
         ((": doorbell", ": record"),)),
    race("NIC: one lane has heard the doorbell, all read the entry", "network.nic.dawdle: syncwarp", NIC,
         "shuffle passes on", (": doorbell",)),
    race("NIC: its atomic is relaxed", "network.nic.execute_add: acquire and release of network-amo 2", NIC,
         "store too weak", (": counts[half 0",), least=1),
    race("NIC: a completion for itself alone", "network.nic.complete: scope of the release of ibgda-completion", NIC,
         "racing store's scope", (": completion",)),
]  # fmt: skip


# --- kernels of a user's own, one warp on each of two ranks -----------------------------------------------------------

SIZE = 256


@kernel()
def flag_on_another_queue(network: IbgdaNetwork):
    """The data go through queue 0, the flag behind them through queue 1."""
    lane, peer = thread_idx(), 1 - network.rank
    fill_source(network, SOURCE, SIZE, lane)
    post_write(network, Place(TARGET, SOURCE, peer, 0), SIZE, True, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, False, peer, 1)
    wait_flag(network, 0, 1, lane)
    see(network, 0, SIZE, lane)


@kernel()
def last_word_as_a_flag(network: IbgdaNetwork):
    """The receiver polls the last word of the data."""
    lane, peer = thread_idx(), 1 - network.rank
    fill_source(network, SOURCE, SIZE, lane)
    post_write(network, Place(TARGET, SOURCE, peer, 0), SIZE, True, lane)
    if lane == 0:
        while ld_acquire_sys_s32(own_ptr(network, TARGET + SIZE - 4)) == 0:
            wait_expired(1 << 62)
    syncwarp(FULL_MASK)
    see(network, 0, SIZE, lane)


@kernel()
def source_filled_again(network: IbgdaNetwork):
    """The next message is written while the NIC may still read the one before."""
    lane, peer = thread_idx(), 1 - network.rank
    for _ in range(2):
        fill_source(network, SOURCE, SIZE, lane)
        post_write(network, Place(TARGET, SOURCE, peer, 0), SIZE, True, lane)


@kernel()
def old_value(network: IbgdaNetwork):
    """An add at the peer, and what was there before."""
    if thread_idx() == 0:
        peer = 1 - network.rank
        wait_written(network, peer, 0, post_add(network, FLAGS, 1, False, peer, 0))
        fetched_32(network, peer, 0)


def own(function: Callable) -> Callable[..., None]:
    """A kernel over the software NIC, which is slow. The buffer's cells have no names."""

    def attempt(seed: int, memory_model: str = "checked") -> None:
        run(function, 1, 32, num_qps=2, nic={"seed": 1, "max_delay_ns": 300}, seed=seed, memory_model=memory_model)

    return attempt


def users(name: str, function: Callable, kinds: Name, cells: tuple[Name, ...], seeds: Sequence[int] = range(4)) -> Race:
    return Race(name, own(function), kinds, cells, seeds)


USERS = [
    users("NIC: the flag on another queue pair", flag_on_another_queue, "queue pairs", (": buffer",),
          seeds=(0, 2, 3, 4)),
    users("NIC: the last word of a message as a flag", last_word_as_a_flag, "weak store", (": buffer",)),
    users("NIC: a source is filled again while it is read", source_filled_again,
          (*OVERWRITTEN, "neither waited"), (": buffer + ",)),
    race("queue pair: a completion is awaited relaxed",
         "network.ibgda.completion.wait_done: acquire of ibgda-completion", own(old_value), "load too weak",
         (": completion",)),
    race("NIC: a completion is relaxed", "network.nic.complete: release of ibgda-completion", own(old_value),
         "store too weak", (": completion",)),
]  # fmt: skip
ENTRIES = [*LOW_LATENCY, *BETWEEN_NODES, *OVER_THE_NIC, *USERS]
