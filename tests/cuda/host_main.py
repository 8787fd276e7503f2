"""Everything over memory of the host, as if no GPU reached another: memory, round trips, low-latency rounds.

    mpirun -n 2 python tests/cuda/host_main.py [--rounds 100]

Before that it says what the GPUs promise, and how many adds arrive that all ranks make to one cell there at once: fewer
than were made where atomics are not what they are in a GPU's memory. nbep's kernels make none.
The exit code is 0 if every rank got everything right.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import handles_main
import low_latency_main
import mpi_main  # sets the environment, so it comes first
import numpy as np
from cuda.bindings import driver as cu
from mpi4py import MPI
from rounds import rounds, wrong_rounds

import nbep
from nbep.device.jit import kernel, over
from nbep.device.primitives import atom_add_relaxed_sys_s32
from nbep.device.protocols.peers import HostPeers, Peers, buffer_of
from nbep.device.types import I32
from nbep.host.target.cuda.driver import Device
from nbep.host.target.process import process_runtime

NUM_ADDS = 20_000  # of a rank
ATTRIBUTES = ("HOST_REGISTER_SUPPORTED", "HOST_NATIVE_ATOMIC_SUPPORTED", "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM")


@kernel(max_threads=32)
def add_often(peers: Peers, num_adds: I32):
    """Each rank's only thread adds to the first word of rank 0."""
    for _ in range(num_adds):
        atom_add_relaxed_sys_s32(buffer_of(peers, 0), 1)


def num_kept(comm: MPI.Intracomm) -> int:
    """How many of the adds of all ranks are in the cell."""
    memory = nbep.SharedMemory.create(comm, 128, handle_type="host")
    kernel_there = over(add_often, HostPeers, "peers")
    memory.runtime.load(kernel_there)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, kernel_there, 1, 1, 0, memory.peers, NUM_ADDS)
    memory.wait()
    comm.barrier()
    kept = int(memory.symmetric.read(0, 1, np.int32)[0])
    memory.close()
    return comm.bcast(kept)


def run(comm: MPI.Intracomm, num_rounds: int) -> int:
    """How many rounds of how many ranks were wrong."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    device = process_runtime(comm).device
    for name in ATTRIBUTES:
        say(f"{name}: {device.attribute(getattr(cu.CUdevice_attribute, f'CU_DEVICE_ATTRIBUTE_{name}'))}", flush=True)
    say(f"adds to one cell: {num_kept(comm)} of {comm.size * NUM_ADDS} are there", flush=True)
    Device.can_reach = lambda self, bus_id: bus_id == self.bus_id
    say(f"memory: {handles_main.run(comm, 'host')}", flush=True)
    wrong = comm.allreduce(wrong_rounds(comm, comm.rank, comm.size, "host"))
    say(f"{len(rounds(comm.size, 'host'))} round trips: {wrong} wrong", flush=True)
    sys.argv[1:] = ["--rounds", str(num_rounds), "--handle-type", "host"]
    return wrong + low_latency_main.run(comm, low_latency_main.parse())


def main() -> int:
    comm = MPI.COMM_WORLD
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="of low-latency calls")
    num_rounds = parser.parse_args().rounds
    wrong = mpi_main.on_own_gpu(comm, lambda: run(comm, num_rounds))
    if comm.rank == 0:
        print(f"memory of the host on {comm.size} GPUs: {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
