"""Plain kernels: accesses, barriers, shared memory, several ranks."""

import numpy as np
import pytest

from nbep.emulator import World, current_thread


def test_kernel_reads_and_writes_mapped_arrays():
    world = World(1)
    space, stream = world.ranks[0].space, world.ranks[0].create_stream("main")
    x, y = np.arange(200, dtype=np.int32), np.zeros(200, np.int32)

    def double(x, y, n):
        t = current_thread()
        i = t.block_idx * t.block_dim + t.thread_idx
        if i < n:
            t.store(y + 4 * i, "s32", 2 * t.load(x + 4 * i, "s32", "weak", "gpu"), "weak", "gpu")

    stream.launch(double, (space.map_array(x, "x", False).address, space.map_array(y, "y", True).address, 200), 2, 128)
    stream.synchronize()
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("seed", range(5))
def test_barrier_orders_shared_memory_within_a_block(seed):
    world = World(1, seed)
    space, stream = world.ranks[0].space, world.ranks[0].create_stream("main")
    y = np.zeros(3 * 96, np.int32)

    def reverse(y):
        t = current_thread()
        t.store_shared(4 * t.thread_idx, "s32", t.thread_idx + 1, "weak")
        t.barrier(0, t.block_dim)
        other = t.load_shared(4 * (t.block_dim - 1 - t.thread_idx), "s32", "weak")
        t.store(y + 4 * (t.block_idx * t.block_dim + t.thread_idx), "s32", other, "weak", "gpu")

    stream.launch(reverse, (space.map_array(y, "y", True).address,), 3, 96, smem_bytes=4 * 96)
    stream.synchronize()
    np.testing.assert_array_equal(y.reshape(3, 96), np.arange(96, 0, -1)[None].repeat(3, 0))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_shake_hands_through_each_others_memory(seed):
    world = World(2, seed)
    buffers = {}

    def handshake(rank, mine, theirs):
        t = current_thread()
        for i in range(1, 20):
            if rank == 0:
                t.store(theirs, "s32", i, "release", "sys")
            while t.load(mine, "s32", "acquire", "sys") < i:
                t.spin(10**9)
            if rank == 1:
                t.store(theirs, "s32", i, "release", "sys")

    def host(rank):
        context = world.ranks[rank]
        buffers[rank] = context.space.allocate(8, "signal", zero=True)
        world.host_wait(lambda: len(buffers) == 2, "the other rank's buffer")
        theirs = context.space.open(buffers[1 - rank].handle)
        assert theirs.address != buffers[1 - rank].address
        stream = context.create_stream("main")
        stream.launch(handshake, (rank, buffers[rank].address, theirs.address), 1, 1)
        stream.synchronize()
        return buffers[rank].array(np.int32)[0]

    assert world.run([lambda: host(0), lambda: host(1)]) == [19, 19]
