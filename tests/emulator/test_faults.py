"""Every fault stops the run and says what, who and where."""

import inspect
import re

import numpy as np
import pytest

from nbep.device.network.ibgda.completion import syndrome_at
from nbep.emulator import (
    EmulatorError,
    NonCoherent,
    OutOfBounds,
    ReadOnly,
    Trap,
    Uninitialized,
    Unmapped,
    UseAfterFree,
    World,
    current_thread,
)


def line_of(function, text):
    """`file:line` of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"test_faults.py:{first + offset}"


def run(world, kernel, *args, rank=0, **shape):
    shape = {"grid": 1, "block": 1, **shape}
    stream = world.ranks[rank].create_stream("main")
    stream.launch(kernel, args, **shape)
    stream.synchronize()


def load(address, kind="s32", order="weak"):
    return current_thread().load(address, kind, order, "gpu")


def store(address, value=1, kind="s32"):
    current_thread().store(address, kind, value, "weak", "gpu")


@pytest.mark.parametrize("access", [load, store])
def test_out_of_bounds_names_thread_line_allocation_and_cell(access):
    world = World(2)
    table = world.ranks[1].space.allocate(64, "table", zero=True, describe=lambda offset: f"entry[{offset // 4}]")

    def kernel(table):
        t = current_thread()
        if t.block_idx == 1 and t.thread_idx == 37:
            access(table + 64)  # past the end

    with pytest.raises(OutOfBounds) as caught:
        run(world, kernel, table.address, rank=1, grid=2, block=64)
    text = str(caught.value)
    assert "4 bytes (s32)" in text
    assert "the allocation has 64 bytes" in text
    assert "`table` of rank 1: byte 64" in text
    assert "rank 1, kernel `kernel`, block 1, warp 1, lane 5 (thread 37)" in text
    assert "test_faults.py:" in text
    assert caught.value.thread.startswith("rank 1")


def test_source_line_is_the_kernels_not_the_primitives():
    world = World(1)
    table = world.ranks[0].space.allocate(64, "table", zero=True)

    def device_function(address):
        t = current_thread()
        return t.load(address, "s32", "weak", "gpu")  # the fault

    with pytest.raises(OutOfBounds) as caught:
        run(world, lambda table: device_function(table + 128), table.address)
    assert line_of(test_source_line_is_the_kernels_not_the_primitives, "# the fault") in caught.value.source
    assert "device_function" in caught.value.source


@pytest.mark.parametrize(
    ("kernel", "named"), [(syndrome_at, "nbep/device/network/ibgda/completion.py"), (load, __file__)]
)
def test_files_of_nbep_are_named_alike_wherever_it_is_installed(kernel, named, monkeypatch, tmp_path):
    world = World(1)
    table = world.ranks[0].space.allocate(64, "table", zero=True)
    monkeypatch.chdir(tmp_path)  # a user's own file is not below it, so it is named in full
    with pytest.raises(OutOfBounds) as caught:
        run(world, kernel, table.address + 64)
    assert f"  at {named}:" in str(caught.value)


def test_fault_in_a_cell_that_the_owner_can_name():
    world = World(1)
    tails = world.ranks[0].space.allocate(64, "tail", describe=lambda offset: f"tail[channel {offset // 4}]")
    with pytest.raises(Uninitialized, match=re.escape("`tail` of rank 0: tail[channel 3] (byte 12)")):
        run(world, lambda tail: load(tail + 12), tails.address)


def world_with(allocation):
    """A new world (a failed one is spent) whose rank 0 has the allocation at the same address."""
    world = World(1)
    world.ranks[0].space.segments[allocation.number] = allocation
    return world


@pytest.mark.parametrize("access", [load, store])
def test_use_after_free(access):
    world = World(2)
    space = world.ranks[0].space
    buffer = space.allocate(64, "buffer", zero=True)
    peer = world.ranks[1].space.open(buffer.handle)
    space.free(buffer)
    with pytest.raises(UseAfterFree, match="`buffer` of rank 0, 64 bytes, is freed"):
        run(world, access, buffer.address)
    other = World(2)
    other.ranks[1].space.segments[peer.number] = peer.allocation
    with pytest.raises(UseAfterFree, match="`buffer` of rank 0 is freed"):
        run(other, access, peer.address, rank=1)


def test_use_after_unmap_and_after_close():
    world = World(2)
    mapping = world.ranks[0].space.map_array(np.zeros(4, np.int32), "x", True)
    world.ranks[0].space.unmap(mapping)
    with pytest.raises(UseAfterFree, match="the mapping of the array `x`"):
        run(world, load, mapping.address)
    world = World(2)
    buffer = world.ranks[0].space.allocate(64, "buffer", zero=True)
    peer = world.ranks[1].space.open(buffer.handle)
    world.ranks[1].space.close(peer)
    with pytest.raises(UseAfterFree, match="the mapping of `buffer` of rank 0"):
        run(world, load, peer.address, rank=1)


@pytest.mark.parametrize("access", [load, store])
def test_another_ranks_address_is_unmapped(access):
    world = World(2)
    buffer = world.ranks[1].space.allocate(64, "buffer", zero=True, describe=lambda offset: f"word {offset // 4}")
    with pytest.raises(Unmapped) as caught:
        run(world, access, buffer.address + 8, rank=0)
    assert "an address of rank 1 used by rank 0" in str(caught.value)
    assert "`buffer` of rank 1: word 2 (byte 8)" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "what"), [(0, "the null address"), (64, "shared-memory"), (1 << 60, "no rank has such an address")]
)
def test_null_shared_and_invented_addresses_are_unmapped(address, what):
    with pytest.raises(Unmapped, match=what):
        run(World(1), load, address)


def test_address_that_is_no_integer():
    with pytest.raises(EmulatorError, match="None, which is not an integer address"):
        run(World(1), load, None)


def test_read_of_a_byte_without_a_store():
    world = World(1)
    x = world.ranks[0].space.allocate(64, "x")

    def kernel(x):
        store(x, 7)
        store(x + 4, 7, "u8")
        assert load(x) == 7
        load(x + 4)

    with pytest.raises(Uninitialized, match=r"never written \(byte 5\)"):
        run(world, kernel, x.address)


@pytest.mark.parametrize("kind", ["u8", "s32", "s64", "f32", "v2", "v4"])
def test_read_of_fresh_memory_by_any_kind_and_by_atomics(kind):
    x = World(1).ranks[0].space.allocate(64, "x")
    with pytest.raises(Uninitialized):
        run(world_with(x), load, x.address, kind)
    with pytest.raises(Uninitialized):
        run(world_with(x), lambda x: current_thread().atomic("add", x, "s32", 1, "relaxed", "sys"), x.address)


def test_read_of_fresh_shared_memory():
    with pytest.raises(Uninitialized, match="`shared memory`: byte 8"):
        run(World(1), lambda: current_thread().load_shared(8, "s32", "weak"), smem_bytes=64)


def test_bytes_the_host_may_write_count_as_written():
    world = World(1)
    x = world.ranks[0].space.allocate(64, "x")
    x.array(np.int32, 16, 2)[:] = (5, 6)
    x.array(np.int32, writable=False)  # only looks
    seen = []
    run(world, lambda x: seen.append((load(x + 16), load(x + 20))), x.address)
    assert seen == [(5, 6)]
    with pytest.raises(Uninitialized):
        run(world, lambda x: load(x + 24), x.address)


def test_store_to_an_input_array():
    world = World(1)
    x = np.zeros(4, np.int32)
    mapping = world.ranks[0].space.map_array(x, "x", False)
    with pytest.raises(ReadOnly, match="the host passed this array as input only"):
        run(world, store, mapping.address + 4)
    assert not x.any()


@pytest.mark.parametrize("memory_model", ["sc", "delayed"])
def test_store_to_what_a_running_kernel_reads_as_constant(memory_model):
    world = World(1, memory_model=memory_model)
    x = world.ranks[0].space.allocate(64, "x", zero=True)
    done = []

    def neighbours(x):
        load(x + 4, "u8", "nc")
        store(x + 5, 1, "u8")
        store(x + 0)
        store(x + 8)
        load(x + 16, "v4", "nc")
        done.append(1)

    run(world, neighbours, x.address)
    run(world, lambda x: store(x + 16), x.address)  # the reader has ended
    assert done

    def changes(x):
        load(x + 16, "v4", "nc")
        store(x + 24, 1, "s64")

    with pytest.raises(
        NonCoherent, match=r"`x` of rank 0: byte 24, which kernel `changes` of rank 0, which still runs"
    ):
        run(world, changes, x.address)


def test_value_of_the_wrong_type():
    world = World(1)
    x = world.ranks[0].space.allocate(64, "x", zero=True)
    with pytest.raises(EmulatorError, match="store of 4 bytes"):
        run(world, lambda x: store(x, 1.5), x.address)


def test_trap_carries_its_message():
    with pytest.raises(Trap, match=r"trap: tail of rank 3 is late(.|\n)*by rank 0, kernel `<lambda>`"):
        run(World(1), lambda: current_thread().trap("tail of rank 3 is late"))


def test_a_kernels_own_exception_keeps_its_type_and_traceback():
    def kernel():
        return {}["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        run(World(1, seed=4), kernel, block=40)
    assert caught.traceback[-1].name == "kernel"
    assert re.search(r"rank 0, kernel `kernel`, block 0, .*seed 4", caught.value.__notes__[0])
