"""Pictures that these notebooks alone show: of a store that overtakes another, of what blocks touch, of a ring's slots,
of low-latency calls and of hops between nodes.

overtaking = Overtaking({"data": 0, "flag": 128})
nbep.spawn(main, 2, memory_model="delayed", tracer=overtaking)
overtaking.plot("data", "flag")                            what rank 0 stores, and what rank 1 has loaded when

touches = Touches(reads=["topk_idx"], writes=["totals"])
nbep.spawn(main, 2, tracer=touches)
block_picture(touches, {"topk_idx": [0], "totals": [3]})   blocks and warps, with some elements in colour

counted_picture(trace, [CountedRing("ring", (1, "tail"), (0, "head"))], 2, ["first", "second"])

plot_call(trace, "low_latency_dispatch")                   what the roles of a low-latency call put and tell
plot_hops(trace, src=0, dst=3, token=(0, 2))               between nodes: the roles on the way, and both rings
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nbep.lab.trace.events import Event, Launch
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.space_time import BY_RANK, WAITS, LaneOf, Lanes, Touches, draw_lanes, show_steps, title
from nbep.lab.trace.style import (
    FAINT,
    HEAD_COLOR,
    INK,
    RANK_COLORS,
    SHADE,
    SMALL,
    TAIL_COLOR,
    TINY,
    WAIT_COLOR,
    Picture,
    count_steps,
    plain_axes,
)
from nbep.specimens.views.pictures import draw_fill
from nbep.specimens.views.ring_fills import RingFill, notes_of, ring_fills
from nbep.specimens.views.rings import COMBINE, DISPATCH, OUTPUTS
from nbep.specimens.views.token_path import journey


class Access(NamedTuple):
    """A store of rank 0 or a load of rank 1.

    step       accesses of all threads before it
    in_memory  what the memory of the cell's owner holds then; the value of a store that waits is not there yet
    """

    step: int
    is_store: bool
    cell: str
    value: Any
    in_memory: Any


class Overtaking:
    """A tracer that keeps the stores of rank 0 to some cells of the ranks' buffers, and the loads of rank 1.

    Args: cells  names of cells, by their first byte
    """

    def __init__(self, cells: Mapping[str, int]):
        self.names = {offset: name for name, offset in cells.items()}
        self.accesses: list[Access] = []
        self.num_steps = 0

    def on_store(self, thread: Any, allocation: Any, offset: int, kind: str, value: Any, *_: Any) -> None:
        self._keep(thread.rank == 0, True, allocation, offset, kind, value)

    def on_load(self, thread: Any, allocation: Any, offset: int, kind: str, value: Any, *_: Any) -> None:
        self._keep(thread.rank == 1, False, allocation, offset, kind, value)

    def _keep(self, is_kept: bool, is_store: bool, allocation: Any, offset: int, kind: str, value: Any) -> None:
        self.num_steps += 1
        if is_kept and allocation.name == "nvl_buffer" and offset in self.names:
            there = allocation.read(offset, kind)
            self.accesses.append(Access(self.num_steps, is_store, self.names[offset], value, there))

    def find(self, cell: str, is_store: bool, value: Any = None) -> Access:
        """The first store to a cell, or load of it, with that value.

        Raises: LookupError if there is none
        """
        for access in self.accesses:
            if (access.cell, access.is_store) == (cell, is_store) and value in (None, access.value):
                return access
        raise LookupError(f"no {'store to' if is_store else 'load of'} {cell}")

    def is_overtaken(self, data: str) -> bool:
        """Whether rank 1 loaded the data before it was in memory."""
        stored = self.find(data, True).value
        return self.find(data, False).in_memory != stored

    def plot(self, data: str, flag: str) -> Picture:
        """The flag's way to rank 1, and the data that it overtakes, if rank 1 loads an old value."""
        stored, raised = self.find(data, True), self.find(flag, True)
        seen = self.find(flag, False, raised.value)
        loaded, is_late = self.find(data, False), self.is_overtaken(data)
        width = loaded.step - stored.step
        end = loaded.step + 0.45 * width
        picture = Picture(9.5, 2.9)
        axes = picture.subplots()
        plain_axes(axes)
        for lane in (0, 1):
            axes.axhline(lane, color=FAINT, linewidth=0.8, zorder=0)
        if is_late:
            axes.plot(
                [stored.step, end - 0.12 * width], [1.3, 1.3], color=WAIT_COLOR, linewidth=9, solid_capstyle="butt"
            )
            text = f"{data} = {stored.value} waits in a buffer: rank 1 cannot see it yet"
            axes.text(stored.step + 0.02 * width, 1.3, text, fontsize=TINY, color=INK, va="center")
        self._arrow(axes, (stored.step, 1), (end - 0.12 * width if is_late else raised.step, 0), HEAD_COLOR)
        self._arrow(axes, (raised.step, 1), (seen.step, 0), TAIL_COLOR)
        for access, lane, color, text in (
            (stored, 1, HEAD_COLOR, f"stores {data} = {stored.value}"),
            (raised, 1, TAIL_COLOR, f"stores {flag} = {raised.value}"),
            (seen, 0, TAIL_COLOR, f"loads {flag}: {seen.value}"),
            (loaded, 0, HEAD_COLOR, f"loads {data}: {loaded.value}"),
        ):
            axes.plot([access.step], [lane], "o", color=color, markersize=5)
            place = (0, 7 if lane else -7)
            va = "bottom" if lane else "top"
            axes.annotate(
                text, (access.step, lane), place, textcoords="offset points", fontsize=SMALL, color=color, va=va
            )
        axes.set_yticks([0, 1], ["rank 1", "rank 0"])
        axes.set_ylim(-0.45, 1.6)
        axes.set_xlim(stored.step - 0.08 * width, end)
        axes.set_xlabel("time, in memory accesses of all threads", fontsize=SMALL, color=INK)
        what = f"The flag overtakes the data: rank 1 reads {loaded.value}" if is_late else "The data is there first"
        axes.set_title(what, loc="left", fontsize=SMALL + 2, color=INK)
        return picture

    @staticmethod
    def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], color: str) -> None:
        style = {"arrowstyle": "->", "color": color, "linewidth": 1.2, "linestyle": "-"}
        axes.annotate("", end, begin, arrowprops=style)


SHARED = "shared memory"
GAP = 0.03  # between frames, of the width


def block_picture(
    touches: Touches, follow: Mapping[str, Collection[int]], item_bytes: Mapping[str, int] | None = None
) -> Picture:
    """Blocks as frames with their warps and shared memory, what they read above and what they write below.

    follow: the elements of each array that have a colour, with their lines; item_bytes: of an element, if not 4
    """
    sizes, (grid, warps) = touches.sizes, touches.shape
    rows = touches.reads, touches.writes
    above, below = ([name for name in names if name in sizes and name != SHARED] for names in rows)
    width = (1 + GAP) / grid
    heights = {name: float(len(above) - at) for at, name in enumerate(above)}
    heights |= {name: -2.2 - at for at, name in enumerate(below)}
    picture = Picture(9.5, 0.8 + 0.62 * (len(heights) + 2))
    axes = picture.subplots()

    def place(name: str, byte: int, block: int) -> tuple[float, float]:
        size = (item_bytes or {}).get(name, 4)
        across = (byte // size + 0.5) / max(sizes[name] // size, 1)
        if name == SHARED:
            return block * width + (width - GAP) * (0.05 + 0.9 * across), -1.0
        return across, heights[name]

    def of_warp(block: int, warp: int) -> tuple[float, float]:
        return block * width + (width - GAP) * (warp + 0.5) / warps, 0.0

    for block in range(grid):
        corner = block * width, -1.4
        axes.add_patch(Rectangle(corner, width - GAP, 1.85, fill=False, edgecolor=INK, linewidth=0.9))
        axes.text(corner[0] + 0.005, 0.3, f"block {block}", fontsize=TINY, color=INK, va="center")
        for warp in range(warps):
            axes.scatter(*of_warp(block, warp), s=90, marker="s", color="white", edgecolor=INK, zorder=3)
    places: dict[tuple[float, float], bool] = {}
    for name in heights:
        size = (item_bytes or {}).get(name, 4)
        for element in range(sizes[name] // size):
            places[place(name, size * element, 0)] = element in follow.get(name, ())
    for name, byte, block, warp in touches.places:
        is_followed = byte // (item_bytes or {}).get(name, 4) in follow.get(name, ())
        ends = list(zip(place(name, byte, block), of_warp(block, warp), strict=True))
        color, line, depth = (TAIL_COLOR, 1.4, 2) if is_followed else (FAINT, 0.5, 1)
        axes.plot(*ends, color=color, linewidth=line, zorder=depth)
        places[place(name, byte, block)] = is_followed
    for (x, y), is_followed in places.items():
        axes.scatter(x, y, s=40, marker="s", color=TAIL_COLOR if is_followed else SHADE, edgecolor=INK, zorder=3)
    names = heights | {"warps": 0.0} | ({"their shared memory": -1.0} if SHARED in sizes else {})
    for name, y in names.items():
        axes.text(-0.015, y, name, ha="right", va="center", fontsize=SMALL, color=INK)
    axes.set_xlim(-0.16, 1.02)
    axes.axis("off")
    return picture


# --- Which item lies in which slot of a ring, from when to when: all of it from the ring's two counters ---------------
# tail  ----n+1-------------------      item n is there: its bar begins, in the row of slot n % num_slots
# head  -----------------n+1------      its slot is free: the bar ends


class CountedRing(NamedTuple):
    """A ring of one's own: a label, and each counter as the rank that it lies at and the name of its cell."""

    label: str
    tail: tuple[int, str]
    head: tuple[int, str]


def counted_picture(
    trace: Recorder, rings: Sequence[CountedRing], num_slots: int, items: Sequence[str], follow: int = -1
) -> Picture:
    """A row for each slot of each ring. items: their names; follow: the one that has a colour, -1: none

    Raises: ValueError if a ring has no tail that moves
    """
    rows = [(ring, slot) for ring in rings for slot in range(num_slots)]
    picture = Picture(9.0, 0.6 + 0.42 * len(rows))
    axes = picture.add_subplot()
    plain_axes(axes)
    for line, (ring, slot) in enumerate(rows):
        filled, freed = _moves(trace, ring.tail), _moves(trace, ring.head)
        if not filled:
            raise ValueError(f"{ring.label}: no thread has moved {ring.tail[1]} of rank {ring.tail[0]}")
        axes.barh(line, trace.last_step, height=0.7, color=SHADE)
        for n in range(slot, max(count for _, count in filled), num_slots):
            begin = _reached(filled, n + 1, trace.last_step)
            end = _reached(freed, n + 1, trace.last_step)
            color = RANK_COLORS[0] if n == follow else FAINT
            axes.barh(line, end - begin, left=begin, height=0.7, color=color, edgecolor="white")
            axes.text((begin + end) / 2, line, items[n], fontsize=TINY, color=INK, ha="center", va="center")
    axes.set_yticks(range(len(rows)), [f"{ring.label}, slot {slot}" for ring, slot in rows], fontsize=SMALL)
    axes.set_xlim(0, trace.last_step)
    axes.invert_yaxis()
    count_steps(axes)
    return picture


def _moves(trace: Recorder, counter: tuple[int, str]) -> list[tuple[int, int]]:
    """When a counter got a value, and which, in this order."""
    owner, name = counter
    return [(event.step, event.value) for event in trace.events(("store", "atomic")) if _is_cell(event, owner, name)]


def _is_cell(event: Event, owner: int, name: str) -> bool:
    return event.cell.owner == owner and event.cell.text == name


def _reached(moves: list[tuple[int, int]], count: int, never: int) -> int:
    return next((step for step, value in moves if value >= count), never)


CALL_ROLES = ("sender", "counter", "receiver")  # of the low-latency kernels, from top to bottom
CALL_CELLS = ("counts", "arrivals", "credits", "message", "row", *OUTPUTS)


def plot_call(
    trace: Recorder,
    kernel: str = "low_latency_dispatch",
    *,
    call: int = 0,
    ranks: Collection[int] | None = None,
    follow: Sequence[str] = (),
) -> Picture:
    """One low-latency call: what its roles put and tell each other, and where they wait. A lane for each role.

    Args:   ranks: what these do alone, where there are many
            follow: words that the names of cells must hold to keep their colour: ["local expert 0", "src 1"]
    Raises: ValueError if the trace has no such call
    """
    launches = [launch for launch in trace.launches if launch.phases and (launch.kernel, launch.call) == (kernel, call)]
    if not launches:
        raise ValueError(f"kernel, call: the trace has no {kernel} number {call} of the low-latency mode")
    events = [
        event
        for event in [*trace.events(), *trace.hangs()]
        if (event.kernel, event.call) == (kernel, call)
        and (event.cell.name in CALL_CELLS or event.what == "hang")
        and event.role in CALL_ROLES
        and (ranks is None or event.rank in ranks)
    ]
    there = {(event.rank, event.role) for event in events}
    lanes = [(rank, role) for rank in range(trace.num_ranks) for role in CALL_ROLES if (rank, role) in there]
    picture = Picture(9.5, 1.2 + 0.6 * len(lanes))
    axes = picture.subplots()
    end = max(trace.last_step if launch.end is None else launch.end for launch in launches)
    show_steps(axes, min(launch.begin for launch in launches), end)

    def is_labelled(event: Event) -> bool:
        return event.cell.name != "credits" and event.value < 0

    names = [f"{role}\nrank {rank}" for rank, role in lanes]
    by_rank = len({rank for rank, _ in lanes}) > 2

    def is_grey(event: Event) -> bool:
        return any(word not in event.cell.text for word in follow)

    drawn = Lanes(names, lambda event: lanes.index((event.rank, event.role)), is_labelled, by_rank, is_grey)
    draw_lanes(axes, drawn, events, end)
    count_steps(axes)
    text = (
        f" In colour: {' '.join(follow)}"
        if follow
        else BY_RANK
        if by_rank
        else " Labelled: what counts and arrivals tell"
    )
    title(axes, f"{kernel} {call}, half {launches[0].half}.{text}")
    return picture


# The picture of both hops between nodes: the roles on the way from one rank to another, on one timeline.
#
#  dispatch   RDMA sender --RDMA ring--> forwarder --NVL ring--> NVL receiver; two coordinators tell tails and heads on
#             RDMA sender --RDMA ring--> deliverer                             between ranks with the same local rank
#  combine    NVL sender --NVL ring--> forwarder --RDMA ring--> RDMA receiver; three coordinators
#             its own x --> forwarder --RDMA ring--> RDMA receiver             between ranks with the same local rank
#
# The forwarder is on the rank that has the local rank of the one end and the node of the other.


TOKEN_COLOR = RANK_COLORS[5]
LANE = 0.7  # inches
FILL = 0.75


class Lane(NamedTuple):
    """team: that of the role that is meant, -1 for all."""

    role: str
    rank: int
    team: int = -1


class Way(NamedTuple):
    """From rank src over rank via to rank dst: the lanes, and which cells of the two rings belong to it."""

    lanes: list[Lane]
    via: int
    slots: list[tuple[int, int, int]]  # owner, src and node of the cells of the rings
    heads: tuple[int, int]  # owner and node of the head of the RDMA ring
    columns: tuple[str, ...]  # how the names of the board's cells end
    rings: list[tuple[str, int, int, int]]  # level, owner, who fills it, and RingFill.node


def plot_hops(
    trace: Recorder,
    src: int = 0,
    dst: int = 3,
    channel: int = 0,
    kernel: str = "internode_dispatch",
    *,
    call: int = 0,
    token: tuple[int, int] | None = None,
) -> Picture:
    """Between nodes: the roles on the way from one rank to another on one timeline, and the fill of both rings.

    Args:   kernel: "internode_dispatch" or "internode_combine"; call: which one, if there were several
            token: its rank and its index there; a thick line follows it
    Raises: ValueError if the trace has no such way
    """
    launch = next((each for each in trace.launches if (each.kernel, each.call) == (kernel, call)), None)
    if launch is None or kernel not in (DISPATCH, COMBINE):
        raise ValueError(f"kernel, call: the trace has no {kernel} number {call} between nodes")
    way = _way(launch, src, dst)
    rings = [ring for key in way.rings for ring in ring_fills(trace, kernel) if _is(ring, key, channel, call)]
    if len(rings) != len(way.rings):
        raise ValueError(f"src, dst, channel: the trace has no rings from rank {src} to rank {dst}, channel {channel}")

    def lane_of(event: Event) -> int | None:
        if event.block // 2 != channel:
            return None
        for number, lane in enumerate(way.lanes):
            if (event.role, event.rank) == (lane.role, lane.rank) and lane.team in (-1, event.team):
                return number
        return None

    events = _events(trace, way, channel, kernel, call, lane_of)
    height = LANE * len(way.lanes) + 0.4
    picture = Picture(9.5, height + FILL * len(rings) + 1.2)
    axes, *below = picture.subplots(1 + len(rings), 1, sharex=True, height_ratios=[height] + [FILL] * len(rings))
    steps = [event.step for event in events] or [0, trace.last_step]
    is_stuck = any(event.what in WAITS and event.until is None for event in events)
    last = trace.last_step if is_stuck else max(steps)
    show_steps(axes, min(steps), last)
    names = [f"{lane.role}\nrank {lane.rank}" for lane in way.lanes]
    draw_lanes(axes, Lanes(names, lane_of, lambda event: event.cell.name in ("head", "tail")), events, last)
    if token is not None:
        _draw_token(axes, trace, token, kernel, call, lane_of, len(way.lanes))
    for panel, ring in zip(below, rings, strict=True):
        draw_fill(panel, ring)
        panel.set_ylabel(f"{ring.level} ring", fontsize=TINY)
    count_steps(below[-1])
    what = "" if token is None else f". Token {token[1]} of rank {token[0]} is the thick line"
    over = f" over rank {way.via}" if way.via not in (src, dst) else ""
    title(axes, f"{kernel}: from rank {src}{over} to rank {dst}, channel {channel}{what}")
    return picture


def _way(launch: Launch, src: int, dst: int) -> Way:
    num_nvl_ranks = notes_of(launch).num_nvl_ranks
    (src_node, src_local), (dst_node, dst_local) = divmod(src, num_nvl_ranks), divmod(dst, num_nvl_ranks)
    is_straight = src_local == dst_local  # then there is no second hop, or no first one
    if launch.kernel == DISPATCH:
        via = dst_node * num_nvl_ranks + src_local
        columns: tuple[str, ...] = (f"node {dst_node}", f"node {src_node}")
        if is_straight:
            lanes = [
                Lane("RDMA sender", src),
                Lane("sender coordinator", src),
                Lane("deliverer", dst),
                Lane("forwarder coordinator", dst),
            ]
            return Way(lanes, via, [(dst, -1, src_node)], (src, dst_node), columns, [("RDMA", dst, src, -1)])
        lanes = [
            Lane("RDMA sender", src),
            Lane("sender coordinator", src),
            Lane("forwarder", via, dst_local),
            Lane("forwarder coordinator", via),
            Lane("NVL receiver", dst, src_local),
        ]
        slots = [(via, -1, src_node), (dst, src_local, -1)]
        return Way(lanes, via, slots, (src, dst_node), columns, [("RDMA", via, src, -1), ("NVL", dst, via, -1)])
    via = src_node * num_nvl_ranks + dst_local
    lanes = [
        Lane("NVL sender", src),
        Lane("NVL coordinator", via),
        Lane("forwarder", via, dst_node),
        Lane("RDMA coordinator", via),
        Lane("RDMA receiver", dst),
        Lane("receiver coordinator", dst),
    ]
    slots = [(via, dst_node * num_nvl_ranks + src_local, -1), (dst, -1, src_node)]
    columns = f"local rank {src_local}", "sums", f"node {src_node}"
    if is_straight:
        return Way(lanes[2:], via, slots[1:], (via, dst_node), columns, [("RDMA", dst, via, -1)])
    return Way(lanes, via, slots, (via, dst_node), columns, [("NVL", via, src, dst_node), ("RDMA", dst, via, -1)])


def _is(ring: RingFill, key: tuple[str, int, int, int], channel: int, call: int) -> bool:
    return (ring.level, ring.rank, ring.src, ring.node) == key and (ring.channel, ring.call) == (channel, call)


def _events(trace: Recorder, way: Way, channel: int, kernel: str, call: int, lane_of: LaneOf) -> list[Event]:
    """What the lanes do to cells of the two rings, to the rows of the output and to the board."""
    hangs = [event for event in trace.hangs() if event.kernel == kernel]
    mine = [e for e in [*trace.events(kernel=kernel), *hangs] if e.call == call and lane_of(e) is not None]
    board = {e.cell for e in mine if e.what == "atomic" and e.cell.name == "board" and _is_of_way(e, way)}

    def belongs(event: Event) -> bool:
        cell = event.cell
        if cell.name == "board":
            return cell in board or (event.what in WAITS and event.until is None)
        if cell.row >= 0 or event.what == "hang":
            return True
        if cell.channel != channel:
            return False
        if cell.name == "head" and cell.node >= 0:
            return (cell.owner, cell.node) == way.heads
        return (cell.owner, cell.src, cell.node) in way.slots

    return [event for event in mine if belongs(event)]


def _is_of_way(event: Event, way: Way) -> bool:
    """Whether a cell of the board is about one of the way's rings: each role counts for one node, or local rank."""
    sides = {lane.rank: lane.role for lane in way.lanes}
    column = event.cell.text.rpartition(", ")[2].removesuffix("]")
    if len(way.columns) == 2:
        return column == way.columns[0 if event.role == "RDMA sender" else 1]
    return event.rank in sides and column in (way.columns[:2] if event.role == "forwarder" else way.columns[2:])


def _draw_token(
    axes: Axes, trace: Recorder, token: tuple[int, int], kernel: str, call: int, lane_of: LaneOf, num_lanes: int
) -> None:
    steps, heights = [], []
    for event in journey(trace, *token, call):
        lane = lane_of(event)
        if event.kernel == kernel and lane is not None:
            steps.append(event.step)
            heights.append(num_lanes - 1 - lane)
    axes.plot(steps, heights, color=TOKEN_COLOR, linewidth=2.2, alpha=0.75, marker="s", markersize=5, zorder=6)
