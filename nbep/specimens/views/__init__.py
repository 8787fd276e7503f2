"""What traces know of nbep's kernels, and pictures of their rings and halves: methods of `nbep.lab.trace.Trace`.

    trace = Trace()
    nbep.spawn(main, 2, tracer=trace)
    trace.plot_rings()                 # nbep.specimens.views.pictures.plot_rings(trace)

Read in this order: rings, low_latency; ring_fills; pictures; token_path, story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.view import Counter, LaunchView, View
from nbep.specimens.views import ring_fills as fills
from nbep.specimens.views.low_latency import WORKSPACE, Halves
from nbep.specimens.views.rings import PAYLOAD, TOKENS, InternodeLaunch, RingLaunch, parse
from nbep.specimens.views.story import all_stories


def _begin() -> Callable[[Any], LaunchView | None]:
    halves = Halves()
    return lambda launch: halves.begin(launch) or InternodeLaunch.of(launch) or RingLaunch.of(launch)


def _counters(trace: Recorder) -> Iterator[Counter]:
    for ring in fills.ring_fills(trace):
        yield Counter(ring.rank, ring.title, "slots in use", ring.steps, ring.fill)


PICTURES = "plot_rings", "plot_channel", "plot_halves"
VIEW = View(
    _begin,
    parse,
    (WORKSPACE, "internode workspace", "claim and layout workspace"),
    PAYLOAD,
    TOKENS,
    lambda trace: [*fills.slots_of_rings(trace), *fills.slots_of_halves(trace)],
    all_stories,
    _counters,
    {
        "rings": "nbep.specimens.views.ring_fills:ring_fills",
        "journey": "nbep.specimens.views.token_path:journey_table",
        **{name: f"nbep.specimens.views.pictures:{name}" for name in PICTURES},
    },
)
