"""What the handles of all modes have in common: they unpack, index and count like DeepEP's tuples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Self


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


@dataclass(frozen=True, eq=False)
class ArraysHandle(Unpacks):
    """A handle that consists of arrays, which are the arguments of its class."""

    # The identity of the buffer, and which of its dispatches it is of, from 1 on; None and 0 for arrays that somebody
    # else has put together.
    owner: object | None = field(default=None, init=False, repr=False)
    number: int = field(default=0, init=False, repr=False)

    def owned_by(self, owner: object, number: int) -> Self:
        """The same, as made by a dispatch of the buffer of this identity: the arrays need not be checked again."""
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "number", number)
        return self

    def _as_tuple(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self) if each.init)
