"""The runtime of a process that is one rank under mpiexec or torchrun, and which communicator a buffer was given."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from nbep.host.arguments import named_by
from nbep.host.entry import leave_alone
from nbep.host.ranks import hosts
from nbep.host.ranks.await_ranks import call_bounded, end_after_timeouts
from nbep.host.ranks.comm import (
    Communicator,
    InProcessComm,
    TorchComm,
    gather_objects,
    gather_results,
    is_mpi_comm,
    is_torch_group,
)
from nbep.host.ranks.timeouts import timeout_ns
from nbep.host.target import process
from nbep.host.target.base import Runtime, set_process_runtime
from nbep.host.target.resolve import resolve_target

# Where launchers say which of the host's processes this is: Open MPI, MPICH and Intel MPI, MVAPICH, PALS, Slurm. Slurm
# comes last: its batch script has a number too, and other launchers hand it on.
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)


_runtime: Runtime | None = None
_made_for = ""  # what NBEP_TARGET was then


def process_runtime(comm: Any) -> Runtime:
    """The runtime of this process. All ranks of comm call this together; some may have made theirs for another group.

    Environment variable NBEP_TARGET, when the runtime is made, chooses between "emulator", "cuda" and "auto": GPUs if
    every rank can use one. A rank takes the GPU of its current CUDA context; if it has none, torch's current one for a
    process group of torch, else the one with the process's number on the host: what the launcher says (LOCAL_RANKS), or
    the number of the rank among those of comm there if it says nothing, or would put two of them on one GPU in vain.

    Raises: RuntimeError if NBEP_TARGET is "cuda" and a rank can use no GPU, if some ranks have used GPUs before and
            others can use none, or if a rank cannot make its runtime; ValueError for another NBEP_TARGET, or if it is
            not the same on all ranks. Every rank of comm raises.
    """

    def look() -> tuple[str, str, bool]:
        if _runtime is not None:
            return _made_for, _runtime.target, True
        wanted = os.environ.get("NBEP_TARGET", "auto")
        with named_by({"target": "NBEP_TARGET"}):
            return wanted, resolve_target(wanted), False

    wishes, targets, made = zip(*gather_results(comm, look), strict=True)
    if len(set(wishes)) > 1:
        raise ValueError(f"NBEP_TARGET: got {list(wishes)}; must be the same on all ranks")
    if "emulator" in targets and ("cuda", True) in zip(targets, made, strict=True):
        raise RuntimeError(
            f"group: got ranks that have used GPUs, but {targets.count('emulator')} of {comm.size} ranks would run on "
            f"the emulator; all ranks of a group must run on the same target"
        )
    if is_mpi_comm(comm):
        end_after_timeouts()
    if not all(made):
        _make_runtimes(comm, "emulator" if "emulator" in targets else "cuda", wishes[0])
    assert _runtime is not None
    return _runtime


def _make_runtimes(comm: Any, target: str, wanted: str) -> None:
    """Make the runtimes of those ranks of comm that have none. All ranks call this."""
    neighbours = _neighbours(comm) if target == "cuda" else (0, [])

    def make() -> None:
        global _runtime, _made_for
        if _runtime is None:
            if target == "emulator":
                module = import_module(f"nbep.host.target.{'torchrun' if isinstance(comm, TorchComm) else 'mpi'}")
                runtime = module.runtime_of_process()
                runtime.watch_tensors()
                _runtime = runtime
            else:
                from nbep.host.target.cuda.driver import current_ordinal
                from nbep.host.target.cuda.runtime import CudaRuntime, SharedDevice

                current = current_ordinal()
                ordinal = _own_ordinal(comm, *neighbours) if current is None else current
                _runtime = CudaRuntime(SharedDevice(ordinal), comm.rank)
            _made_for = wanted
            set_process_runtime(_runtime)

    gather_results(comm, make)


def _neighbours(comm: Any) -> tuple[int, list[int | None]]:
    """Which of the ranks of comm on this host this is, and the numbers that their launcher gave them.

    Collective under MPI; torch's ranks need none.
    """
    if isinstance(comm, TorchComm):
        return 0, []
    from mpi4py import MPI

    node_comm = call_bounded(comm, lambda: comm.Split_type(MPI.COMM_TYPE_SHARED), 2 * timeout_ns())
    local_rank = next((os.environ[name] for name in LOCAL_RANKS if os.environ.get(name, "").isdecimal()), None)
    local_ranks = gather_objects(node_comm, None if local_rank is None else int(local_rank))
    rank = node_comm.rank
    node_comm.Free()
    return rank, local_ranks


def _own_ordinal(comm: Any, rank: int, local_ranks: list[int | None]) -> int:
    """The GPU for a rank that has no CUDA context yet."""
    if isinstance(comm, TorchComm):
        import torch

        return torch.cuda.current_device()
    from nbep.host.target.cuda.driver import num_devices

    num_gpus = num_devices()
    gpus = [number % num_gpus for number in local_ranks if number is not None]
    if len(gpus) == len(local_ranks) and len(set(gpus)) == min(len(gpus), num_gpus):
        return gpus[rank]
    return rank % num_gpus


def connect(group: object | None, comm: object | None, what: str = "Buffer") -> tuple[Communicator, Runtime]:
    """The communicator that was given as `group` or as `comm`, and the runtime of this rank. what: is made of it

    Raises: ValueError if there is none, if there are two, or if it is of an unknown kind; on every rank if the ranks
            differ in what hosts.meet compares
    """
    leave_alone()
    if group is None and comm is None:
        raise ValueError("group: got None; pass a communicator as group or as comm")
    if group is not None and comm is not None and group is not comm:
        raise ValueError("comm: got a communicator besides group; pass only one of the two")
    name, given = ("group", group) if group is not None else ("comm", comm)
    if isinstance(given, InProcessComm):
        given.runtime.check_caller(what)
        return given, given.runtime
    if is_mpi_comm(given) or is_torch_group(given):
        communicator: Any = TorchComm(given) if is_torch_group(given) else given
        hosts.meet(communicator)
        runtime = process.process_runtime(communicator)
        runtime.check_caller(what)
        return communicator, runtime
    raise ValueError(
        f"{name}: got {type(given).__name__}; must be the communicator that nbep.spawn passes, one of mpi4py, or a "
        f"process group of torch.distributed"
    )
