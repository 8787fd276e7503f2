"""All ranks of a program that mpiexec or torchrun has started, with the same names under both."""

import os
from typing import Any

from nbep.host.ranks.comm import TorchComm


class GlooWorld(TorchComm):
    def gather(self, sendobj: Any) -> list[Any] | None:
        everything = self.allgather(sendobj)
        return everything if self.rank == 0 else None

    def Abort(self, status: int) -> None:  # noqa: N802
        os._exit(status)


def world() -> Any:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        return GlooWorld(torch.distributed.group.WORLD)
    from mpi4py import MPI

    return MPI.COMM_WORLD


def group_of(comm: Any) -> Any:
    """What a Buffer takes."""
    return comm.group if isinstance(comm, GlooWorld) else comm
