"""What dispatch leaves for combine: handles. Those of all modes unpack, index and count like DeepEP's tuples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, NoReturn, Self
from uuid import uuid4
from weakref import WeakValueDictionary

from nbep.host.target.base import Array


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


class AsTuple(Unpacks):
    """A handle of nbep.deep_ep, for programs that ask whether it is a tuple.

    isinstance says that it is one; C code that would look into a tuple's own memory is not let in, torch.compile too.
    """

    __slots__ = ()

    @property
    def __class__(self) -> type:
        return tuple

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("__class__ of a handle: got a new one; it stays a tuple")

    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._as_tuple() + tuple(other)

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(other) + self._as_tuple()


class Taken(NamedTuple):
    """What calls take of a handle: its arrays, as a launch takes them, and numbers.

    sizes: those that plans are made for; numbers: those that each dispatch finds anew, the received rows first
    """

    arguments: Sequence[Any]
    sizes: tuple[int, ...]
    numbers: tuple[int, ...]


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
    _taken: Taken | None = field(default=None, init=False, repr=False)

    @classmethod
    def made(cls, arrays: Sequence[Any], owner: Identity, number: int, taken: Taken | None = None) -> Self:
        """As made by a dispatch of the buffer of this identity. A dataclass is frozen at a price."""
        self = cls.__new__(cls)
        vars(self).update(zip(cls._names(), arrays, strict=True), owner=owner, number=number, is_as_made=True)
        vars(self)["_taken"] = taken
        return self

    @classmethod
    @cache
    def _names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls) if each.init)

    def taken(self, runtime: Any) -> Taken:
        """What calls take of it."""
        taken = self._taken
        if taken is None:
            taken = Taken(runtime.arguments(self._as_tuple()), *self._numbers())
            if self.is_as_made:
                vars(self)["_taken"] = taken
        return taken

    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`sizes` and `numbers` of what calls take."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), {**vars(self), "is_as_made": False, "_taken": None})

    @property
    def arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names()}

    def _as_tuple(self) -> tuple[Any, ...]:
        return tuple(self.arrays.values())


def _restored(cls: Any, state: dict[str, Any]) -> Any:
    handle = cls.__new__(cls)
    vars(handle).update(state)
    return handle


# --- What dispatch leaves behind for combine and for cached dispatches


@dataclass(frozen=True, eq=False)
class DispatchHandle(ArraysHandle):
    """The routing of one intranode dispatch, as one rank sees it. Unpacks, indexes and counts like DeepEP's 6-tuple.

    Tied to the buffer that made it and to that dispatch's num_sms, which is twice num_channels.

    rank_prefix_matrix          [num_ranks, num_ranks] int32; [s, d]: tokens from ranks 0 to s to rank d
    channel_prefix_matrix       [num_ranks, num_channels] int32; [d, c]: tokens of channels 0 to c to rank d
    recv_channel_prefix_matrix  [num_ranks, num_channels] int32; [s, c]: received from rank s before channel c
    recv_src_idx                [num_recv_tokens] int32: each received token's index on its source rank
    is_token_in_rank            [num_tokens, num_ranks] bool
    send_head                   [num_tokens, num_ranks] int32; [t, r]: index of token t among those of its channel to
                                rank r, or -1; combine rewrites it in place
    """

    rewritten = ("send_head",)

    rank_prefix_matrix: Array
    channel_prefix_matrix: Array
    recv_channel_prefix_matrix: Array
    recv_src_idx: Array
    is_token_in_rank: Array
    send_head: Array

    @property
    def num_channels(self) -> int:
        return int(self.channel_prefix_matrix.shape[1])

    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.is_token_in_rank.shape[0], self.num_channels), (self.recv_src_idx.shape[0],)


class DispatchTuple(AsTuple, DispatchHandle):
    """The same, of nbep.deep_ep."""


# --- What dispatch between nodes leaves behind for combine and for cached dispatches


@dataclass(frozen=True, eq=False)
class InternodeHandle(ArraysHandle):
    """The routing of one internode dispatch, as one rank sees it. Unpacks, indexes and counts like DeepEP's 10-tuple.

    Tied to the buffer that made it and to that dispatch's num_sms, which is twice num_channels. num_rdma_ranks nodes of
    num_nvl_ranks ranks, num_ranks in all; this is the rank with nvl_rank l of its node.

    is_token_in_rank                 [num_tokens, num_ranks] bool
    rdma_channel_prefix_matrix       [num_rdma_ranks, num_channels] int32; [d, c]: tokens of channels 0 to c to node d
    gbl_channel_prefix_matrix        [num_ranks, num_channels] int32; [r, c]: tokens of channels 0 to c to rank r
    recv_rdma_channel_prefix_matrix  [num_rdma_ranks, num_channels] int32; [n, c]: those of rank (n, l) to this node
    recv_rdma_rank_prefix_sum        [num_rdma_ranks] int32; [n]: tokens of the ranks (0, l) to (n, l) to this node
    recv_gbl_channel_prefix_matrix   [num_ranks, num_channels] int32; [r, c]: first row of channel c of rank r
    recv_gbl_rank_prefix_sum         [num_ranks] int32; [r]: tokens of ranks 0 to r to this rank
    recv_src_meta                    [num_recv_tokens, words] int32: each received token's index on its source rank, the
                                     rdma_rank of that, then the bits of its destinations; see layout.internode
    send_rdma_head                   [num_tokens, num_rdma_ranks] int32; [t, d]: index of token t among those of its
                                     channel to node d, or -1
    send_nvl_head                    [num_rdma_recv_tokens, num_nvl_ranks] int32; [i, k]: of what passed through this
                                     rank, by node and channel: the index among those of them for local rank k, or -1

    Combine rewrites both heads in place.
    """

    rewritten = "send_rdma_head", "send_nvl_head"

    is_token_in_rank: Array
    rdma_channel_prefix_matrix: Array
    gbl_channel_prefix_matrix: Array
    recv_rdma_channel_prefix_matrix: Array
    recv_rdma_rank_prefix_sum: Array
    recv_gbl_channel_prefix_matrix: Array
    recv_gbl_rank_prefix_sum: Array
    recv_src_meta: Array
    send_rdma_head: Array
    send_nvl_head: Array

    @property
    def num_channels(self) -> int:
        return int(self.rdma_channel_prefix_matrix.shape[1])

    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = self.recv_src_meta.shape[0], self.send_nvl_head.shape[0]
        return (self.is_token_in_rank.shape[0], self.num_channels), numbers


class InternodeTuple(AsTuple, InternodeHandle):
    """The same, of nbep.deep_ep."""
