"""Which launches are before which, for `checked`: by their stream, by events, and by what the host has waited for.

A kernel that starts knows of the launches before it, and of those that any host has waited for. Of others it knows what
it has been told: by a value that a kernel before it, or a host, has acquired. What other ranks have signalled before it
starts it may meet; but it does not tell it on to them as if they had heard it from their own launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..machine.block import WARP_SIZE
from ..machine.order import Order
from ..machine.world import World
from .knowledge import ALL_CLOCKS, CPU_CLOCK, HAS_UNKNOWN, MAX_WARPS, Knowledge, Numbers, Owner, later

if TYPE_CHECKING:
    from ..machine.block import Block
    from ..machine.stream import Launch, Mark, Stream


class Point(NamedTuple):
    """A point of a stream, or of the host of a rank.

    before: stream -> how many of its launches are before this point
    known: what is known there
    signals: of the host's, how many were given so far, when it queued something
    """

    before: dict[Stream, int]
    known: Numbers
    signals: int = 0


@dataclass(eq=False)
class Place:
    """A launch among those of its rank. It stays when the launch is gone. number: in its stream, from 1"""

    stream: Stream
    title: str
    number: int
    before: dict[Stream, int]
    num_warps: int
    queued_as: int  # by the host, among all launches
    has_others: bool  # whether its rank used several streams when it started: other ranks' kernels must be told of it
    serials: list[int] = field(default_factory=list)  # of its blocks

    def clocks(self) -> Iterator[int]:
        """Of its warps and their copy engines."""
        for serial in self.serials:
            for clock in range(serial * MAX_WARPS, serial * MAX_WARPS + self.num_warps):
                yield clock
                yield -clock

    def is_before(self, other: Place) -> bool:
        return self.stream is other.stream or self.number <= other.before.get(self.stream, 0)


class Waited(NamedTuple):
    """A stream has waited for a mark of another one."""

    stream: Stream
    mark: Mark
    number: int  # launches of the other stream before the mark


START = Point({}, {})


class CheckedOrder(Order):
    """The order of launches, as `checked` sees it."""

    def __init__(self, world: World):
        self.world = world
        self.points: dict[Stream, Point] = {}
        self.hosts: dict[int, Point] = {}
        self.places: dict[int, dict[tuple[str, int], Place]] = {}  # of launches that the host may not have waited for
        self.waits: dict[tuple[Stream, Stream], Waited] = {}  # the last one of a stream for another
        self.counts: dict[Stream, int] = {}
        self.used: dict[int, set[Stream]] = {}
        self.any_has_streams = False

    def has_streams(self, rank: int) -> bool:
        """Whether a rank uses more than one stream: kernels of another one may store to what is input of this."""
        return len(self.used[rank]) > 1

    def queued(self, stream: Stream) -> Point:
        self.used.setdefault(stream.rank, set()).add(stream)
        return self.hosts.get(stream.rank, START)._replace(signals=self.world.signals)

    def start(self, launch: Launch, queued: Point) -> None:
        stream = launch.stream
        point = join(self.points.get(stream, START), queued)
        number = self.counts[stream] = self.counts.get(stream, 0) + 1
        numbers = self._numbers(stream, point)
        if self.world.cpu.last_store > queued.signals:  # stores after it was queued are not before it
            numbers.update({CPU_CLOCK: queued.signals, HAS_UNKNOWN: 1})
        launch.known = Knowledge(numbers, numbers, numbers, numbers)
        num_warps = -(-launch.block // WARP_SIZE)
        has_others = self.has_streams(launch.rank)
        self.any_has_streams |= has_others
        launch.place = Place(stream, launch.title, number, point.before, num_warps, launch.queued_as, has_others)
        self.places.setdefault(launch.rank, {})[launch.name, launch.number] = launch.place
        self.points[stream] = Point(point.before, numbers)

    def start_block(self, block: Block) -> None:
        block.launch.place.serials.append(block.serial)

    def matters(self, launch: Launch) -> bool:
        """Whether what a launch is told must be remembered: there may be launches of which others are not told."""
        if self.any_has_streams:
            return True
        return any(place.stream is not launch.stream for place in self.places[launch.rank].values())

    def end(self, launch: Launch) -> None:
        stream, point = launch.stream, self.points[launch.stream]
        before = {**point.before, stream: launch.place.number}
        self.points[stream] = Point(before, later(point.known, launch.learned))

    def record(self, mark: Mark, queued: Point) -> None:
        stream = mark.stream
        point = join(self.points.get(stream, START), queued)
        mark.point = self.points[stream] = Point(point.before, self._numbers(stream, point))

    def wait(self, stream: Stream, mark: Mark, queued: Point) -> None:
        self.points[stream] = join(join(self.points.get(stream, START), queued), mark.point)
        self.waits[stream, mark.stream] = Waited(stream, mark, mark.point.before.get(mark.stream, 0))

    def seen(self, mark: Mark) -> None:
        rank = mark.stream.rank
        host = self.hosts[rank] = join(self.hosts.get(rank, START), mark.point)
        places = self.places.get(rank, {})
        self.places[rank] = {
            key: place for key, place in places.items() if place.number > host.before.get(place.stream, 0)
        }
        self.world.cpu.wait(mark.point.known)

    def told(self, rank: int, known: Numbers) -> None:
        """The host of a rank has polled a value, and knows what was released with it."""
        host = self.hosts.get(rank, START)
        self.hosts[rank] = host._replace(known=later(host.known, known))

    def run_over(self) -> None:
        everything = {ALL_CLOCKS: self.world.signals}
        for rank in self.places:
            self.hosts[rank] = Point({s: n for s, n in self.counts.items() if s.rank == rank}, everything)
            self.places[rank] = {}

    def _numbers(self, stream: Stream, point: Point) -> Numbers:
        """What a point knows: all that was signalled so far, but of launches not before it only what it was told."""
        numbers = {ALL_CLOCKS: self.world.signals}
        for rank, places in self.places.items():
            # The host of another rank may have told this one's what it knows, in ways that nobody sees.
            known = point.known if rank == stream.rank else later(point.known, self.world.cpu.known)
            so_far = known.get(ALL_CLOCKS, 0)
            for place in places.values():
                is_told = place.stream is stream or (rank != stream.rank and not place.has_others)
                if not is_told and place.number > point.before.get(place.stream, 0):
                    numbers[HAS_UNKNOWN] = 1
                    numbers.update((clock, known.get(clock, so_far)) for clock in place.clocks())
        return numbers

    def place_of(self, owner: Owner) -> Place | None:
        return self.places.get(owner.rank, {}).get((owner.kernel, owner.launch))


def join(a: Point, b: Point) -> Point:
    if not b.before and not b.known:
        return a
    before = {stream: max(a.before.get(stream, 0), b.before.get(stream, 0)) for stream in {**a.before, **b.before}}
    return Point(before, later(a.known, b.known))
