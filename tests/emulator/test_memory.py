"""Memory takes pages where it is used. Kernels find bytes that were never written; to the host these look wrong."""

import re
import sys

import numpy as np
import pytest
from processes import run_python

from nbep.emulator import Uninitialized, World, current_thread

# A shadow of a few bytes and one of whole pages are of different types.
SIZES = pytest.mark.parametrize("nbytes", [1 << 12, (1 << 21) + 64])
MEMORY_MODELS = pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
VALUES = {"u8": 1, "s32": 1, "s64": 1, "f32": np.float32(1), "v2": (1, 2), "v4": (1, 2, 3, 4)}
SIZE_OF = {"u8": 1, "s32": 4, "s64": 8, "f32": 4, "v2": 8, "v4": 16}


def run(world, kernel, *args):
    stream = world.ranks[0].create_stream("main")
    stream.launch(kernel, args, 1, 1)
    stream.synchronize()


@SIZES
@MEMORY_MODELS
@pytest.mark.parametrize("kind", VALUES)
def test_what_is_written_can_be_read_and_what_follows_cannot(kind, memory_model, nbytes):
    world = World(1, memory_model=memory_model)
    memory = world.ranks[0].space.allocate(nbytes, "memory")
    at = nbytes - 64
    loaded = []

    def kernel(address):
        thread = current_thread()
        thread.store(address, kind, VALUES[kind], "weak", "gpu")
        loaded.append(thread.load(address, kind, "weak", "gpu"))
        thread.load(address + SIZE_OF[kind], kind, "weak", "gpu")

    with pytest.raises(Uninitialized, match=f"never written.*\n.*byte {at + SIZE_OF[kind]}"):
        run(world, kernel, memory.address + at)
    assert loaded == [VALUES[kind]]


@SIZES
def test_the_host_sees_what_kernels_have_written_and_nothing_like_zeros_elsewhere(nbytes):
    world = World(1)
    memory = world.ranks[0].space.allocate(nbytes, "memory")
    run(world, lambda address: current_thread().store(address, "s32", 0, "weak", "gpu"), memory.address + nbytes - 8)
    for writable in (False, True):
        seen = memory.array(np.uint8, writable=writable)
        assert (seen == 0).nonzero()[0].tolist() == list(range(nbytes - 8, nbytes - 4))
        assert set(seen[: nbytes - 8]) == {0xCB}


@SIZES
def test_a_look_at_a_part_leaves_the_rest_unwritten(nbytes):
    world = World(1)
    memory = world.ranks[0].space.allocate(nbytes, "memory")
    memory.array(np.int32, 16, 2)[:] = 5
    with pytest.raises(Uninitialized, match=re.escape("(byte 24)")):
        run(world, lambda address: current_thread().load(address, "v4", "weak", "gpu"), memory.address + 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_buffer_of_deepeps_size_takes_no_memory_before_it_is_used():
    """Of VmHWM the program begins with its own; ru_maxrss also counts the process that has started it."""
    program = """
import re, numpy as np, nbep
def main(comm):
    buffer = nbep.Buffer(comm, int(2e9))
    part = buffer.get_local_buffer_tensor(np.int32, (4,), offset=400_000_000)
    assert (part == np.int32(0xCBCBCBCB - (1 << 32))).all()
    buffer.destroy()
nbep.spawn(main, 2, "emulator")
print(*re.findall(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()))
"""
    assert int(run_python("-c", program)) < 500_000
