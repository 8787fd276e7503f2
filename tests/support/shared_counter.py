"""What one of two processes runs in the test of atomics between processes. A new process must be able to import it."""

import gc
from multiprocessing.shared_memory import SharedMemory

from nbep.emulator import current_thread
from nbep.emulator.process import ProcessWorld
from nbep.emulator.process_lock import ProcessLock


def add_many(name, rank, count):
    """One process: a kernel that adds to a shared counter."""
    memory = SharedMemory(name=name)
    world = ProcessWorld(2, rank, local_rank=rank)
    counter = world.ranks[rank].space.adopt(memory.buf[:64], "counter")
    counter.lock = ProcessLock(memory.buf[64:256], rank, 60 * 10**9, lambda holder: RuntimeError(f"held by {holder}"))
    stream = world.ranks[rank].create_stream("main")

    def kernel(counter):
        for _ in range(count):
            current_thread().atomic("add", counter, "s64", 1, "relaxed", "sys")

    stream.launch(kernel, (counter.address,), 1, 4)
    stream.synchronize()
    world.close()
    world.ranks[rank].space.free(counter)
    counter.lock = None
    del counter
    gc.collect()
    memory.close()
