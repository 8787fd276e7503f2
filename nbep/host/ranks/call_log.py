"""What the ranks of a buffer must pass alike to a collective call, compared where all of them live in one process.

 rank 0: call 7: dispatch, 2 choices a token --> first at call 7: leaves what it passes
 rank 1: call 7: dispatch, 3 choices a token --> differs: ValueError on rank 1, which may call again
 rank 1: call 7: dispatch, 2 choices a token --> last at call 7: takes it away

No rank waits: one may be calls ahead of another. Between processes the kernels compare; see host.calls.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from nbep.host.ranks.comm import Communicator, InProcessComm

Arguments = dict[str, object]  # in the order in which they are compared


class Unknown:
    """The value of an argument that this rank cannot tell: like any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Made(NamedTuple):
    """What a rank passed to a collective call."""

    rank: int
    verb: str
    arguments: Arguments


class CallLog:
    """The collective calls of one buffer that not all of its ranks have made yet. The ranks share it."""

    def __init__(self, num_ranks: int):
        self._num_calls = [0] * num_ranks  # so far, by rank
        self._last = [""] * num_ranks  # the verb of the last one
        self._calls: dict[int, Made] = {}  # by their number: what the first rank passed
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
            number, made = self._num_calls[rank], Made(rank, verb, arguments)
            first = self._calls.setdefault(number, made)
            if first[1:] != made[1:]:
                raise difference(made, first, number)
            self._num_calls[rank] += 1
            self._last[rank] = verb
            if min(self._num_calls) > number:
                del self._calls[number]

    def so_far(self) -> list[tuple[int, str]]:
        """By rank: how many calls it has made, and the last one; nothing if that is not known."""
        return [] if self._is_closed else list(zip(self._num_calls, self._last, strict=True))

    def close(self) -> None:
        """Compare no more: a CUDA graph replays calls that do not pass here."""
        with self._lock:
            self._is_closed = True
            self._calls.clear()


def difference(own: Made, other: Made, number: int | None = None) -> ValueError:
    """The error for a rank that has passed something else than another one; number: of the call, if that is known."""
    nth = "" if number is None else f"the buffer's collective call {number + 1}"
    name = "buffer"
    got: tuple[object, object] = own.verb, other.verb
    where = f"as {nth}" if nth else "in the same call"
    if own.verb == other.verb:
        name = next(name for name, value in own.arguments.items() if other.arguments[name] != value)
        got = own.arguments[name], other.arguments[name]
        where = f"in {own.verb}, {nth}" if nth else f"in the same {own.verb}"
    return ValueError(
        f"{name}: got {got[0]} on rank {own.rank}, {got[1]} on rank {other.rank} {where}; must be the same on all ranks"
    )
