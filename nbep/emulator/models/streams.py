"""What a kernel knows when it starts, for `checked`: of launches before it in its stream, by events, and from the host.

    what stands in a stream is over     before what follows there starts
    an event is recorded                before the streams that wait for it go on, and before a host that has waited
    a host queues something             before that starts: it knows what its host had waited for or polled by then
    a thread leaves its kernel          before that is over: what comes next knows what the thread has acquired

A kernel knows of nothing else, whatever has happened before it starts. Of other ranks it knows what its host, or a
kernel before it, has acquired. Each rank has a host of its own: see `host`.

The end of a kernel is no fence. What its threads have read with relaxed loads they have observed, and the next kernel
knows of those stores; but not of what came before these, for which it takes an acquire or a fence in the kernel.

Source: PTX ISA, Memory Consistency Model, Memory synchronization, "API synchronization": these pairs synchronize, and
so are of base causality order; Release and Acquire Patterns: a strong read acquires by an instruction behind it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..machine.stream import Order
from ..machine.world import World
from .knowledge import (
    NOTHING,
    Knowledge,
    Place,
    join_two,
    later,
    stream_clock,
    with_signals,
    without_parts,
)

if TYPE_CHECKING:
    from ..machine.stream import Launch, Mark, Stream


class CheckedOrder(Order):
    """The order of launches, as `checked` sees it.

    points: of each stream, what comes before whatever stands there next
    numbered: the clock of each stream
    waits: the last event of another stream that a stream has waited for, by their clocks
    """

    def __init__(self, world: World):
        self.world = world
        self.points: dict[Stream, Knowledge] = {}
        self.numbered: dict[Stream, int] = {}
        self.waits: dict[tuple[int, int], Mark] = {}

    def queued(self, stream: Stream) -> Knowledge:
        return with_signals(self.world.cpu.knowledge, {self.world.cpu.owner.clock: self.world.signals})

    def point(self, stream: Stream, queued: Knowledge) -> Knowledge:
        """What comes before something that was queued, when the stream comes to it."""
        self.points[stream] = join_two(self.points.get(stream, NOTHING), queued)
        return self.points[stream]

    def start(self, launch: Launch, queued: Knowledge) -> None:
        stream = launch.stream
        point = self.point(stream, queued)
        stores, loads = without_parts(point.stores), without_parts(later(point.loads, point.stores))
        launch.known = Knowledge(stores, stores, loads, stores, loads)  # the start of a kernel is a proxy fence as well
        launch.learned = launch.known
        launch.place = Place(stream.name, self.clock_of(stream), launch.title, launch.queued_as, launch.known)

    def clock_of(self, stream: Stream) -> int:
        return self.numbered.setdefault(stream, stream_clock(len(self.numbered) + 1))

    def end(self, launch: Launch) -> None:
        place = launch.place
        place.end = self.world.signals
        self.points[launch.stream] = with_signals(
            Knowledge(launch.learned.stores, {}, launch.learned.loads, {}, {}), {place.clock: place.end}
        )

    def record(self, mark: Mark, queued: Knowledge) -> None:
        mark.point = self.point(mark.stream, queued)

    def wait(self, stream: Stream, mark: Mark, queued: Knowledge) -> None:
        self.points[stream] = join_two(self.point(stream, queued), mark.point)
        self.waits[self.clock_of(stream), self.clock_of(mark.stream)] = mark

    def seen(self, mark: Mark) -> None:
        self.world.cpu.wait(mark.point)

    def run_over(self) -> None:
        self.world.cpu.run_over()
