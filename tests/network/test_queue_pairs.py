"""Queue pairs under kernels of one's own: writes, values, fetch-and-adds, many threads, full queues, nodes."""

import random

import numpy as np
import pytest
from own_network import (
    CHUNK_BYTES,
    FLAGS,
    NUM_ENTRIES,
    RESULTS,
    SEEN,
    SOURCE,
    TARGET,
    Stores,
    fill_source,
    run,
    see,
    sent_by,
    wait_flag,
)
from parts import both_parts, dear
from target import MEMORY_MODELS

from nbep.device import primitives as ptx
from nbep.device.jit import kernel
from nbep.device.network.ibgda.queue_pair import entry_at, queue_pair_of
from nbep.device.network.ibgda.transport import (
    IbgdaNetwork,
    fetched_32,
    fetched_64,
    post_add,
    post_value,
    post_write,
    remote_address,
    wait_written,
)
from nbep.device.network.seam import Place, amo_add, keep_message, own_ptr, peer_ptr, put_nbi_warp, quiet
from nbep.device.types import I32, I64
from nbep.emulator import Unmapped

pytestmark = pytest.mark.emulator_only("the software NIC misbehaves on request")
every_memory_model = pytest.mark.parametrize("memory_model", MEMORY_MODELS)


@kernel()
def write_to_next(network: IbgdaNetwork, src: I32, dst: I32, num_bytes: I32):
    """One warp: write to the next rank, then look at what the one before has written, and at the entries."""
    lane = ptx.thread_idx()
    peer = ptx.u32_mod(network.rank + 1, network.num_ranks)
    fill_source(network, SOURCE + src, num_bytes, lane)
    last = post_write(network, Place(TARGET + dst, SOURCE + src, peer, 0), num_bytes, False, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, False, peer, 0)
        ptx.st_weak_s32(own_ptr(network, RESULTS), last + 1)
        for i in range(last + 1):
            num_segments = ptx.ld_weak_s32(entry_at(queue_pair_of(network, peer, 0), i) + 4) >> 24
            ptx.st_weak_s32(own_ptr(network, RESULTS + 4 + 4 * i), num_segments - 2)
    wait_flag(network, 0, 1, lane)
    see(network, dst, num_bytes, lane)


def data_segments(src: int, dst: int, num_bytes: int) -> list[int]:
    """For each entry of a write, how many data segments it has: one entry a chunk there, one segment a chunk here."""
    found = []
    while num_bytes:
        size = min(num_bytes, CHUNK_BYTES - dst % CHUNK_BYTES)
        found.append(1 if src % CHUNK_BYTES + size <= CHUNK_BYTES else 2)
        src, dst, num_bytes = src + size, dst + size, num_bytes - size
    return found


def check_write(src: int, dst: int, num_bytes: int, **options) -> None:
    memories = run(write_to_next, 1, 32, src, dst, num_bytes, **options)
    want = data_segments(SOURCE + src, TARGET + dst, num_bytes)
    for rank, memory in enumerate(memories):
        found = memory[SEEN : SEEN + dst + num_bytes + 1].tolist()
        assert found == [0] * dst + sent_by(rank - 1 if rank else len(memories) - 1, src, num_bytes) + [0]
        outside = memory[TARGET + dst - 1 : TARGET + dst + num_bytes + 1] if dst else memory[TARGET:FLAGS]
        assert outside[num_bytes + (dst != 0)] == 0
        results = memory[RESULTS:SEEN].view(np.int32)
        assert results[0] == len(want)
        assert results[1 : 1 + len(want)].tolist() == want


WRITES = [
    (0, 0, 16),
    (0, 0, 1024),
    (240, 0, 32),  # 16 bytes of each of two chunks
    (0, 240, 32),  # to 16 bytes of each of two chunks
    (240, 240, 16),
    (48, 160, 1024),
    (160, 48, 512),
    (16, 240, 8400),  # more entries than lanes
    (3, 5, 301),  # no multiples of 16
]


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@pytest.mark.parametrize(("src", "dst", "num_bytes"), both_parts(WRITES[2:6], thorough=WRITES[:2] + WRITES[6:]))
def test_a_write_has_an_entry_for_each_chunk_there_and_a_segment_for_each_chunk_here(src, dst, num_bytes, memory_model):
    check_write(src, dst, num_bytes, memory_model=memory_model, seed=1, nic={"seed": 1})


@pytest.mark.parametrize("seed", both_parts([], thorough=range(15), long=range(15, 60)))
def test_writes_of_any_size_between_any_places(seed):
    rng = random.Random(seed)
    step = rng.choice((16, 16, 1))
    src, dst, num_bytes = (step * rng.randrange(n // step) for n in (1024, 1024, rng.choice((512, 8192))))
    model = rng.choice(("sc", "delayed", "checked"))
    nic = {"seed": seed, "max_delay_ns": rng.choice((0, 300))}
    check_write(src, dst, num_bytes + step, memory_model=model, seed=seed, nic=nic, num_ranks=rng.choice((2, 3)))


@kernel()
def write_values(network: IbgdaNetwork, value: I64, shift: I32):
    """One warp, of which one thread writes: numbers of 1 to 8 bytes, each to a place of its own, and a flag."""
    lane = ptx.thread_idx()
    peer = 1 - network.rank
    if lane == 0:
        for num_bytes in range(1, 9):
            post_value(network, TARGET + 16 * num_bytes + shift, value + network.rank, num_bytes, peer, 0)
        post_add(network, FLAGS, 1, False, peer, 0)
    wait_flag(network, 0, 1, lane)
    see(network, 0, 160, lane)


@every_memory_model
@pytest.mark.parametrize("shift", [0, 3])
def test_a_value_of_one_to_eight_bytes_changes_these_bytes_alone(shift, memory_model):
    value = 0x7261_5443_3625_1708
    memories = run(write_values, 1, 32, value, shift, memory_model=memory_model, seed=shift)
    for rank, memory in enumerate(memories):
        want = np.zeros(160, np.uint8)
        for num_bytes in range(1, 9):
            begin = 16 * num_bytes + shift
            want[begin : begin + num_bytes] = list((value + 1 - rank).to_bytes(8, "little")[:num_bytes])
        assert memory[SEEN : SEEN + 160].tolist() == want.tolist()


@kernel()
def add_to_rank_0(network: IbgdaNetwork, num_adds: I32, value: I64, is_64_bits: I32):
    """The first lane of each warp adds on a queue of its own, and writes down what was there before."""
    warp = ptx.thread_idx() // 32
    if ptx.thread_idx() % 32 == 0:
        for i in range(num_adds):
            index = post_add(network, FLAGS, value, is_64_bits != 0, 0, warp)
            wait_written(network, 0, warp, index)
            old = fetched_64(network, 0, warp) if is_64_bits != 0 else fetched_32(network, 0, warp)
            ptx.st_weak_s64(own_ptr(network, RESULTS + 8 * (warp * num_adds + i)), old)


@every_memory_model
@pytest.mark.parametrize(
    ("dtype", "start", "value"),
    both_parts(
        [
            ("int32", 40, -7),
            ("int32", (1 << 31) - 4, 1),  # wraps
            ("int64", (1 << 32) - 4, 3),  # carries into the upper word
        ],
        thorough=[("int32", 0, 1), ("int32", -5, 3), ("int64", 0, 1), ("int64", -2, 1), ("int64", 5, -(1 << 40) - 1)],
    ),
)
def test_concurrent_adders_get_each_old_value_once(dtype, start, value, memory_model):
    num_ranks, num_warps, num_adds = 4, 2, 3

    def prepare(memory):
        memory.symmetric.write(FLAGS, np.array([start, 0x5A5A5A5A], dtype))

    memories = run(
        add_to_rank_0,
        1,
        32 * num_warps,
        num_adds,
        value,
        int(dtype == "int64"),
        num_ranks=num_ranks,
        num_qps=num_warps,
        ranks=range(1, num_ranks),
        prepare=prepare,
        memory_model=memory_model,
        nic={"max_delay_ns": 100, "seed": 1},
    )
    num_all = (num_ranks - 1) * num_warps * num_adds
    sums = (start + value * np.arange(num_all + 1, dtype="int64")).astype(dtype)
    assert memories[0][FLAGS : FLAGS + 16].view(dtype)[:2].tolist() == [sums[-1], 0x5A5A5A5A]
    old = [memory[RESULTS : RESULTS + 8 * num_warps * num_adds].view("int64") for memory in memories[1:]]
    assert sorted(np.concatenate(old)) == sorted(sums[:-1].astype("int64"))


@kernel()
def write_by_many(network: IbgdaNetwork, num_writes: I32, num_bytes: I32, is_alone: I32):
    """Each warp writes blocks of its own on its own queue, then adds to its flag; then it looks at what came."""
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    peer = 1 - network.rank
    size = num_writes * num_bytes
    fill_source(network, SOURCE + warp * size, size, lane)
    for i in range(num_writes):
        at = warp * size + i * num_bytes
        last = post_write(network, Place(TARGET + at, SOURCE + at, peer, warp), num_bytes, is_alone != 0, lane)
        if lane == 0:
            ptx.st_weak_s32(own_ptr(network, RESULTS + 4 * (warp * num_writes + i)), last)
    if lane == 0:
        post_add(network, FLAGS + 4 * warp, 1, False, peer, warp)
    wait_flag(network, warp, 1, lane)
    see(network, warp * size, size, lane)


def check_many(num_warps: int, num_writes: int, num_bytes: int, is_alone: bool, **options) -> list[list[int]]:
    """Run it, compare all bytes; for each warp of rank 0 the numbers of its entries."""
    memories = run(write_by_many, 1, 32 * num_warps, num_writes, num_bytes, int(is_alone), **options)
    size = num_warps * num_writes * num_bytes
    for rank, memory in enumerate(memories):
        assert memory[SEEN : SEEN + size].tolist() == sent_by(1 - rank, SOURCE, size)
    numbers = memories[0][RESULTS : RESULTS + 4 * num_warps * num_writes].view(np.int32)
    return numbers.reshape(num_warps, num_writes).tolist()


@every_memory_model
@pytest.mark.parametrize("num_qps", [1, 3])
def test_queues_are_spread_over_the_queue_pairs_of_a_peer(num_qps, memory_model):
    trace = Stores()
    numbers = check_many(5, 4, 32, True, num_qps=num_qps, memory_model=memory_model, tracer=trace, seed=2)
    for number in range(num_qps):
        on_it = [index for warp in range(number, 5, num_qps) for index in numbers[warp]]
        assert len(set(on_it)) == len(on_it)
        assert max(on_it) <= 5 * len(on_it) // 4 - 1  # these and a flag for each warp: no others are on it
    for rank in range(2):
        assert len(set(trace.of("doorbell", rank))) == num_qps


@dear
@pytest.mark.parametrize("memory_model", both_parts(["sc"], thorough=["delayed", "checked"]))
@pytest.mark.parametrize("seed", both_parts(range(1), thorough=[1], long=range(2, 8)))
def test_a_queue_of_64_entries_takes_hundreds_from_many_warps(seed, memory_model):
    numbers = check_many(4, 50, 16, seed % 2 == 0, memory_model=memory_model, seed=seed, nic={"seed": seed})
    assert max(map(max, numbers)) > 3 * NUM_ENTRIES


SLOW = {"max_delay_ns": 1000, "seed": 2}


@pytest.mark.parametrize("memory_model", both_parts(["sc"], thorough=["delayed", "checked"]))
def test_a_full_queue_waits_for_completions(memory_model):
    trace = Stores()
    check_many(2, 40, 16, False, memory_model=memory_model, seed=1, tracer=trace, nic=SLOW)
    assert "wait_room" in trace.waits


def test_a_queue_that_is_not_full_waits_for_nothing():
    trace = Stores()
    check_many(2, 30, 16, False, seed=1, tracer=trace, nic=SLOW)
    assert "wait_room" not in trace.waits


@pytest.mark.parametrize(("is_alone", "num_rings"), [(True, 12), (False, 3)])
def test_entries_that_need_not_leave_at_once_share_a_doorbell(is_alone, num_rings):
    """Eleven writes and an add: a ring for each, or after the fourth, the eighth, and the add."""
    trace = Stores()
    check_many(1, 11, 16, is_alone, tracer=trace)
    for rank in range(2):
        assert len(trace.of("doorbell", rank)) == len(trace.of("record", rank)) == num_rings


@kernel()
def message_to_all(network: IbgdaNetwork, num_bytes: I32):
    """One warp, by the network's functions alone: a message to each other rank, and a flag behind it."""
    lane = ptx.thread_idx()
    stage = ptx.smem_base()
    for i in range(16 * lane, num_bytes, 512):
        word = 1000 * (network.rank + 1) + i
        ptx.st_shared_v4(stage + i, (word, word + 1, word + 2, word + 3))
    ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    keep_message(network, SOURCE, stage, num_bytes, lane)
    for peer in range(network.num_ranks):
        if peer != network.rank:
            put_nbi_warp(network, Place(TARGET + num_bytes * network.rank, SOURCE, peer, 0), stage, num_bytes, lane)
    quiet(network, lane)
    if lane == 0:
        for peer in range(network.num_ranks):
            if peer != network.rank:
                amo_add(network, FLAGS, 1, peer, 0, True)
    wait_flag(network, 0, network.num_ranks - 1, lane)
    see(network, 0, num_bytes * network.num_ranks, lane)


@every_memory_model
@pytest.mark.parametrize(("num_ranks", "num_nvl_peers"), [(4, 2), (3, 1)])
def test_peers_of_the_node_are_reached_through_memory_and_others_through_queues(num_ranks, num_nvl_peers, memory_model):
    trace = Stores()
    num_bytes = 272
    memories = run(
        message_to_all,
        1,
        32,
        num_bytes,
        num_ranks=num_ranks,
        num_nvl_peers=num_nvl_peers,
        smem_bytes=num_bytes,
        memory_model=memory_model,
        tracer=trace,
    )
    for rank, memory in enumerate(memories):
        seen = memory[SEEN : SEEN + num_bytes * num_ranks].view(np.int32).reshape(num_ranks, -1)
        for sender in range(num_ranks):
            words = np.arange(num_bytes // 4) // 4 * 16 + np.arange(num_bytes // 4) % 4 + 1000 * (sender + 1)
            assert seen[sender].tolist() == (words if sender != rank else 0 * words).tolist()
        assert len(set(trace.of("doorbell", rank))) == num_ranks - num_nvl_peers


@kernel()
def reach_by_hand(network: IbgdaNetwork, peer: I32, is_store: I32, is_its_own: I32):
    """A plain access to another rank's memory: where this rank sees it, or where the other one itself does."""
    address = remote_address(network, TARGET, peer) if is_its_own != 0 else peer_ptr(network, TARGET, peer)
    if is_store != 0:
        ptx.st_weak_s32(address, 1)
    else:
        ptx.ld_weak_s32(address)


@pytest.mark.parametrize(
    ("is_its_own", "words"), [(False, "the null address"), (True, "an address of rank 2 used by rank 1, which has not")]
)
@pytest.mark.parametrize("is_store", [False, True])
def test_a_plain_access_to_another_nodes_memory_is_unmapped(is_store, is_its_own, words):
    options = {"num_ranks": 4, "num_nvl_peers": 2, "ranks": [1]}
    run(reach_by_hand, 1, 1, 0, int(is_store), 0, **options)  # its own node
    with pytest.raises(Unmapped, match=words) as caught:
        run(reach_by_hand, 1, 1, 2, int(is_store), int(is_its_own), **options)
    assert "rank 1, kernel `reach_by_hand`" in str(caught.value)
