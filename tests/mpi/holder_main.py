"""What test_kills.py runs on three ranks: rank 1 gets a signal inside an atomic, where it holds the lock of the memory.

python holder_main.py SIGNAL

The others make an atomic there when it is stopped, or has ended.
"""

import os
import signal
import sys

from mpi4py import MPI

import nbep
from nbep.emulator.process_lock import ProcessLock
from nbep.host.faults import PeerTimeout
from nbep.host.processes import ENDED, STOPPED, Process
from nbep.host.runtime.base import Describe  # noqa: F401 - the runtime is imported before the lock is patched

VICTIM = 1


def main(name: str) -> None:
    comm = MPI.COMM_WORLD
    survivors = comm.Split(comm.rank == VICTIM)
    memory = nbep.NodeMemory.create(comm, 128)
    victim = comm.bcast(Process.own(), VICTIM)
    if comm.rank == VICTIM:
        acquire = ProcessLock.acquire

        def acquire_and_end(lock: ProcessLock) -> None:
            acquire(lock)
            os.kill(os.getpid(), getattr(signal, name))

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
    os.kill(victim.pid, signal.SIGKILL)
    os._exit(1)
