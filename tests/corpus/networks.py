"""Kernels that send over a network, broken in one step: low latency, between nodes, queue pairs, the NIC."""

from collections.abc import Callable
from functools import partial

from entries import Broken, Name
from own_network import FLAGS, SOURCE, TARGET, fill_source, run, see, wait_flag
from scenarios import scenario, with_edit, with_fault

from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.clean_low_latency_buffer import barrier_network
from nbep.device.network.ibgda.transport import IbgdaNetwork, fetched_32, post_add, post_write, wait_written
from nbep.device.network.seam import own_ptr
from nbep.device.primitives import FULL_MASK, ld_acquire_sys_s32, syncwarp, thread_idx, wait_expired
from nbep.emulator import DataRace

# Small runs. Over the NIC each rank has one expert, and so one queue pair to the other.
TRIP = scenario("low_latency")
ONCE = scenario("low_latency", dedup=1, fp8=1)
OVERLAP = scenario("low_latency.overlap", rounds=3, tokens=4)
CLEAN = scenario("low_latency.clean", rounds=2, tokens=2, blocks=2)
NIC = scenario("low_latency", nic=1, experts=1, topk=2, tokens=2)
NODES = scenario("internode")
WITHOUT_TMA = scenario("internode", tma=0, tokens=8)

STORE, LOAD, ATOMIC = "the store to ", "the load of ", "the atomic on "
RELEASES, ACQUIRES = "releases nothing, and no fence comes before it", "acquires nothing, and no fence comes after it"
RDMA, NVL, QUEUES = "`rdma_buffer` of rank ", "`nvl_buffer` of rank ", "`queue pairs` of rank "
ENGINE, NO_FENCE = "the copy engine is not told what this thread knows by ", "no fence.proxy.async.global comes before"
OTHER_LANE = "another thread of its block makes that one"
TIES = ("scope", "both", "no barrier", "no syncwarp")
GRID = "`internode workspace` of rank "
NEXT_BATCH = "is between the load and this store of `shared memory`: batch[team "


def race(name: str, fault: str, run, names: tuple[Name, ...], not_names=(), seeds=range(2), least=None) -> Broken:
    """least: for seeds that show something else first"""
    attempt = with_fault(fault, run)
    return Broken(name, attempt, DataRace, names, not_names, seeds, len(seeds) if least is None else least)


WAIT = "wait_peer(own_ptr(network, signals + 4 * peer), number, bounds, work.mask, peer)"

LOW_LATENCY = [
    Broken("clean: nobody waits for the signals of the barrier",
           partial(with_edit(barrier_network, WAIT, "pass", CLEAN), memory_model="checked"), DataRace,
           ("a wait is missing in kernel `clean_low_latency_buffer`", ": barrier_signal[rank "), ("too weak", "calls["),
           range(1, 4), 3),
    race("low latency: the add behind a message is relaxed", "network.direct.amo_add: release of network-amo", TRIP,
         (ATOMIC + RDMA, ": counts[half 0, rank ", RELEASES), (LOAD, *TIES)),
    race("low latency: the add behind a message is of the GPU", "network.direct.amo_add: scope of the release of "
         "network-amo", TRIP, ("the scope of ", RDMA, ": counts[half 0, rank ", "gpu, but between ranks it takes sys"),
         ("too weak",)),
    race("low latency: relaxed poll of a count", "arrivals.wait_arrival: acquire of network-amo", TRIP,
         (LOAD + RDMA, ": counts[half 0, rank ", ACQUIRES), (ATOMIC, *TIES)),
    race("low latency: lanes that wait for counts do not meet", "low_latency.dispatch_receiver.wait_counts: syncwarp",
         TRIP, (("no syncwarp passes on to all lanes what one has heard by " + RDMA,
                 "comes too soon, no syncwarp makes it wait for the thread that has loaded that"),
                ": counts[half 0, rank "), ("too weak", "no barrier", "no fence")),
    race("low latency: the copy engine is not told of a count",
         "low_latency.dispatch_receiver.wait_counts: fence_proxy_async_global", TRIP,
         (ENGINE + RDMA, ": counts[half 0, rank ", NO_FENCE + " the bulk load of " + RDMA, ": recv[half 0] + "),
         ("too weak",)),
    race("low latency: the sender does not wait for the casters",
         "low_latency.dispatch_sender.open_to_engine: bar_sync", TRIP,
         ("no barrier is between the store and this load of `shared memory`", "two warps of a block"), ("too weak",)),
    race("low latency: a lane adds before the copies of another are done", "network.direct.quiet: syncwarp", TRIP,
         ("no syncwarp orders the bulk store before the atomic on " + RDMA, ": counts[half 0, rank ", OTHER_LANE),
         ("too weak",), least=1),
    race("low latency: rows are told of that are not there", "low_latency.combine_sender.send_expert_rows: quiet", TRIP,
         ("the bulk copy that writes " + RDMA, ": recv[half 1] + ", "a wait_group is missing",
          (": counts[half 1, rank ", "has not been waited for")), ("too weak", "no barrier"), least=1),
    race("low latency: a warp speaks for the others too soon",
         "low_latency.combine_sender.send_expert_rows: syncthreads", TRIP,
         ("no barrier or syncwarp orders the bulk store before the atomic on " + RDMA, ": counts[half 1, rank ",
          OTHER_LANE), ("too weak",), seeds=(1, 2)),
    race("low latency: the add for rows is relaxed", "low_latency.combine_sender.notify_sources: amo_add", TRIP,
         (ATOMIC + RDMA, ": counts[half 1, rank ", RELEASES), (LOAD, *TIES)),
    race("low latency: the coordinator's lanes do not meet",
         "low_latency.coordinator.end_earlier_calls: syncwarp", TRIP,
         ("no syncwarp is between the load and this store of `low-latency workspace` of rank ", ": journal["),
         ("too weak", "no barrier")),
    race("low latency: a credit before the cells are empty", "low_latency.coordinator.empty_half: syncwarp", OVERLAP,
         (("no syncwarp orders the store before the atomic on " + RDMA, "no barrier is between two stores of " + RDMA),
          (": credits[half ", ": counts[half "), (OTHER_LANE, "two warps of a block")), ("too weak",), seeds=(2, 5)),
    race("low latency: no credit is waited for", "low_latency.coordinator.may_send: wait for credit", OVERLAP,
         (RDMA, ": counts[half ", "waited for nothing that the "), ("no barrier", "too weak"), least=1),
    race("low latency: relaxed credits", "low_latency.coordinator.empty_half: amo_add", OVERLAP,
         (ATOMIC + RDMA, ": credits[half ", "too weak to order one store before the other", RELEASES), (LOAD, *TIES),
         least=1),
    race("low latency: relaxed poll of a credit", "arrivals.wait_credit: acquire of network-amo", OVERLAP,
         (LOAD + RDMA, ": credits[half ", ACQUIRES), (ATOMIC, *TIES), least=1),
    race("once a rank: the add behind a message is relaxed",
         "low_latency.deduplicated_dispatch.put_to_ranks: add_to_arrival", ONCE,
         (ATOMIC + RDMA, ": arrivals[half 0, rank ", RELEASES), (LOAD, "counts[", *TIES)),
    race("once a rank: the copy engine is not told of an arrival",
         "low_latency.deduplicated_dispatch.receive_from_ranks: fence_proxy_async_global", ONCE,
         (ENGINE + RDMA, ": arrivals[half 0, rank ", NO_FENCE, ": recv[half 0] + "), ("counts[", "too weak")),
    race("once a rank: the add for sums is relaxed",
         "low_latency.deduplicated_combine.notify_sources: add_to_arrival", ONCE,
         (ATOMIC + RDMA, ": arrivals[half 1, rank ", RELEASES), (LOAD, "counts[", *TIES)),
    race("once a rank: lanes write and read a part without meeting",
         "low_latency.deduplicated_combine.send_part: syncwarp", ONCE,
         ("no syncwarp is between the store and this load of `shared memory`", "two lanes of a warp"),
         ("too weak", "no barrier"), seeds=(0, 3)),
    race("clean: relaxed signals", "low_latency.clean_low_latency_buffer.barrier_network: amo_add", CLEAN,
         (ATOMIC + RDMA, ": barrier_signal[rank ", RELEASES), (LOAD, *TIES), range(2, 6), least=2),
    race("clean: relaxed polls", "arrivals.wait_peer: acquire of network-amo", CLEAN,
         (LOAD + RDMA, ": barrier_signal[rank ", ACQUIRES), (ATOMIC, *TIES), range(2, 6), least=2),
    race("clean: warps do not meet before the signals",
         "low_latency.clean_low_latency_buffer.barrier_network: syncthreads", CLEAN,
         (("no barrier is between the load and this store of `low-latency workspace` of rank ",
           "no syncwarp is between the load and this store of `low-latency workspace` of rank "), ": barriers[rank "),
         ("too weak",), least=1),
]  # fmt: skip

BETWEEN_NODES = [
    race("grid barrier: relaxed arrivals", "grid_barrier.barrier_grid: release of grid-barrier", NODES,
         (ATOMIC + GRID, ": grid arrivals (byte ", RELEASES), (LOAD, *TIES)),
    race("grid barrier: relaxed polls", "waits.wait_arrivals: acquire of grid-barrier", NODES,
         (LOAD + GRID, ": grid arrivals (byte ", ACQUIRES), (ATOMIC, *TIES)),
    race("grid barrier: of one block", "waits.wait_arrivals: scope of the acquire of grid-barrier", NODES,
         ("the scope of ", GRID, ": grid arrivals (byte ", "cta, but between blocks of a rank it takes gpu"),
         ("too weak",)),
    race("grid barrier: left out", "internode.notify_dispatch.internode_notify_dispatch: barrier_grid", NODES,
         ("nothing at all orders the ", "channel_prefix_matrix` of rank "), ("too weak", "scope", "overwritten")),
    race("grid barrier: a block goes on with its first thread", "grid_barrier.barrier_grid: syncthreads 2", NODES,
         ("nothing at all orders the ", "channel_prefix_matrix` of rank ",
          "has gone on while thread 0 of its block waits for " + GRID, ": grid arrivals (byte "),
         ("too weak", "scope", "overwritten"), least=1),
    race("notify: relaxed adds", "internode.notify_dispatch.send_message: amo_add", NODES,
         (ATOMIC + RDMA, ": arrived[node ", RELEASES), (LOAD, *TIES)),
    race("notify: relaxed polls", "totals.wait_arrived: acquire of network-amo", NODES,
         (LOAD + RDMA, ": arrived[node ", ACQUIRES), (ATOMIC, *TIES)),
    race("notify: a block goes on with the lanes that have waited", "internode.meet_nodes: bar_red_and",
         NODES, (("no syncwarp orders this load behind the load of " + RDMA,
                  "nothing at all orders the load and this bulk store of " + RDMA),
                 ("another thread of its block makes that one", "the thread that loads has gone on while thread "),
                 (": arrived[node ", ": count message recv[")), ("too weak", "grid arrivals"), seeds=(0, 2)),
    race("between nodes: relaxed tails", "internode.coordinator.publish_slots: amo_add", NODES,
         (ATOMIC + RDMA, ": tail[channel 0, node ", RELEASES), (LOAD, "head[", *TIES), range(1)),
    race("between nodes: relaxed polls of tails", "internode.dispatch_forwarder.load_tail: acquire of network-amo",
         NODES, (LOAD + RDMA, ": tail[channel 0, node ", ACQUIRES), (ATOMIC, "head[", *TIES), range(1)),
    race("between nodes: the copy engine is not told of a tail",
         "internode.dispatch_forwarder.next_batch: fence_proxy_async_global", NODES,
         (ENGINE + RDMA, ": tail[channel 0, node ", NO_FENCE + " the bulk load of " + RDMA), ("too weak",), range(1)),
    race("between nodes: a warp notes its progress relaxed", "board.note_progress: release of board", NODES,
         (ATOMIC + "`shared memory`: board[warp ", RELEASES), ("rdma_buffer", *TIES), range(1)),
    race("between nodes: the coordinator reads progress relaxed", "board.least_progress: acquire of board", NODES,
         (LOAD + "`shared memory`: board[warp ", ACQUIRES), ("rdma_buffer", *TIES), range(1)),
    race("between nodes: the notes of a slot are written by lanes that have not met",
         "internode.dispatch_sender.send_token: syncwarp", NODES,
         ("no syncwarp is between two stores of `shared memory`: stage[warp ", "a vote.ballot brings lanes together"),
         ("too weak", "no barrier"), range(1)),
    race("between nodes: the tail of a node does not wait for bulk stores", "teams.publish_tail: tma_store_wait_all",
         NODES, ("the bulk copy that writes " + NVL, "a wait_group is missing before the store to " + NVL,
                 ": tail[channel 0, src "), ("too weak",), range(1)),
    race("between nodes: a batch before the forwarder's team has read the last one",
         "internode.dispatch_forwarder.deliver_tokens: team_barrier", WITHOUT_TMA, (NEXT_BATCH,), ("too weak",),
         range(1)),
    race("between nodes: a batch before the receiver's team has read the last one",
         "internode.dispatch_receiver.receive_tokens: team_barrier 2", WITHOUT_TMA, (NEXT_BATCH,),
         ("too weak", "overwritten"), range(1)),
    race("between nodes: the ring of a node overruns", "internode.dispatch_forwarder.forward_tokens: wait for head",
         scenario("internode", tokens=4),
         (NVL, "is overwritten, and nothing at all tells this thread that it has been read"), ("too weak",),
         range(1)),
]  # fmt: skip

OVER_THE_NIC = [
    race("queue pair: the turn is passed on relaxed", "network.ibgda.queue_pair.submit: release of ibgda-turn", NIC,
         (STORE + QUEUES, ": READY of queue pair 6", RELEASES), (LOAD, "doorbell", *TIES)),
    race("queue pair: the turn is awaited relaxed", "network.ibgda.queue_pair.wait_turn: acquire of ibgda-turn", NIC,
         (LOAD + QUEUES, ": READY of queue pair 6", ACQUIRES), (STORE, "doorbell", *TIES)),
    race("queue pair: a turn of one block", "network.ibgda.queue_pair.submit: scope of the release of ibgda-turn", NIC,
         ("the scope of ", QUEUES, ": READY of queue pair 6", "cta, but between blocks of a rank it takes gpu"),
         ("too weak", "doorbell")),
    race("queue pair: a lane submits entries that others write", "network.ibgda.transport.post_few: syncwarp 2", NIC,
         (("no syncwarp orders the store before the store to " + QUEUES,
           "no barrier or syncwarp orders the store before the store to " + QUEUES),
          (": READY of queue pair 6", ": doorbell of queue pair 6"), OTHER_LANE), ("too weak",), range(4), 1),
    race("queue pair: the doorbell is relaxed", "network.ibgda.doorbell.ring: release of ibgda-doorbell", NIC,
         ((STORE + QUEUES, LOAD + QUEUES), (": doorbell of queue pair 6", ": record of queue pair 6"),
          (RELEASES, ACQUIRES)), ("READY", *TIES)),
    race("queue pair: the doorbell is rung for the GPU",
         "network.ibgda.doorbell.ring: scope of the release of ibgda-doorbell", NIC,
         ("the scope of ", QUEUES, ": doorbell of queue pair 6", "gpu, but between ranks it takes sys"),
         ("too weak", "READY")),
    race("NIC: the doorbell is read relaxed", "network.nic.rung: acquire of ibgda-doorbell", NIC,
         (LOAD + QUEUES, (": doorbell of queue pair 6", ": record of queue pair 6"), ACQUIRES),
         (STORE, "READY", *TIES)),
    race("NIC: one lane has heard the doorbell, all read the entry", "network.nic.dawdle: syncwarp", NIC,
         ("no syncwarp passes on to all lanes what one has heard by " + QUEUES,
          (": doorbell of queue pair 6", ": record of queue pair 6"), "shfl.idx"), ("too weak", "READY")),
    race("NIC: its atomic is relaxed", "network.nic.execute_add: acquire and release of network-amo 2", NIC,
         (ATOMIC + RDMA, ": counts[half 0, rank ", RELEASES), (LOAD, "queue pair", *TIES), least=1),
    race("NIC: a completion for itself alone", "network.nic.complete: scope of the release of ibgda-completion", NIC,
         ("the scope of ", QUEUES, ": completion of queue pair 6", "gpu, but between ranks it takes sys"),
         ("too weak", "doorbell")),
]  # fmt: skip


# --- kernels of a user's own, one warp on each of two ranks -----------------------------------------------------------

SIZE = 256


@kernel()
def flag_on_another_queue(network: IbgdaNetwork):
    """The data go through queue 0, the flag behind them through queue 1."""
    lane, peer = thread_idx(), 1 - network.rank
    fill_source(network, SOURCE, SIZE, lane)
    post_write(network, TARGET, SOURCE, SIZE, peer, 0, True, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, False, peer, 1)
    wait_flag(network, 0, 1, lane)
    see(network, 0, SIZE, lane)


@kernel()
def last_word_as_a_flag(network: IbgdaNetwork):
    """The receiver polls the last word of the data."""
    lane, peer = thread_idx(), 1 - network.rank
    fill_source(network, SOURCE, SIZE, lane)
    post_write(network, TARGET, SOURCE, SIZE, peer, 0, True, lane)
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
        post_write(network, TARGET, SOURCE, SIZE, peer, 0, True, lane)


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


def users(
    name: str, function: Callable, names: tuple[Name, ...], not_names: tuple[str, ...] = (), least=1, seeds=range(4)
) -> Broken:
    return Broken(name, partial(own(function)), DataRace, names, not_names, seeds, least)


USERS = [
    users("NIC: the flag on another queue pair", flag_on_another_queue,
          ("nothing at all orders the store before this load of " + NVL, "the NIC has stored it for entry 0 of ",
           "heard of the NIC is " + NVL, ", for entry 0 of queue pair 6", "nothing orders two queue pairs"),
          ("too weak",), seeds=(0, 2, 3, 4)),
    users("NIC: the last word of a message as a flag", last_word_as_a_flag,
          (NVL, "is too weak: weak, but another thread loads it with acquire.sys order"), ("scope",)),
    users("NIC: a source is filled again while it is read", source_filled_again,
          (NVL, ("is overwritten, and nothing at all tells this thread that it has been read",
                 "was overwritten before this load: this thread was told of the store before that one",
                 "nothing at all orders the load and this store of ")), ("too weak", "syncwarp")),
    race("queue pair: a completion is awaited relaxed",
         "network.ibgda.completion.wait_done: acquire of ibgda-completion", own(old_value),
         (LOAD + QUEUES, ": completion of queue pair 6", ACQUIRES), (STORE, *TIES)),
    race("NIC: a completion is relaxed", "network.nic.complete: release of ibgda-completion", own(old_value),
         (STORE + QUEUES, ": completion of queue pair 6", RELEASES), (LOAD, *TIES)),
]  # fmt: skip
ENTRIES = [*LOW_LATENCY, *BETWEEN_NODES, *OVER_THE_NIC, *USERS]
