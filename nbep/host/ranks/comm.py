"""Communicators: what `Buffer` needs of one, the one that connects the ranks of a single process, and torch's groups.

The names are mpi4py's lower-case ones, so that the same `main(comm)` takes an `InProcessComm` or `MPI.COMM_WORLD`.

 rank 0: allgather("a") --+                                  +--> ["a", "b"]
                          +--> meeting number n of the group +
 rank 1: allgather("b") --+                                  +--> ["a", "b"]

The n-th collective call of every rank is meeting n. A rank waits there until all ranks have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, Protocol, TypeVar

from nbep.host.ranks import await_ranks
from nbep.host.ranks.timeouts import MISSED_MEETING, PeerTimeout, join_ranks, timeout_ns
from nbep.host.target.base import Runtime

Result = TypeVar("Result")


BUFFER, DESTROY = "Buffer", "destroy"  # what all ranks call


class Communicator(Protocol):
    """The methods of a communicator that nbep calls. Objects are anything that the communicator can carry."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, sendobj: Any) -> list[Any]: ...

    def barrier(self) -> None: ...


class _Meeting:
    """One collective call: what each rank brought, and how many have not picked up the result yet."""

    def __init__(self, verb: str, size: int):
        self.verb = verb
        self.brought: dict[int, Any] = {}
        self.told: dict[int, Any] = {}  # by those who have come; see `Runtime.tell_hosts`
        self.num_to_leave = size


class CommGroup:
    """What the ranks of one communicator share. `size` ranks meet here.

    names     what the ranks are called in the group of all
    returned  names of those whose functions have returned, shared with subgroups: no rank need wait for them. Those of
              the emulator are not noted; there a deadlock report says more.
    """

    def __init__(self, names: Sequence[int], returned: set[int] | None = None):
        self.size = len(names)
        self.names = names
        self.returned: set[int] = set() if returned is None else returned
        self.meetings: dict[int, _Meeting] = {}
        self.subgroups: dict[tuple[int, int], CommGroup] = {}


class Number(int):
    """A number, as mpi4py's communicators have it, that may be called, as torch's groups are: `group.size()`."""

    __slots__ = ()

    def __call__(self) -> int:
        return int(self)


class InProcessComm:
    """Connects the ranks that `nbep.spawn` runs in one process.

    Objects are passed by reference, not copied: a rank that changes what it received changes it for all.
    Every collective call waits for all ranks, also where MPI lets some go on.

    Raises:
        RuntimeError: if the ranks' n-th collective calls are not the same method, or if one makes none any more
    """

    def __init__(self, group: CommGroup, rank: int, runtime: Runtime):
        self._group = group
        self._rank, self._size = Number(rank), Number(group.size)
        self._num_calls = 0
        self.runtime = runtime

    def __repr__(self) -> str:
        return f"<InProcessComm rank {self.rank} of {self.size}>"

    @property
    def rank(self) -> Number:
        return self._rank

    @property
    def size(self) -> Number:
        return self._size

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def allgather(self, sendobj: Any) -> list[Any]:
        """What every rank sent, by rank."""
        return self.meet("allgather", sendobj)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """What every rank sent, by rank, at root; None elsewhere."""
        self._check_root(root)
        everything = self.meet(f"gather to {root}", sendobj, of=range(self.size) if self.rank == root else ())
        return everything if self.rank == root else None

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """What root sent, at every rank."""
        self._check_root(root)
        return self.meet(f"bcast from {root}", obj if self.rank == root else None, of=[root])[root]

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] | None = None) -> Any:
        """The sum over ranks, or the fold with op(a, b), in the order of the ranks."""
        total, *others = self.meet("allreduce", sendobj)
        for value in others:
            total = total + value if op is None else op(total, value)
        return total

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.meet("barrier", None)

    Barrier = barrier

    def Split(self, color: int = 0, key: int = 0) -> InProcessComm | None:  # noqa: N802
        """A communicator of the ranks with the same color, ordered by (key, rank); None where color is negative."""
        number = self._num_calls
        everyone = self.meet("Split", (color, key))
        if color < 0:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        names = [self._group.names[rank] for _, rank in members]
        group = self._group.subgroups.setdefault((number, color), CommGroup(names, self._group.returned))
        return InProcessComm(group, members.index((key, self.rank)), self.runtime)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root: got {root}; must be a rank below {self.size}")

    def meet(self, verb: str, brought: Any, of: Collection[int] | None = None) -> list[Any]:
        """What every rank brings to a meeting of that name, by rank. of: the ranks that tell this one something"""
        self.runtime.check_caller(f"comm.{verb}")
        meetings = self._group.meetings
        number, self._num_calls = self._num_calls, self._num_calls + 1
        meeting = meetings.setdefault(number, _Meeting(verb, self.size))
        if meeting.verb != verb:
            others = join_ranks(sorted(meeting.brought))
            raise RuntimeError(f"rank {self.rank} calls {verb} while {others} called {meeting.verb}")
        meeting.brought[self.rank] = brought
        meeting.told[self.rank] = self.runtime.tell_hosts()

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if rank not in meeting.brought]

        def describe() -> str:
            return f"{verb}: {join_ranks(missing())} did not come"

        def gone() -> list[int]:
            return [rank for rank in missing() if self._group.names[rank] in self._group.returned]

        def told() -> list[Any]:
            return [known for rank, known in meeting.told.items() if of is None or rank in of]

        self.runtime.wait_until(lambda: len(meeting.brought) == self.size or bool(gone()), describe, told=told)
        if len(meeting.brought) != self.size:
            names = join_ranks(gone())
            raise RuntimeError(f"rank {self.rank} waits for {verb}: {names} did not come, and has returned")
        meeting.num_to_leave -= 1
        if meeting.num_to_leave == 0:
            meetings.pop(number, None)  # ranks that are threads may both see 0
        return [meeting.brought[rank] for rank in range(self.size)]


class TorchComm:
    """A torch.distributed process group with the names of a communicator. Every call is an all_gather_object.

    Under NCCL that goes over torch's current device, so each process must have set its own.
    """

    def __init__(self, group: Any):
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.hosts: tuple[str, ...] = ()  # of the ranks; see ranks.hosts

    def allgather(self, sendobj: Any) -> list[Any]:
        """What every rank sent, by rank."""
        import torch.distributed

        received: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(received, sendobj, group=self.group)
        return received

    def barrier(self) -> None:
        """Wait until every rank is here. (torch's own barrier guesses a device.)"""
        self.allgather(None)


def gather_results(comm: Communicator, make: Callable[[], Result], where: str = BUFFER) -> list[Result]:
    """What make() returned on every rank, by rank. Collective; make itself must not wait for a peer without a bound.

    where: what all ranks call, for reports

    Raises: on every rank if make failed on one, with the ranks that failed and their errors: ValueError or
            NotImplementedError if all of them are that, else RuntimeError
    """
    result, error = None, None
    try:
        result = make()
    except Exception as caught:  # sent to the peers, which would wait for this rank
        if getattr(caught, "role", "") == MISSED_MEETING:
            raise  # they find out themselves
        error = caught
    # What stands for the error on other ranks: its own class may need more than a text.
    kinds_sent: tuple[type[Exception], ...] = ValueError, NotImplementedError
    kind = next((kind for kind in kinds_sent if isinstance(error, kind)), RuntimeError)
    failure = None if error is None else (kind, str(error) or repr(error))
    outcomes = gather_objects(comm, (result, failure), where)
    failures: dict[str, list[int]] = {}
    kinds: set[type[Exception]] = set()
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, text = failure
            kinds.add(kind)
            failures.setdefault(text, []).append(rank)
    if failures:
        kind = kinds.pop() if len(kinds) == 1 else RuntimeError
        raise kind("; ".join(f"{join_ranks(ranks)}: {text}" for text, ranks in failures.items())) from error
    return [result for result, _ in outcomes]


def gather_objects(comm: Communicator, value: Any, where: str = BUFFER) -> list[Any]:
    """What every rank passes, by rank. Collective.

    Where ranks are processes it has an end. Raises: PeerTimeout if one is missing
    """
    if isinstance(comm, InProcessComm):
        return comm.meet(where, value)
    if isinstance(comm, TorchComm):
        meet_torch_group(comm.group, 2 * timeout_ns())
    if not is_mpi_comm(comm):
        return comm.allgather(value)
    return await_ranks.gather_objects(comm, value, 2 * timeout_ns())


def await_all(comm: Communicator, where: str = BUFFER) -> None:
    """A barrier. It has an end where ranks are processes: raises PeerTimeout if one is missing."""
    if not is_mpi_comm(comm):
        gather_objects(comm, None, where)
        return
    await_ranks.await_all(comm, 2 * timeout_ns())


def is_mpi_comm(comm: object) -> bool:
    """Whether this is an mpi4py communicator. mpi4py is not imported to find out."""
    return any(cls.__module__ == "mpi4py.MPI" and cls.__name__ == "Comm" for cls in type(comm).__mro__)


def is_torch_group(comm: object) -> bool:
    """Whether this is a process group of torch.distributed. torch is not imported to find out."""
    return any(cls.__module__.startswith("torch.") and cls.__name__ == "ProcessGroup" for cls in type(comm).__mro__)


# --- Meetings of torch's processes that have an end: torch's own collective calls wait for minutes, and name no rank --
#
#         rank 0                                      rank 1                            torch's store
#  comes  "here", the 1st of 2                        computes                          here/0
#         time is up: is there a verdict? "gone"                                        here/0, verdict gone
#  comes                                              "here", the last: is there one?   here/0, here/1, verdict gone
#         raises: rank 1 did not come                 raises: rank 0 has given up
#
# Who comes last writes the verdict "all", who gives up "gone"; the first one counts. After "all" every rank goes on to
# a collective call of torch, where all will be.


LONGEST_MS = 1e9  # eleven days: the store counts in 32 bits of milliseconds
ALL, GONE = b"all", b"gone"

_num_meetings: Counter[str] = Counter()  # of this process, by group


def default_store() -> Any:
    """torch has no public name for it; programs that need it take this one."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def meet_torch_group(group: Any, timeout_ns: int) -> None:
    """Wait until all ranks of a process group call this. Collective.

    Raises: PeerTimeout on every rank if some do not come in time
    """
    import torch.distributed

    rank, size, store = group.rank(), group.size(), default_store()
    members = sha256(repr(torch.distributed.get_process_group_ranks(group)).encode()).hexdigest()[:16]
    name = f"{group.group_name}/{members}"
    _num_meetings[name] += 1
    key = f"nbep/meeting/{name}/{_num_meetings[name]}"
    timeout_ms = min(timeout_ns / 1e6, LONGEST_MS)
    store.set(f"{key}/here/{rank}", "")
    verdict = b""
    if store.add(f"{key}/count", 1) == size:
        verdict = store.compare_set(f"{key}/verdict", "", ALL.decode())
    else:
        try:
            store.wait([f"{key}/verdict"], timedelta(milliseconds=timeout_ms))
        except RuntimeError:  # DistStoreError, which older versions do not have
            store.set(f"{key}/gone/{rank}", "")
            store.compare_set(f"{key}/verdict", "", GONE.decode())
        verdict = store.get(f"{key}/verdict")
    if verdict != ALL:
        others = [peer for peer in range(size) if peer != rank]
        missing = [peer for peer in others if not store.check([f"{key}/here/{peer}"])]
        missing = missing or [peer for peer in others if store.check([f"{key}/gone/{peer}"])]
        what = f"did not come to make, or to destroy, a Buffer in {timeout_ms:g} ms"
        raise PeerTimeout(f"rank {rank}: {join_ranks(missing)} {what}", rank, missing[0], MISSED_MEETING)
