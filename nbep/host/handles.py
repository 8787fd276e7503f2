"""What the handles of all modes have in common: they unpack, index and count like DeepEP's tuples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol, Self
from uuid import uuid4
from weakref import WeakValueDictionary

from nbep.host.plans import Plans

MAX_PLANS = 64  # of a handle


class OfThisProcess:
    """What has no meaning elsewhere, and of which a second one would have none here."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: it belongs to this process and cannot be pickled or copied")


class Identity:
    """What handles remember of the memory that made them. Copies of a handle remember the same one.

    A handle that was pickled finds it again while it lives in this process, and gets one of its own otherwise.
    """

    def __init__(self) -> None:
        self._key = uuid4().hex
        _living[self._key] = self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self._key,)


_living: WeakValueDictionary[str, Identity] = WeakValueDictionary()


def _find(key: str) -> Identity:
    return _living.get(key) or Identity()


class Unpacks:
    """As a tuple, of what _as_tuple gives."""

    __slots__ = ()

    def _as_tuple(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_tuple())

    def __len__(self) -> int:
        return len(self._as_tuple())

    def __getitem__(self, index: Any) -> Any:
        return self._as_tuple()[index]


class Numbered(Protocol):
    """A handle of one of a buffer's dispatches, from 1 on; 0 if nobody knows."""

    @property
    def number(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ArraysHandle(Unpacks):
    """A handle that consists of arrays, which are the arguments of its class.

    A copy is as good as the handle, but its arrays are checked again: they may have moved to another device.
    """

    rewritten: ClassVar[tuple[str, ...]]  # the arrays that combine writes, if it goes through rings

    # The identity of the buffer, and which of its dispatches it is of, from 1 on; None and 0 for arrays that somebody
    # else has put together.
    owner: Identity | None = field(default=None, init=False, repr=False)
    number: int = field(default=0, init=False, repr=False)
    is_as_made: bool = field(default=False, init=False, repr=False)
    plans: Plans[Any] = field(default_factory=partial(Plans, MAX_PLANS), init=False, repr=False)  # of calls with it

    def owned_by(self, owner: Identity, number: int) -> Self:
        """The same, as made by a dispatch of the buffer of this identity: the arrays need not be checked again."""
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "is_as_made", True)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_as_made": False, "plans": Plans(MAX_PLANS)}  # they are for these arrays

    @property
    def arrays(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def _as_tuple(self) -> tuple[Any, ...]:
        return tuple(self.arrays.values())
