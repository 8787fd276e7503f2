"""What primitives do when the emulator runs them."""

import sys

import numpy as np
import pytest

from nbep.device import primitives as p
from nbep.device.jit import PRIMITIVES
from nbep.emulator import DeadlockError, Trap, World

DTYPES = {
    "u8": (np.uint8, 1), "s32": (np.int32, 1), "u32": (np.uint32, 1), "s64": (np.int64, 1), "f32": (np.float32, 1),
    "v2": (np.uint32, 2), "v4": (np.uint32, 4),
}  # fmt: skip
LOADS = sorted(name for name in PRIMITIVES if name.startswith("ld_") and "shared" not in name)
STORES = sorted(name for name in PRIMITIVES if name.startswith("st_") and "shared" not in name)


def launch(kernel, arrays, *numbers, grid=1, block=1, smem_bytes=0, seed=0, **settings):
    """Run a kernel on one rank, with the addresses of arrays and then the numbers for arguments."""
    world = World(1, seed, **settings)
    context = world.ranks[0]
    addresses = [context.space.map_array(array, f"array{i}", True).address for i, array in enumerate(arrays)]
    stream = context.create_stream("main")
    stream.launch(kernel, (*addresses, *numbers), grid, block, smem_bytes)
    stream.synchronize()


def cell(kind, value):
    """An array of one cell, and the value that a load of it gives."""
    dtype, width = DTYPES[kind]
    array = (np.arange(width) + value).astype(dtype)
    return array, array[0] if width == 1 else tuple(array.tolist())


@pytest.mark.parametrize("name", LOADS)
def test_load_gives_the_cell_in_its_kind(name):
    kind = name.rsplit("_", 1)[1]
    array, expected = cell(kind, 200 if kind == "u8" else 0x7FFFFFF0)
    seen = []
    launch(lambda address: seen.append(getattr(p, name)(address)), [array])
    assert seen == [expected]
    assert isinstance(seen[0], {"f32": np.float32, "v2": tuple, "v4": tuple}.get(kind, int))


@pytest.mark.parametrize("name", STORES)
def test_store_writes_its_kind_and_no_more(name):
    kind = name.rsplit("_", 1)[1]
    dtype, width = DTYPES[kind]
    array, expected = cell(kind, 7)
    target = np.zeros(2 * width, dtype)
    launch(lambda address: getattr(p, name)(address, expected), [target])
    np.testing.assert_array_equal(target, np.concatenate([array, np.zeros(width, dtype)]))


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("st_weak_s32", 2**31, -(2**31)),
        ("st_weak_u32", -1, 2**32 - 1),
        ("st_weak_u8", 0x1FF, 0xFF),
        ("st_weak_s64", 2**63, -(2**63)),
        ("st_release_sys_s32", 2**32 + 3, 3),
    ],
)
def test_store_wraps_integers(name, value, stored):
    target = np.zeros(1, DTYPES[name.rsplit("_", 1)[1]][0])
    launch(lambda address: getattr(p, name)(address, value), [target])
    assert target[0] == stored


@pytest.mark.parametrize("name", sorted(n for n in PRIMITIVES if n.startswith("atom_add_") and "shared" not in n))
def test_atomic_addition_gives_the_value_before_and_wraps(name):
    dtype = DTYPES[name.rsplit("_", 1)[1]][0]
    cells = np.array([np.iinfo(dtype).max], dtype)
    seen = []
    launch(lambda address: seen.append(getattr(p, name)(address, 1)), [cells])
    assert seen == [np.iinfo(dtype).max]
    assert cells[0] == np.iinfo(dtype).min


def test_exchange_and_compare_and_swap_give_the_value_before():
    cells = np.array([5, 5, 5], np.int32)
    seen = []

    def kernel(address):
        seen.append(p.atom_exch_acq_rel_sys_s32(address, 9))
        seen.append(p.atom_cas_acq_rel_sys_s32(address + 4, 5, 9))
        seen.append(p.atom_cas_acq_rel_sys_s32(address + 8, 4, 9))

    launch(kernel, [cells])
    assert seen == [5, 5, 5]
    assert cells.tolist() == [9, 9, 5]


@pytest.mark.parametrize("seed", range(3))
def test_atomic_additions_of_all_threads_count_once_each(seed):
    total = np.zeros(1, np.int32)
    tickets = np.zeros(96, np.int32)

    def kernel(total, tickets):
        ticket = p.atom_add_relaxed_gpu_s32(total, 1)
        p.st_weak_s32(tickets + 4 * ticket, p.block_idx() * p.block_dim() + p.thread_idx())

    launch(kernel, [total, tickets], grid=3, block=32, seed=seed)
    assert total[0] == 96
    assert sorted(tickets) == list(range(96))


@pytest.mark.parametrize("seed", range(3))
def test_shared_memory_carries_values_across_syncthreads(seed):
    out = np.zeros(64, np.int32)

    def kernel(out):
        i, last = p.thread_idx(), p.block_dim() - 1
        p.st_shared_s32(p.smem_base() + 4 * i, i)
        p.syncthreads()
        p.st_weak_s32(out + 4 * i, p.ld_shared_s32(p.smem_base() + 4 * (last - i)))

    launch(kernel, [out], block=64, smem_bytes=256, seed=seed)
    assert out.tolist() == list(range(63, -1, -1))


def test_shared_memory_has_the_kinds_of_its_names():
    words, seen = (1, 2, 3, 0xFFFFFFFF), []

    def kernel():
        base = p.smem_base()
        p.st_shared_v4(base, words)
        p.st_shared_f32(base + 16, np.float32(1.5))
        p.st_shared_s32(base + 20, 6)
        p.st_shared_s32(base + 24, 7)
        p.st_shared_s64(base + 32, -(1 << 40))
        p.st_shared_v2(base + 40, (8, 0xFFFFFFFE))
        seen.extend([p.ld_shared_v4(base), p.ld_shared_f32(base + 16), p.ld_shared_s64(base + 32)])
        seen.extend([p.atom_exch_relaxed_cta_shared_s32(base + 20, -7), p.ld_relaxed_cta_shared_s32(base + 20)])
        seen.extend([p.atom_exch_release_cta_shared_s32(base + 24, 40), p.ld_acquire_cta_shared_s32(base + 24)])
        seen.extend([p.atom_add_relaxed_cta_shared_s32(base + 24, 2), p.ld_shared_s32(base + 24)])
        seen.extend([p.ld_shared_s32(base + 40), p.ld_shared_s32(base + 44)])

    launch(kernel, [], smem_bytes=48)
    assert seen == [words, np.float32(1.5), -(1 << 40), 6, -7, 7, 40, 40, 42, 8, -2]


@pytest.mark.parametrize("seed", range(3))
def test_named_barrier_waits_for_those_who_arrive(seed):
    out = np.zeros(32, np.int32)

    def kernel(out):
        if p.thread_idx() < 32:
            p.st_weak_s32(out + 4 * p.thread_idx(), 1)
            p.bar_arrive(1, 64)
        else:
            p.bar_sync(1, 64)
            address = out + 4 * (p.thread_idx() - 32)
            p.st_weak_s32(address, 10 + p.ld_weak_s32(address))

    launch(kernel, [out], block=64, seed=seed)
    assert out.tolist() == [11] * 32


@pytest.mark.parametrize("seed", range(3))
def test_a_barrier_tells_whether_all_agree(seed):
    out = np.full((2, 64), -1, np.int32)

    def kernel(out):
        thread = p.thread_idx()
        p.st_weak_s32(out + 4 * thread, p.bar_red_and(1, 64, thread < 64))
        p.st_weak_s32(out + 4 * (64 + thread), p.bar_red_and(1, 64, thread != 40))

    launch(kernel, [out], block=64, seed=seed)
    assert out.tolist() == [[1] * 64, [0] * 64]


def test_lanes_exchange_values():
    lanes = np.arange(32)
    rows = np.zeros((9, 32), np.int64)
    halves = np.zeros((2, 32), np.float32)

    def kernel(rows, halves):
        lane, mask = p.lane_id(), p.FULL_MASK
        value = lane * 10
        p.st_weak_s64(rows + 8 * lane, p.shfl_idx_s32(mask, value, 5))
        p.st_weak_s64(rows + 8 * (32 + lane), p.shfl_xor_s32(mask, value, 3))
        p.st_weak_s64(rows + 8 * (64 + lane), p.shfl_up_s32(mask, value, 1))
        p.st_weak_s64(rows + 8 * (96 + lane), p.shfl_down_s32(mask, value, 4))
        p.st_weak_s64(rows + 8 * (128 + lane), p.shfl_idx_s64(mask, value << 40, 31))
        p.st_weak_s64(rows + 8 * (160 + lane), p.match_any_s32(mask, lane % 3))
        p.st_weak_s64(rows + 8 * (192 + lane), p.vote_ballot(mask, lane % 2))
        p.st_weak_s64(rows + 8 * (224 + lane), p.vote_any(mask, lane == 31) + 2 * p.vote_all(mask, lane == 31))
        p.st_weak_s64(rows + 8 * (256 + lane), p.vote_any(mask, lane == 32) + 2 * p.vote_all(mask, lane < 32))
        half = np.float32(lane) / np.float32(2)
        p.st_weak_f32(halves + 4 * lane, p.shfl_xor_f32(mask, half, 16))
        p.st_weak_f32(halves + 4 * (32 + lane), p.shfl_idx_f32(mask, half, 3))

    launch(kernel, [rows, halves], block=32)
    threes = [sum(1 << i for i in range(32) if i % 3 == r) for r in range(3)]
    expected = [
        lanes * 0 + 50,
        (lanes ^ 3) * 10,
        np.maximum(lanes - 1, 0) * 10,
        np.where(lanes + 4 < 32, lanes + 4, lanes) * 10,
        lanes * 0 + (310 << 40),
        np.array(threes)[lanes % 3],
        lanes * 0 + 0xAAAAAAAA,
        lanes * 0 + 1,
        lanes * 0 + 2,
    ]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(halves, [(lanes ^ 16) / 2, lanes * 0 + 1.5])


def test_lanes_outside_the_mask_take_no_part():
    out = np.zeros(32, np.int64)

    def kernel(out):
        lane = p.lane_id()
        if lane % 2 == 0:
            p.syncwarp(0x55555555)
            p.st_weak_s64(out + 8 * lane, p.vote_ballot(0x55555555, lane < 8))

    launch(kernel, [out], block=32)
    assert out.tolist() == [0x55 if lane % 2 == 0 else 0 for lane in range(32)]


def test_special_registers_tell_threads_apart():
    out = np.zeros((6, 5), np.int32)

    def kernel(out):
        row = out + 20 * (p.block_idx() * p.block_dim() + p.thread_idx())
        p.st_weak_s32(row, p.block_idx())
        p.st_weak_s32(row + 4, p.thread_idx())
        p.st_weak_s32(row + 8, p.lane_id())
        p.st_weak_s32(row + 12, p.grid_dim())
        p.st_weak_s32(row + 16, p.block_dim())

    launch(kernel, [out], grid=2, block=3)
    assert out.tolist() == [[b, t, t, 2, 3] for b in range(2) for t in range(3)]


def test_clocks_advance():
    seen = []

    def kernel():
        seen.extend([p.globaltimer(), p.globaltimer(), p.clock64(), p.deadline_after(10**6)])

    launch(kernel, [])
    assert seen[0] < seen[1] < seen[2] < seen[3] - 10**6 + 1


@pytest.mark.parametrize("seed", range(4))
def test_wait_ends_when_the_cell_changes(seed):
    cells = np.zeros(2, np.int32)

    def kernel(cells):
        if p.block_idx() == 0:
            deadline = p.deadline_after(10**9)
            while p.ld_acquire_gpu_s32(cells) != 3:
                if p.wait_expired(deadline):
                    p.trap()
            p.st_weak_s32(cells + 4, 1)
        else:
            for value in range(1, 4):
                p.st_release_gpu_s32(cells, value)

    launch(kernel, [cells], grid=2, seed=seed)
    assert cells.tolist() == [3, 1]


def test_a_wait_times_out_where_nothing_else_can_go_on_unless_that_is_a_fault():
    """Time passes to the earliest deadline. A loop that only waits anew, or that waits for years, is a deadlock."""

    def bounded(cells):
        deadline = p.deadline_after(1000 * (1 + p.thread_idx()))
        while p.ld_volatile_s32(cells + 4 * p.thread_idx()) == 0:
            if p.wait_expired(deadline):
                p.st_relaxed_gpu_s32(cells + 4, 2 + p.thread_idx())  # the second thread waits for it
                return

    def reporting(cells):
        deadline = p.deadline_after(500)
        p.fault_due(deadline, 1)
        while p.ld_volatile_s32(cells + 8) == 0 and not p.wait_expired(deadline):
            pass

    def bounded_behind_a_fault(cells):
        return reporting(cells) if p.thread_idx() == 1 else bounded(cells)

    def anew(cells):
        while p.ld_volatile_s32(cells) == 0:
            p.wait_expired(p.deadline_after(1000))

    def without_end(cells):
        while p.ld_volatile_s32(cells) == 0:
            p.wait_expired(1 << 60)

    cells = np.zeros(4, np.int32)
    launch(bounded, [cells], block=2)
    assert cells.tolist() == [0, 2, 0, 0]
    for kernel in (reporting, bounded_behind_a_fault, anew, without_end):
        with pytest.raises(DeadlockError):
            launch(kernel, [np.zeros(4, np.int32)], block=2)
    launch(bounded_behind_a_fault, [np.zeros(4, np.int32)], block=2, on_deadlock="expire")


def test_trap_stops_the_run():
    with pytest.raises(Trap, match="kernel"):
        launch(lambda: p.trap(), [])


@pytest.mark.parametrize("seed", range(4))
def test_bulk_copies_go_through_shared_memory(seed):
    source, target = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)

    def kernel(source, target):
        barrier, stage = p.smem_base() + 1024, p.smem_base()
        if p.thread_idx() == 0:
            p.mbarrier_init(barrier, 1)
            p.fence_mbarrier_init()
            p.mbarrier_arrive_expect_tx(barrier, 1024)
            p.tma_load_1d(stage, source, 1024, barrier)
        p.syncthreads()
        deadline = p.deadline_after(10**9)
        while not p.mbarrier_try_wait_parity(barrier, 0):
            if p.wait_expired(deadline):
                p.trap()
        address = stage + 4 * p.thread_idx()
        for i in range(8):
            p.st_shared_s32(address + 128 * i, 2 * p.ld_shared_s32(address + 128 * i))
        p.fence_proxy_async_shared()
        p.syncthreads()
        if p.thread_idx() == 0:
            p.tma_store_1d(target, stage, 1024)
            p.tma_store_commit()
            p.tma_store_wait_read_all()
            p.tma_store_wait_all()
            p.mbarrier_inval(barrier)

    launch(kernel, [source, target], block=32, smem_bytes=1040, seed=seed)
    np.testing.assert_array_equal(target, 2 * source)


def test_mbarrier_counts_arrivals():
    seen = []

    def kernel():
        if p.thread_idx() == 0:
            p.mbarrier_init(p.smem_base(), 3)
            p.fence_mbarrier_init()
        p.syncthreads()
        if p.thread_idx() == 3:
            seen.append(p.mbarrier_try_wait_parity(p.smem_base(), 0))
        p.syncthreads()
        if p.thread_idx() < 3:
            p.mbarrier_arrive(p.smem_base())
        p.syncthreads()
        if p.thread_idx() == 3:
            seen.append(p.mbarrier_try_wait_parity(p.smem_base(), 0))

    launch(kernel, [], block=4, smem_bytes=16, on_deadlock="expire")
    assert seen == [False, True]


@pytest.mark.parametrize(("cc", "bulk"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_has_tma_follows_the_card_of_the_world(cc, bulk):
    seen = []
    launch(lambda: seen.append(p.has_tma()), [], compute_capability=cc)
    assert seen == [bulk]


@pytest.mark.parametrize("name", [name for name, spec in PRIMITIVES.items() if spec.below is not None])
def test_a_card_before_the_instruction_runs_the_stand_in(name):
    spec, called = PRIMITIVES[name], set()
    arguments = [np.float32(3) if kind == "f32" else 0x38404448 for kind in spec.args]

    def call():
        sys.setprofile(lambda frame, *_: called.add(frame.f_code))
        spec.function(*arguments)
        sys.setprofile(None)

    launch(call, [], compute_capability=spec.since)
    assert spec.below.__code__ not in called
    launch(call, [], compute_capability=(spec.since[0], spec.since[1] - 1))
    assert spec.below.__code__ in called
