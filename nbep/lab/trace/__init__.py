"""Watch a run on the emulator: who published what, who waited for it, how full the rings were.

    from nbep.lab.trace import Trace

    trace = Trace()
    nbep.spawn(main, 2, tracer=trace, seed=7)
    trace.plot_rings()
    trace.plot_channel(src=0, dst=1)
    trace.table("store", cell="tail")
    trace.table("fill", cell="recv_x")    # which role filled which row, and when
    trace.stuck()                         # who waits for what, after a deadlock
    trace.plot_halves()
    trace.journey(rank=0, token=2)                 # between nodes: the slots and rows that it fills
    trace.queue(rank=0, peer=1)           # the entries of a send queue, with transport="ibgda"
    trace.page()                          # in a notebook: all of it, with a slider over the steps
    trace.to_html("trace.html")           # the same in a file
    trace.to_perfetto("trace.json")       # for ui.perfetto.dev

What knows nbep's kernels is a view, nbep.specimens.views: what roles threads have, what tokens are, and the pictures
of rings and halves, which are methods of a Trace, too.

Read in this order: events, view, recorder; then table, space_time; page, perfetto.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbep.lab.trace.events import Cell, Event, Launch
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.table import Text, align, entry_lives, event_table, stuck_table
from nbep.lab.trace.view import views
from nbep.registry import object_at

if TYPE_CHECKING:
    from os import PathLike

    from nbep.lab.trace.page import Page
    from nbep.lab.trace.style import Picture

__all__ = ["Cell", "Event", "Launch", "Text", "Trace"]

SHOWN = ("store", "atomic", "fill", "wait")


class Trace(Recorder):
    """A tracer for nbep.spawn, and what can be made of what it saw. One trace records one run, also one that fails.

    Pictures are matplotlib figures: notebooks show them, `savefig` saves them. Time runs in steps: primitive calls of
    all threads of all ranks since the run began.
    """

    def __repr__(self) -> str:
        kernels = [launch.kernel for launch in self.launches]
        counts = ", ".join(f"{kernels.count(kernel)} {kernel}" for kernel in dict.fromkeys(kernels))
        return f"<Trace of {self.num_ranks} ranks, {self.last_step} steps, launches: {counts or 'none'}>"

    def __getattr__(self, name: str) -> Any:
        """A picture or a table that a view adds, as `plot_rings`."""
        for view in views():
            if name in view.pictures:
                return partial(object_at(view.pictures[name]), self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for view in views() for name in view.pictures)]

    def page(self) -> Page:
        """The run as a page with a slider over its steps: who does what, who waits, what is in the rings.

        A notebook shows it; `to_html` writes it.
        """
        from nbep.lab.trace.page import Page

        return Page(self)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the page of the run into one file, which any browser opens without a network; its path."""
        return self.page().save(path)

    def to_perfetto(self, path: str | PathLike[str]) -> Path:
        """Write the run as a timeline for ui.perfetto.dev or chrome://tracing; its path."""
        from nbep.lab.trace.perfetto import timeline

        path = Path(path)
        path.write_text(json.dumps(timeline(self), separators=(",", ":")), encoding="utf-8")
        return path

    def table(
        self,
        what: str | Iterable[str] | None = None,
        *,
        cell: str | None = None,
        rank: int | None = None,
        kernel: str | None = None,
        limit: int | None = 60,
    ) -> Text:
        """Events as text, a line each. It takes what `events` takes.

        Without `what` and `cell`, what polls see and what happens in shared memory is left out.

        Args:
            limit: lines at most, None for all
        """
        events = self.events(SHOWN if what is None and cell is None else what, cell=cell, rank=rank, kernel=kernel)
        if what is None and cell is None:
            events = [event for event in events if event.cell.name not in ("shared", "mbarrier")]
        return event_table(events, limit)

    def stuck(self, kernel: str | None = None, *, rank: int | None = None) -> Text:
        """After a run that could not go on: who waits for which named cell, a line for each role of each rank."""
        return stuck_table(self.events("wait", rank=rank, kernel=kernel))

    def plot_cells(self, cell: str, kernel: str | None = None, *, ranks: Collection[int] | None = None) -> Picture:
        """Who writes the cells whose names begin with `cell`, who sees it and who waits for it: a lane for each rank.

        Args:
            ranks: what these do alone, where there are many

        Raises:
            ValueError: if nothing happened at such a cell
        """
        from nbep.lab.trace.space_time import cell_picture

        return cell_picture(self, cell, kernel, ranks)

    def queue(self, rank: int = 0, peer: int = 1, queue: int = 0) -> Text:
        """The entries of a rank's send queue to a peer, a line each: when it was reserved, ready, rung for and done.

        Raises:
            ValueError: if the trace has no entries of that queue
        """
        rows: list[tuple[object, ...]] = [("entry", "reserved", "ready", "rung", "done")]
        for life in entry_lives(self, rank, peer, queue):
            *steps, done = ("-" if step is None else step for step in life[1:5])
            rows.append((life.number, *steps, f"{done}, refused" if life.is_refused else done))
        return align(rows, ">>>><")
