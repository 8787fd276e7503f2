"""The symmetric memory of an `ElasticBuffer`, and how large it has to be; and rows that its ranks share: dispatch and
combine fetch them from where the caller wrote them.

rows = buffer.make_rows(num_rows, hidden)          collective
x = rows.like(recv_x)                              [len(recv_x), hidden] bf16, in memory that peers map
experts write x; buffer.combine(x, handle)         no rank pushes: each fetches what it wants

x = rows.like((values, scales))                    FP8 values of dispatch, and their scales behind all of them
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.kernels.intranode.offer_rows import LayPlaces
from nbep.device.layout.elastic import (
    DATA,
    MAX_RANKS,
    ElasticNodes,
    ElasticPlaces,
    ElasticShape,
    ElasticSlots,
    describe_elastic,
    describe_nodes,
    half_bytes,
    inbox_offset,
    is_in_node,
    make_slots,
    num_combine_bytes,
    num_dispatch_bytes,
    num_kept_bytes,
    num_mark_bytes,
    outbox_offset,
    place_arrays,
    relay_of,
    trailer_bytes,
)
from nbep.device.layout.internode import cells_bytes
from nbep.device.layout.intranode import MAX_TOPK
from nbep.device.protocols.peers import Peers
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.arguments import integer, refuse
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.shared_memory import SharedMemory
from nbep.host.target.base import Array, Event
from nbep.host.target.checked_arrays import Lease, LentArray
from nbep.host.target.memory import Span, SymmetricMemory

BF16_BYTES, SCALE_BYTES = 2, 4


class SharedRows:
    """Room for num_rows rows of hidden bf16 values on each rank. ElasticBuffer.make_rows makes it.

    What `like` returns is the same memory in each call. It may be used again once the call that takes it is done, until
    the buffer makes other rows, or is destroyed. Where the emulator sees another use, it is an error.

    places: of x, and of top-k weights, which combine brings here for itself
    """

    def __init__(self, memory: SharedMemory, num_rows: int, hidden: int, places: LayPlaces):
        self.memory, self.num_rows, self.hidden, self.places = memory, num_rows, hidden, places
        self._x = Span(memory.runtime, memory.symmetric, 0, places.topk_weights)
        self._leases: WeakSet[Lease] = WeakSet()  # of what `like` has returned
        self._empty: tuple[Array, ...] = ()  # the latest made without rows: an address says nothing

    def like(self, array: Any, dtype: str = "bfloat16") -> Any:
        """Shared rows, as many as an array has, and of its library. dtype: NumPy's name of any that x may have

        array: or (x, scales) as dispatch takes them: then a pair like both, with scales by row

        Raises: ValueError if there are not so many, or x and its scales take more room than bf16 values
        """
        lease = Lease("shared rows", self.memory.symmetric.writes)
        self._leases.add(lease)
        if not isinstance(array, tuple):
            return self._lend(lease, array, dtype, 0, self.hidden)
        x, scales = map(self.memory.runtime.view, array)
        num_scales, begin = scales.shape[1], align_up(self.num_rows * self.hidden * x.itemsize, VEC_BYTES)
        room = (self.places.topk_weights - begin) // (SCALE_BYTES * self.num_rows)
        if num_scales > room:
            refuse(
                "array",
                f"{num_scales} scales a row of {x.dtype_name}",
                f"at most {max(room, 0)}, where bf16 values would end",
            )
        of_x = self._lend(lease, array[0], x.dtype_name, 0, self.hidden)
        return of_x, self._lend(lease, array[1], scales.dtype_name, begin, num_scales)

    def _lend(self, lease: Lease, array: Array, dtype: str, begin: int, num_columns: int) -> Array:
        num_rows, runtime = array.shape[0], self.memory.runtime
        if num_rows > self.num_rows:
            refuse("array", f"{num_rows} rows", f"at most {self.num_rows}, as make_rows was told")
        made = self.memory.symmetric.array(runtime.dtype_like(dtype, array), begin, num_rows * num_columns)
        made = runtime.lend(made.reshape(num_rows, num_columns), lease)
        if num_rows == 0:
            self._empty = (*self._empty[-1:], made)
        return made

    def offset_of(self, array: Array) -> int:
        """How far behind the first row an array begins, in bytes; -1 if it lies elsewhere."""
        if any(array is each for each in self._empty):
            return 0
        return self._x.offset_of(array)

    def take(self, x: Any, end: Event | None) -> None:
        """A call takes an array that lies here, and its scales, until that event."""
        for each in x if isinstance(x, tuple) else (x,):
            if isinstance(each, LentArray) and each._lease is not None:
                each._lease.begins_with = end

    def close(self, by: str) -> None:
        """Give the memory back. Collective."""
        for lease in self._leases:
            lease.end(by)
        self.memory.close()


def make_rows(group: Any, num_rows: Any, hidden: Any, timeout_ms: float) -> SharedRows:
    """See ElasticBuffer.make_rows."""
    num_rows, hidden = integer("num_rows", num_rows, 1), integer("hidden", hidden, 1)
    if hidden * BF16_BYTES % VEC_BYTES != 0:
        refuse("hidden", hidden, "a multiple of 8")
    places = LayPlaces(0, align_up(num_rows * hidden * BF16_BYTES, ALIGNMENT_BYTES))
    num_bytes = places.topk_weights + align_up(4 * MAX_TOPK * num_rows, ALIGNMENT_BYTES)
    cells = {"x of shared rows": 0, "topk_weights of shared rows": places.topk_weights}
    memory = SharedMemory.create(group, num_bytes, timeout_ms=timeout_ms, cells=cells)
    return SharedRows(memory, num_rows, hidden, places)


# The memory of a buffer


BUFFER_ALIGNMENT = 2 << 20
COLUMNS_OF_LEAST_SCALE = 32
NO_NODES = ElasticNodes(0, 1, 0, 0, 0, 0, 0, 0)


class Group(NamedTuple):
    """How many ranks there are, how many of a node, and how many of those share what comes from another node."""

    num_ranks: int
    num_nvl_ranks: int
    num_sharing: int = 1

    @property
    def num_outboxes(self) -> int:
        return self.num_ranks - self.num_nvl_ranks

    @property
    def num_inboxes(self) -> int:
        return self.num_outboxes // self.num_sharing


class Areas(NamedTuple):
    """Bytes of each part of a buffer of num_bytes; see layout.elastic.

    half: one of two; begin: of the halves, from DATA on; slots: of the own area, kept: of an outbox; marks: of all
    """

    num_bytes: int
    half: int
    begin: int
    slots: int
    kept: int
    marks: int = 0

    @property
    def own(self) -> int:
        return DATA + max(self.slots, self.begin + 2 * self.half)

    @property
    def outbox(self) -> int:
        return DATA + self.kept

    def boxes(self, group: Group) -> int:
        """Bytes of the outboxes and inboxes."""
        return group.num_outboxes * self.outbox + group.num_inboxes * 2 * self.half

    def total(self, group: Group) -> int:
        """Bytes of the memory that a rank shares."""
        trailer = trailer_bytes(group.num_ranks) if group.num_outboxes else 0
        return self.own + self.boxes(group) + self.marks + trailer


class ElasticMemory:
    """A rank's buffer. nodes: where its outboxes and inboxes are; peers: where it pushes to, sources: fetches from.

    num_scaleup_ranks: of a node in hybrid mode, else of the group
    """

    nodes = NO_NODES
    rdma: RdmaMemory | None = None
    rows: SharedRows | None = None  # that combine fetches from, see ElasticBuffer.make_rows

    def __init__(self, symmetric: SymmetricMemory, areas: Areas, peers: Peers):
        self.areas = areas
        self.num_scaleup_ranks = peers.num_ranks
        self.peers = self.sources = peers
        self.symmetric = symmetric
        self.dispatched: tuple[ElasticPlaces, ElasticShape] | None = None  # of the latest dispatch
        self.combined: ElasticSlots | None = None  # of the latest combine, if that came later
        symmetric.write(0, np.zeros(DATA // 4, np.int32))

    @classmethod
    def between_nodes(cls, rdma: RdmaMemory, areas: Areas, group: Group) -> ElasticMemory:
        """That of a buffer whose ranks are of several nodes: in the memory that the network reaches."""
        network, num_ranks = rdma.network, group.num_ranks
        inboxes = areas.own + group.num_outboxes * areas.outbox - DATA - areas.begin
        marks = areas.own + areas.boxes(group)
        cells = marks + areas.marks
        nodes = ElasticNodes(*group[1:], areas.own, areas.outbox, inboxes, 2 * areas.half, cells, marks)
        targets = rdma.pointers()
        sources = targets.copy()
        for peer in range(num_ranks):
            if not is_in_node(nodes, network.rank, peer):
                relay = relay_of(nodes, peer, network.rank)
                targets[peer] = network.own_buffer + outbox_offset(nodes, network.rank, peer)
                sources[peer] = targets[relay] + inbox_offset(nodes, relay, peer)
        rdma.symmetric.write(marks, np.zeros((areas.marks + cells_bytes(num_ranks, num_ranks)) // 4, np.int32))
        tables = []
        for number, pointers in enumerate((targets, sources)):
            table = cells + cells_bytes(num_ranks, num_ranks) + 8 * MAX_RANKS * number
            rdma.symmetric.write(table, pointers)
            tables.append(Peers(*(network.own_buffer + table,) * 2, network.rank, num_ranks))
        made = cls(rdma.symmetric, areas, tables[0])
        made.sources, made.nodes, made.rdma, rdma.names = tables[1], nodes, rdma, made.describe
        return made

    @property
    def node(self) -> tuple[int, int]:
        """The ranks of this one's node: the first, and the one behind the last."""
        size = self.nodes.num_nvl_ranks or self.peers.num_ranks
        first = self.peers.rank // size * size
        return first, first + size

    def place(self, shape: ElasticShape) -> ElasticPlaces:
        """Where a dispatch lays out its tokens.

        Raises: ValueError if there is no room for them
        """
        self._check(num_dispatch_bytes(shape, self.peers.num_ranks), 2 * self.areas.half, shape)
        return place_arrays(self.areas.begin, self.areas.half, shape, self.peers.num_ranks)

    def slots(self, num_max_tokens: int, hidden_bytes: int, num_topk: int, one_each: bool) -> ElasticSlots:
        """Where the rows of a combine go.

        Raises: ValueError if there is no room for them
        """
        areas = self.areas
        slots = make_slots(num_max_tokens, hidden_bytes, num_topk, self.peers.num_ranks, one_each)
        self._check(num_combine_bytes(slots), areas.slots, slots)
        if self.rdma is not None:
            self._check(num_kept_bytes(slots, one_each), areas.kept, slots)
            if areas.marks > 0:
                self._check(num_mark_bytes(num_max_tokens, self.peers.num_ranks), areas.marks, slots)
        return slots

    def _check(self, needed: int, available: int, shape: ElasticShape | ElasticSlots) -> None:
        if needed > available:
            tokens, row = shape.num_max_tokens, shape.hidden_bytes
            allowed = f"at least {needed} for num_max_tokens_per_rank={tokens} and rows of {row} bytes"
            got = f"{self.areas.num_bytes} at construction"
            if self.rdma is not None:  # whose parts were divided up there
                got, allowed = f"{got}, of which {available} are for this", f"such that it is {allowed}"
            refuse("num_bytes", got, f"{allowed}; see get_buffer_size_hint")

    def describe(self, offset: int) -> str:
        """Name the cell at an offset of the symmetric memory."""
        if self.rdma is not None:
            return describe_nodes(self.dispatched, self.combined, self.nodes, self.peers.num_ranks, offset)
        return describe_elastic(self.dispatched, self.combined, offset)


def size_of(group: Any) -> int:
    """Ranks of a communicator of mpi4py, of nbep.spawn, or of a process group of torch."""
    size = group.size
    return size() if callable(size) else size


def size_hint(
    group: Group,
    num_max_tokens_per_rank: Any,
    hidden: Any,
    num_topk: Any,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> Areas:
    """See ElasticBuffer.get_buffer_size_hint."""
    num_ranks = group.num_ranks
    tokens = integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1)
    hidden = integer("hidden", hidden, 1)
    num_topk = integer("num_topk", num_topk, 0) or MAX_TOPK
    if num_topk > MAX_TOPK:
        refuse("num_topk", num_topk, f"at most {MAX_TOPK}")
    num_scales = -(-hidden // COLUMNS_OF_LEAST_SCALE) if use_fp8_dispatch else 0
    shape = ElasticShape(tokens, hidden if use_fp8_dispatch else 2 * hidden, num_topk, num_scales)
    dispatch_bytes = num_dispatch_bytes(shape, num_ranks)
    # With fewer choices than ranks a place is a choice's: never more of them than ranks.
    one_each = not allow_multiple_reduction
    slots = make_slots(tokens, 2 * hidden, num_topk, num_ranks, one_each)
    combine_bytes = num_combine_bytes(slots)
    if group.num_outboxes == 0:
        return in_node(align_up(max(dispatch_bytes, combine_bytes), BUFFER_ALIGNMENT))
    marks = num_mark_bytes(tokens, num_ranks) if group.num_sharing > 1 and not one_each else 0
    areas = Areas(0, dispatch_bytes // 2, combine_bytes, combine_bytes, num_kept_bytes(slots, one_each), marks)
    used = combine_bytes + (1 + group.num_inboxes) * dispatch_bytes + group.num_outboxes * areas.kept + marks
    return areas._replace(num_bytes=align_up(used, BUFFER_ALIGNMENT))


def in_node(num_bytes: int) -> Areas:
    """Inside a node the slots take the bytes of the halves."""
    return Areas(num_bytes, half_bytes(num_bytes), 0, num_bytes, 0)


def divide(num_bytes: int, hint: Areas) -> Areas:
    """The areas of a buffer of num_bytes: as those of a hint, in proportion."""
    if hint.begin == 0:
        return in_node(num_bytes)
    half, slots, kept, marks = (
        size * num_bytes // hint.num_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        for size in (hint.half, hint.slots, hint.kept, hint.marks)
    )
    return Areas(num_bytes, half, slots, slots, kept, marks)
