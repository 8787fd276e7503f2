"""What test_kills.py runs on three ranks: rank 1 gets a signal inside an atomic, where it holds the lock of the memory.

python holder_main.py SIGNAL

The others make an atomic there when it is stopped, or has ended.
"""

import os
import signal
import sys
import threading
from contextlib import suppress

from mpi4py import MPI

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import atom_add_relaxed_sys_s32, thread_idx
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.emulator.process_lock import ProcessLock
from nbep.host.ranks.timeouts import ENDED, STOPPED, PeerTimeout, Process

VICTIM = 1


@kernel(max_threads=32)
def add_to_rank_0(peers: Peers):
    if thread_idx() == 0:
        atom_add_relaxed_sys_s32(buffer_of(peers, 0), 1)


def main(name: str) -> None:
    comm = MPI.COMM_WORLD
    survivors = comm.Split(comm.rank == VICTIM)
    memory = nbep.SharedMemory.create(comm, 128)
    victim = comm.bcast(Process.own(), VICTIM)
    if comm.rank == VICTIM:
        acquire = ProcessLock.acquire

        def acquire_and_end(lock: ProcessLock) -> None:
            acquire(lock)
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
            threading.Event().wait()  # another thread may take the signal, a little later

        ProcessLock.acquire = acquire_and_end
    else:
        while victim.state not in ENDED + STOPPED:
            pass
    memory.runtime.launch(memory.comm_stream, add_to_rank_0, 1, 32, 0, memory.peers)
    try:
        memory.wait()
        said = "has added"
    except PeerTimeout as error:
        said = f"{error.role}, peer {error.peer}: {error}"
    os.write(2, f"ends: rank {comm.rank}: {said}\n".encode())
    survivors.barrier()
    with suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
