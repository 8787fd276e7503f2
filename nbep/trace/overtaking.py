"""Two lanes of time: what rank 0 stores, and what rank 1 has loaded when. Drawn for a store that a later one overtakes.

overtaking = Overtaking({"data": 0, "flag": 128})
nbep.spawn(main, 2, memory_model="delayed", tracer=overtaking)
overtaking.plot("data", "flag")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nbep.trace.style import FAINT, HEAD_COLOR, INK, SMALL, TAIL_COLOR, TINY, WAIT_COLOR, Picture, plain_axes


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
