"""Which communicator was given, and the runtime of this rank."""

from __future__ import annotations

from typing import Any

from nbep.host.entry import leave_alone
from nbep.host.ranks import hosts
from nbep.host.ranks.comm import Communicator, InProcessComm, TorchComm, is_mpi_comm, is_torch_group
from nbep.host.target import process
from nbep.host.target.base import Runtime


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
