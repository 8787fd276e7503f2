"""What traces know of nbep's kernels, and pictures of their rings, halves and hops: methods of `nbep.trace.Trace`.

    trace = Trace()
    nbep.spawn(main, 2, tracer=trace)
    trace.plot_rings()                 # nbep.views.plot_rings(trace)

Read in this order: intranode, low_latency, internode; ring_fills; pictures; token_path, story.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nbep.trace.recorder import Recorder
from nbep.trace.view import Counter, LaunchView, View
from nbep.views.internode import InternodeLaunch
from nbep.views.intranode import PAYLOAD, TOKENS, RingLaunch, parse
from nbep.views.low_latency import WORKSPACE, Halves

if TYPE_CHECKING:
    from nbep.trace.page.slots import Slots
    from nbep.trace.stories import Story
    from nbep.trace.style import Picture
    from nbep.trace.table import Text
    from nbep.views.ring_fills import RingFill


def rings(trace: Recorder, kernel: str | None = None) -> list[RingFill]:
    """The fill of every ring during every launch that has rings, or during those of one kernel."""
    from nbep.views.ring_fills import ring_fills

    return ring_fills(trace, kernel)


def ring_table(trace: Recorder, kernel: str | None = None, *, width: int = 40) -> Text:
    """Rings as text, a line each: publishes, peak, and the fill over the launch in `width` characters."""
    from nbep.views.ring_fills import ring_table as table

    return table(trace, kernel, width)


def plot_rings(trace: Recorder, kernel: str | None = None, *, ranks: Collection[int] | None = None) -> Picture:
    """How full every ring is over time: a panel for each receiving rank, a row for each (channel, source).

    Args:   ranks: panels for these alone
    Raises: ValueError if no kernel with rings ran
    """
    from nbep.views.pictures import ring_picture

    return ring_picture(trace, kernel, ranks)


def plot_channel(
    trace: Recorder, src: int = 0, dst: int = 1, channel: int = 0, kernel: str = "dispatch", *, call: int = 0
) -> Picture:
    """The two ends of one ring: tails and heads from store to sight, waits, and the fill.

    Args:   kernel: "dispatch" or "combine"; call: which one, if there were several
    Raises: ValueError if the trace has no such ring
    """
    from nbep.views.pictures import channel_picture

    return channel_picture(trace, src, dst, channel, kernel, call)


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
    from nbep.views.pictures import call_picture

    return call_picture(trace, kernel, call, ranks, follow)


def plot_halves(trace: Recorder) -> Picture:
    """Low-latency calls over time: which half each takes, when it sends and receives, and what else the rank does.

    Raises: ValueError if the trace has no low-latency call
    """
    from nbep.views.pictures import halves_picture

    return halves_picture(trace)


def journey(trace: Recorder, rank: int = 0, token: int = 0, *, call: int = 0) -> Text:
    """The way of one token between nodes, a line for each slot and row that it fills: dispatch, then combine.

    Args:   call: which dispatch, and which combine
    Raises: ValueError if the trace has no such dispatch, or the token goes nowhere
    """
    from nbep.trace.table import event_table
    from nbep.views.token_path import journey as fills

    return event_table(fills(trace, rank, token, call), None)


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
    from nbep.views.pictures import hops_picture

    return hops_picture(trace, src, dst, channel, kernel, call, token)


def _begin() -> Callable[[Any], LaunchView | None]:
    halves = Halves()
    return lambda launch: halves.begin(launch) or InternodeLaunch.of(launch) or RingLaunch.of(launch)


def _slots(trace: Recorder) -> Iterable[Slots]:
    from nbep.views.ring_fills import slots_of

    return slots_of(trace)


def _stories(trace: Recorder) -> Iterable[Story]:
    from nbep.views.story import all_stories

    return all_stories(trace)


def _counters(trace: Recorder) -> Iterable[Counter]:
    for ring in rings(trace):
        yield Counter(ring.rank, ring.title, "slots in use", ring.steps, ring.fill)


PICTURES = rings, ring_table, plot_rings, plot_channel, plot_call, plot_halves, journey, plot_hops
VIEW = View(
    _begin,
    parse,
    (WORKSPACE, "internode workspace", "claim and layout workspace"),
    PAYLOAD,
    TOKENS,
    _slots,
    _stories,
    _counters,
    {picture.__name__: picture for picture in PICTURES},
)
