"""What traces know of nbep's kernels, and pictures of their rings, halves and hops: methods of `nbep.trace.Trace`.

    trace = Trace()
    nbep.spawn(main, 2, tracer=trace)
    trace.plot_rings()                 # nbep.views.pictures.plot_rings(trace)

Read in this order: intranode, low_latency, internode; ring_fills; pictures; token_path, story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nbep.trace.recorder import Recorder
from nbep.trace.view import Counter, LaunchView, View
from nbep.views.internode import InternodeLaunch
from nbep.views.intranode import PAYLOAD, TOKENS, RingLaunch, parse
from nbep.views.low_latency import WORKSPACE, Halves
from nbep.views.ring_fills import ring_fills, slots_of
from nbep.views.story import all_stories


def _begin() -> Callable[[Any], LaunchView | None]:
    halves = Halves()
    return lambda launch: halves.begin(launch) or InternodeLaunch.of(launch) or RingLaunch.of(launch)


def _counters(trace: Recorder) -> Iterator[Counter]:
    for ring in ring_fills(trace):
        yield Counter(ring.rank, ring.title, "slots in use", ring.steps, ring.fill)


PICTURES = "plot_rings", "plot_channel", "plot_call", "plot_halves", "plot_hops"
VIEW = View(
    _begin,
    parse,
    (WORKSPACE, "internode workspace", "claim and layout workspace"),
    PAYLOAD,
    TOKENS,
    slots_of,
    all_stories,
    _counters,
    {
        "rings": "nbep.views.ring_fills:ring_fills",
        "ring_table": "nbep.views.ring_fills:ring_table",
        "journey": "nbep.views.token_path:journey_table",
        **{name: f"nbep.views.pictures:{name}" for name in PICTURES},
    },
)
