"""Rank 0 raises a flag of rank 1 twice, and waits until rank 1 does it once more. Rank 1 stops in a debugger first.

python docs/examples/two_flags.py             the debugger reads what you type
python docs/examples/two_flags.py history     the same, and all stores are remembered
"""

import sys

import nbep
from nbep.lang import Bounds, Peers, buffer_of, kernel, st_release_sys_s32, syncthreads, thread_idx, wait_at_least


@kernel(max_threads=64)
def flags(peers: Peers, bounds: Bounds):
    flag = buffer_of(peers, 1)
    if thread_idx() == 0 and peers.rank == 0:
        st_release_sys_s32(flag, 1)
        st_release_sys_s32(flag, 2)
        wait_at_least(flag, 3, bounds)
    elif thread_idx() == 0:
        wait_at_least(flag, 2, bounds)
        breakpoint()
        st_release_sys_s32(flag, 3)
    syncthreads()


def main(comm):
    memory = nbep.SharedMemory.create(comm, 128, cells={"flag": 0})
    memory.runtime.launch(memory.comm_stream, flags, 1, 64, 0, memory.peers, memory.bounds)
    memory.wait()


nbep.spawn(main, 2, "emulator", tracer=nbep.debug.History() if len(sys.argv) > 1 else None)
print("all done")
