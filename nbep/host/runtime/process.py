"""The runtime of a process that is one rank under mpiexec or torchrun."""

from __future__ import annotations

import os
from typing import Any

from nbep.host.comm import TorchComm, gather_results
from nbep.host.runtime.base import Runtime, set_process_runtime
from nbep.host.targets import resolve_target

_runtime: Runtime | None = None


def process_runtime(comm: Any) -> Runtime:
    """The runtime of this process, made on the first call, which all ranks of comm make together.

    Environment variable NBEP_TARGET chooses between "emulator", "cuda" and "auto": GPUs if every rank can use one. A
    rank takes the GPU of its current CUDA context; if it has none, torch's current one for a process group of torch,
    else the one with the number of its rank on the host.

    Raises: RuntimeError if NBEP_TARGET is "cuda" and a rank can use no GPU, or if a process group of torch would run on
            the emulator; ValueError for another NBEP_TARGET, or if it is not the same on all ranks.
            Every rank of comm raises.
    """
    global _runtime
    if _runtime is None:
        wanted = os.environ.get("NBEP_TARGET", "auto")
        wishes, targets = zip(*gather_results(comm, lambda: (wanted, resolve_target(wanted))), strict=True)
        if len(set(wishes)) > 1:
            raise ValueError(f"NBEP_TARGET: got {list(wishes)}; must be the same on all ranks")
        if "emulator" in targets and isinstance(comm, TorchComm):
            raise RuntimeError(
                f"group: got a process group of torch, but {targets.count('emulator')} of {comm.size} ranks would run "
                f"on the emulator; that takes MPI.COMM_WORLD under mpiexec, or nbep.spawn"
            )
        _runtime = _emulator_runtime() if "emulator" in targets else _cuda_runtime(comm)
        set_process_runtime(_runtime)
    return _runtime


def _emulator_runtime() -> Runtime:
    from nbep.host.runtime.mpi import MpiEmulatorRuntime

    return MpiEmulatorRuntime.of_process()


def _cuda_runtime(comm: Any) -> Runtime:
    from nbep.host.runtime.cuda.driver import current_ordinal
    from nbep.host.runtime.cuda.runtime import CudaRuntime, SharedDevice

    own = _own_ordinal(comm)
    current = current_ordinal()
    return CudaRuntime(SharedDevice(own if current is None else current), comm.rank)


def _own_ordinal(comm: Any) -> int:
    """The GPU for a rank that has no CUDA context yet. All ranks call this, for under MPI it is collective."""
    if isinstance(comm, TorchComm):
        import torch

        return torch.cuda.current_device()
    from mpi4py import MPI

    from nbep.host.runtime.cuda.driver import num_devices

    node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank = node_comm.rank
    node_comm.Free()
    return rank % num_devices()
