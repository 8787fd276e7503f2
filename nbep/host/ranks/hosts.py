"""Which host each rank is on, and that the ranks agree in what the hosts' installations and environments decide.

 rank 0, hosta: nbep 0.1.0, Python 3.11 --+
 rank 1, hosta: nbep 0.1.0, Python 3.11 --+--> nbep: got 0.1.0 on ranks 0, 1 (hosta), 0.0.9 on rank 2 (hostb)
 rank 2, hostb: nbep 0.0.9, Python 3.11 --+

Processes that mpiexec or torchrun starts on several hosts may find other software there. It could lay out memory in
another way, and then calls would return wrong rows. So a Buffer compares first.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbep.host.ranks.comm import Communicator, TorchComm, gather_objects
from nbep.host.ranks.timeouts import join_ranks, timeout_ns
from nbep.version import __version__

# Where launchers say how many processes they have started: MPICH and Intel MPI, Open MPI.
WORLD_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

Facts = dict[str, str]
_names: dict[int, tuple[str, ...]] = {}  # the hosts of the ranks, by MPI communicator


def own_facts(comm: Communicator) -> Facts:
    """What must be the same on all ranks of comm."""
    return {
        "nbep": __version__,
        "Python": _first_two(platform.python_version()),
        "NumPy": _first_two(np.__version__),
        "byte order": sys.byteorder,
        "NBEP_TIMEOUT_MS": f"{timeout_ns() / 1e6:g}",
        "number of ranks": str(_world_size(comm)),
    }


def _first_two(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _world_size(comm: Communicator) -> int:
    if isinstance(comm, TorchComm):
        import torch.distributed

        return torch.distributed.get_world_size()
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def meet(comm: Communicator) -> None:
    """Learn where the ranks of comm are, and compare them. Collective; comm is of MPI or of torch.

    Raises: on every rank, ValueError if the ranks differ in one of own_facts, with all values, ranks and hosts
            ValueError where MPI connects fewer processes than the launcher has started
    """
    size = _world_size(comm)
    for name in WORLD_SIZES:
        started = os.environ.get(name, "")
        if size == 1 and started.isdecimal() and int(started) > 1 and not isinstance(comm, TorchComm):
            raise ValueError(
                f"group: got 1 rank, though the launcher has started {started} ({name}); must be started by the "
                f"mpiexec of the MPI that mpi4py uses: see `nbep info`"
            )
    gathered = gather_objects(comm, (socket.gethostname(), own_facts(comm)))
    names = tuple(name for name, _ in gathered)
    text = difference(names, [facts for _, facts in gathered])
    if text:
        raise ValueError(text)
    if isinstance(comm, TorchComm):
        comm.hosts = names
    else:
        _names[_key(comm)] = names


def difference(hosts: Sequence[str], facts: Sequence[Facts]) -> str | None:
    """The first of the facts in which ranks differ, with all that they have; None if there is none."""
    for name in facts[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, own in enumerate(facts):
            ranks_of.setdefault(own.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            got = ", ".join(
                f"{value} on {join_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
                for value, ranks in ranks_of.items()
            )
            return f"{name}: got {got}; must be the same on all ranks"
    return None


def names_of(comm: Communicator) -> tuple[str, ...]:
    """The host of each rank; nothing if the ranks have not met: those of one process do not."""
    return comm.hosts if isinstance(comm, TorchComm) else _names.get(_key(comm), ()) if _names else ()


def hosts_of(comm: Communicator) -> tuple[str, ...]:
    """The host of each rank, if they are on several; else nothing."""
    names = names_of(comm)
    return names if len(set(names)) > 1 else ()


def _key(comm: Any) -> int:
    return comm.py2f() if hasattr(comm, "py2f") else -1
