"""Views of one array are one memory, wherever they begin, and each of them has bounds of its own."""

import ctypes
import gc

import numpy as np
import pytest
from every_schedule import all_of, run_all

from nbep.emulator import DataRace, Misaligned, NonCoherent, OutOfBounds, Uninitialized, World, current_thread
from nbep.emulator.machine.arrays import OFFSET_MASK, span_of
from nbep.emulator.machine.memory import AddressSpace
from nbep.host.target.checked_arrays import UNWRITTEN, Outputs
from nbep.lang import Out, kernel, ld_acquire_gpu_s32, st_release_gpu_s32, st_weak_s32

SEEDS = range(12)
NEVER_NS = 1 << 62
MODELS = ["sc", "delayed", "checked"]


def run(views, function, grid=1, strategy="uniform", seed=0, memory_model="checked", writable=None, smem_bytes=0):
    """function(thread, *addresses) in blocks of one thread. Each view is mapped under a name of its own."""
    world = World(1, seed, memory_model=memory_model, strategy=strategy)
    context = world.ranks[0]

    def host():
        mappings = [
            context.space.map_array(view, f"view{i}", writable is None or writable[i]) for i, view in enumerate(views)
        ]
        stream = context.create_stream("main")
        addresses = tuple(mapping.address for mapping in mappings)
        stream.launch(lambda *values: function(current_thread(), *values), addresses, grid, 1, smem_bytes)
        stream.synchronize()
        for mapping in mappings:
            context.space.unmap(mapping)

    world.run([host])


# --- races and outcomes -----------------------------------------------------------------------------------------------


def first_and_64th(a):
    return a, a[64:]


def backwards(a):
    return a, a[64::-1]


def strided(a):
    return a, np.lib.stride_tricks.as_strided(a[64:], (4,), (4,))


def of_a_buffer(a):
    return a, np.asarray(memoryview(a)[64:])


def matrix(a):
    return a, a.reshape(16, 16)[4:, :8]


@pytest.mark.parametrize("second_first", [False, True])
@pytest.mark.parametrize("views_of", [first_and_64th, backwards, strided, of_a_buffer, matrix])
def test_two_weak_stores_by_two_views_race(views_of, second_first):
    def store(t, first, second):
        a, b = (second, first) if second_first else (first, second)
        t.store(a + 4 * 64 if t.block_idx == 0 else b, "s32", 1, "weak", "gpu")

    def program(strategy, seed=0):
        views = views_of(np.zeros(256, np.int32))
        run(views[::-1] if second_first else views, store, 2, strategy, seed)

    with pytest.raises(DataRace):
        run_all(program)
    for seed in SEEDS:
        with pytest.raises(DataRace):
            program("uniform", seed)


@pytest.mark.parametrize("seconds", [slice(64, None), slice(64, 65), slice(10, None)])
@pytest.mark.parametrize("memory_model", ["delayed", "checked"])
def test_what_is_released_by_one_view_is_acquired_by_another(seconds, memory_model):
    def program(strategy, seed=0):
        a, seen = np.zeros(128, np.int32), []

        def hand_over(t, first, second):
            if t.block_idx == 0:
                t.store(first, "s32", 5, "weak", "gpu")
                t.store(first + 4 * 64, "s32", 1, "release", "gpu")
            else:
                while t.load(second + 4 * (64 - seconds.start), "s32", "acquire", "gpu") == 0:
                    t.spin(NEVER_NS)
                seen.append(int(t.load(first, "s32", "weak", "gpu")))

        run((a, a[seconds]), hand_over, 2, strategy, seed, memory_model)
        return seen[0]

    assert run_all(program, is_weak=memory_model == "delayed")[1] == {5}
    assert {program("uniform", seed) for seed in SEEDS} == {5}


@pytest.mark.parametrize(("is_weak", "memory_model"), [(False, "checked"), (True, "delayed")])
def test_an_input_may_change_by_another_view(is_weak, memory_model):
    def program(strategy, seed=0):
        seen, a = [], np.zeros(64, np.int32)

        def load_and_store(t, source, target):
            if t.block_idx == 0:
                seen.append(int(t.load(source + 16, "s32", "relaxed", "gpu")))
            else:
                t.store(target, "s32", 1, "relaxed", "gpu")

        run((a, a[4:]), load_and_store, 2, strategy, seed, memory_model, (False, True))
        return seen[0]

    assert run_all(program, is_weak=is_weak)[1] == {0, 1}


@pytest.mark.parametrize("memory_model", MODELS)
def test_what_is_taken_for_constant_must_not_change_by_another_view(memory_model):
    def program(seed):
        def load_and_store(t, source, target):
            t.load(source + 16, "s32", "nc", "gpu")
            t.store(target + 4, "s32", 1, "weak", "gpu")  # beside it
            t.store(target, "s32", 1, "weak", "gpu")

        a = np.zeros(64, np.int32)
        run((a, a[4:]), load_and_store, 1, "uniform", seed, memory_model, (False, True))

    for seed in SEEDS:
        with pytest.raises(NonCoherent):
            program(seed)


@kernel(max_threads=1)
def load_cell(out: Out, src: Out):
    st_weak_s32(out, ld_acquire_gpu_s32(src))


@kernel(max_threads=1)
def store_cell(dst: Out):
    st_release_gpu_s32(dst, 1)


@pytest.mark.parametrize(("src", "dst"), [(slice(4, None), slice(4, 8)), (slice(4, 5), slice(4, 5))])
def test_two_kernels_meet_by_parameters_of_other_names(src, dst):
    def main(comm):
        a, out = np.zeros(64, np.int32), np.zeros(1, np.int32)
        streams = [comm.runtime.create_stream(name) for name in ("one", "other")]
        comm.runtime.launch(streams[0], load_cell, 1, 1, 0, out, a[src])
        comm.runtime.launch(streams[1], store_cell, 1, 1, 0, a[dst])
        for stream in streams:
            stream.synchronize()
        return int(out[0])

    assert {results[0] for _, results in all_of(main, 1)} == {0, 1}


@pytest.mark.parametrize("memory_model", MODELS)
def test_a_thread_sees_by_one_view_what_it_has_stored_by_another(memory_model):
    for seed in SEEDS:
        a, seen = np.zeros(64, np.int32), []

        def store_and_load(t, first, second, seen=seen):
            t.store(second, "s32", 7, "weak", "gpu")
            t.atomic("add", second + 4, "s32", 1, "relaxed", "gpu")
            t.atomic("add", first + 4 * 34, "s32", 1, "relaxed", "gpu")
            seen += [t.load(address, "s32", "weak", "gpu") for address in (first + 4 * 33, second, second + 4)]

        run((a, a[33:35]), store_and_load, seed=seed, memory_model=memory_model)
        assert seen == [7, 7, 2]
        assert a[33:35].tolist() == [7, 2]


# --- bounds and words -------------------------------------------------------------------------------------------------


def load(order):
    return lambda t, address: t.load(address, "s32", order, "gpu")


def store(order):
    return lambda t, address: t.store(address, "s32", 1, order, "gpu")


def load_in_bulk(t, address):
    t.mbarrier_init(64, 1)
    t.bulk_load(0, address, 16, 64)
    t.mbarrier_arrive_expect_tx(64, 16)
    while not t.mbarrier_try_wait(64, 0):
        pass


def store_in_bulk(t, address):
    t.store_shared(0, "v4", (1, 2, 3, 4), "weak")
    t.fence_proxy_async()
    t.bulk_store(address, 0, 16)
    t.bulk_commit_group()
    t.bulk_wait_group(0)


ACCESSES = {
    **{f"load, {order}": load(order) for order in ("weak", "nc", "relaxed", "acquire", "volatile")},
    **{f"store, {order}": store(order) for order in ("weak", "relaxed", "release")},
    "atomic": lambda t, address: t.atomic("add", address, "s32", 1, "acq_rel", "gpu"),
    "late atomic": lambda t, address: (t.atomic("add", address, "s32", 1, "relaxed", "gpu"), None)[1],
    "bulk load": load_in_bulk,
    "bulk store": store_in_bulk,
}


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("name", ACCESSES)
def test_what_lies_beside_a_view_is_out_of_bounds(name, step, memory_model):
    """Elements 68 to 131 of 256. Stores to all of the array are on their way under `delayed`."""
    size = 16 if name.startswith("bulk") else 4
    place = 0 if step > 0 else -4 * 63  # of the lowest element

    def attempt(offset, is_first=False):
        a = np.zeros(256, np.int32)

        def attempted(t, first, second):
            if is_first:
                for at in range(60, 140):
                    t.store(first + 4 * at, "s32", 1, "relaxed", "gpu")
            ACCESSES[name](t, second + place + offset)

        run((a, a[68:132] if step > 0 else a[131:67:-1]), attempted, memory_model=memory_model, smem_bytes=72)

    for offset in (0, 256 - size):
        attempt(offset)
    for offset in (-size, 256, -16 * size):
        for is_first in (False, True) if name != "load, nc" else (False,):
            with pytest.raises(OutOfBounds, match="the allocation has 256 bytes"):
                attempt(offset, is_first)


def test_a_tree_stops_at_what_lies_below_a_view():
    for access in (load("acquire"), store("release"), load("weak")):
        for memory_model, kind in (("checked", {}), ("delayed", {"is_weak": True})):

            def program(strategy, access=access, memory_model=memory_model):
                run([np.zeros(64, np.int32)[4:]], lambda t, at: access(t, at - 4), 1, strategy, 0, memory_model)

            with pytest.raises(OutOfBounds):
                run_all(program, **kind)


def test_reports_say_where_element_0_is():
    def out_of(views, at):
        with pytest.raises(OutOfBounds) as caught:
            run(views, lambda t, *addresses: t.load(addresses[-1] + at, "s32", "weak", "gpu"))
        return str(caught.value)

    a = np.zeros((16, 16), np.int32)
    assert "`view0` of rank 0: byte 316 (element 0 is byte 320)" in out_of([a[5:7]], -4)
    assert "`view1` of rank 0: byte 448 (element 0 is byte 320)" in out_of([a, a[5:7]], 128)
    assert "`view0` of rank 0: byte 380 (element 0 is byte 384)" in out_of([a[6:5:-1]], -4)
    assert "`view0` of rank 0: byte 1024\n" in out_of([a], 1024)


def test_a_view_that_is_misaligned_in_its_array_is_found_out():
    a = np.zeros(256, np.uint8)
    with pytest.raises(Misaligned):
        run([a[70:]], lambda t, at: t.load(at, "s32", "weak", "gpu"))
    run([a[72:]], lambda t, at: t.load(at, "s32", "weak", "gpu"))


def test_rows_that_no_call_has_written_are_found_by_a_view_of_them():
    outputs, array = Outputs(), np.empty((8, 16), np.int32)
    outputs.add(array)
    array[:5] = 3
    assert (array[5:].view(np.uint8) == UNWRITTEN).all()
    world = World(1, memory_model="checked")
    mapping = world.ranks[0].space.map_array(array[2:7], "x", False)
    outputs.hide_unwritten(array[2:7], mapping.allocation)
    stream = world.ranks[0].create_stream("main")

    def read(address):
        t = current_thread()
        assert t.load(address + 4 * 16 * 2, "s32", "weak", "gpu") == 3
        t.load(address + 4 * 16 * 3, "s32", "weak", "gpu")

    stream.launch(read, (mapping.address,), 1, 1)
    with pytest.raises(Uninitialized, match=r"row 3, which no call has written"):
        stream.synchronize()


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_known_of_an_array_ends_with_it():
    space = AddressSpace(0)
    for _ in range(3):
        a = np.zeros(64, np.int32)
        mappings = [space.map_array(a[at:], "x", True) for at in (0, 4, 8)]
        assert len({id(mapping.allocation.last_stores) for mapping in mappings}) == 1
        assert len({mapping.number for mapping in mappings}) == 3
        for mapping in mappings:
            space.unmap(mapping)
        kept = space.map_array(a[16:], "y", True)
        assert kept.allocation.first_name == "x"
        space.unmap(kept)
        del a, mappings, mapping, kept
        gc.collect()
        assert not space._histories


def test_an_array_of_more_bytes_than_an_offset_can_tell():
    """Nothing touches the memory, which is not there."""
    there = np.zeros(1, np.uint8).ctypes.data & -256
    huge = np.frombuffer((ctypes.c_uint8 * (OFFSET_MASK + 4097)).from_address(there), np.uint8)
    far = span_of(huge[OFFSET_MASK + 1 + 64 :], huge)
    assert (far.base, far.lowest, far.end) == (64, 64, 4096)
    near = span_of(huge[OFFSET_MASK - 100 : OFFSET_MASK], huge)
    assert (near.base, near.lowest, near.end) == (OFFSET_MASK - 100, OFFSET_MASK - 100, OFFSET_MASK)
