"""What the ranks of a buffer must pass alike to a collective call, compared where all of them live in one process.

 rank 0: call 7: dispatch, 2 choices a token --> first at call 7: leaves what it passes
 rank 1: call 7: dispatch, 3 choices a token --> differs: ValueError on rank 1, which may call again
 rank 1: call 7: dispatch, 2 choices a token --> last at call 7: takes it away

No rank waits: one may be calls ahead of another. In processes of their own the ranks would have to exchange messages
to compare. Dispatch and combine do so in their notify kernels; see host.calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from nbep.host.ranks.comm import Communicator, InProcessComm

Arguments = dict[str, object]  # in the order in which they are compared


class Unknown:
    """The value of an argument that this rank cannot tell: like any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@dataclass
class _Call:
    """What the first rank passed to a collective call, and how many ranks are still to make it."""

    rank: int
    verb: str
    arguments: Arguments
    num_to_come: int


class CallLog:
    """The collective calls of one buffer that not all of its ranks have made yet. The ranks share it."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._num_calls = [0] * num_ranks  # so far, by rank
        self._last = [""] * num_ranks  # the verb of the last one
        self._calls: dict[int, _Call] = {}  # by their number
        self._lock = Lock()  # virtual ranks are threads
        self._is_closed = False

    @classmethod
    def shared(cls, comm: Communicator) -> CallLog | None:
        """A log that all ranks of comm share; None if they live in processes of their own. Collective."""
        return comm.bcast(cls(comm.size)) if isinstance(comm, InProcessComm) else None

    def add(self, rank: int, verb: str, arguments: Arguments) -> None:
        """Note the next call of a rank.

        Raises: ValueError if another rank called another verb there, or passed another argument; the call then does
                not count
        """
        with self._lock:
            if self._is_closed:
                return
            number = self._num_calls[rank]
            call = self._calls.setdefault(number, _Call(rank, verb, arguments, self._num_ranks))
            if (call.verb, call.arguments) != (verb, arguments):
                raise _difference(call, _Call(rank, verb, arguments, 0), number)
            self._num_calls[rank] += 1
            self._last[rank] = verb
            call.num_to_come -= 1
            if call.num_to_come == 0:
                del self._calls[number]

    def so_far(self) -> list[tuple[int, str]]:
        """By rank: how many calls it has made, and the last one; nothing if that is not known."""
        return [] if self._is_closed else list(zip(self._num_calls, self._last, strict=True))

    def close(self) -> None:
        """Compare no more: a CUDA graph replays calls that do not pass here."""
        with self._lock:
            self._is_closed = True
            self._calls.clear()


def _difference(first: _Call, later: _Call, number: int) -> ValueError:
    where = f"the buffer's collective call {number + 1}"
    if first.verb != later.verb:
        return ValueError(
            f"buffer: got {later.verb} on rank {later.rank}, {first.verb} on rank {first.rank} as {where}; "
            f"must be the same on all ranks"
        )
    name = next(name for name, value in first.arguments.items() if later.arguments[name] != value)
    return ValueError(
        f"{name}: got {later.arguments[name]} on rank {later.rank}, {first.arguments[name]} on rank {first.rank} "
        f"in {first.verb}, {where}; must be the same on all ranks"
    )
