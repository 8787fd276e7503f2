"""Which threads read and write which elements: for kernels that work on arrays and send no signals.

touches = Touches(reads=["topk_idx"], writes=["totals"])
nbep.spawn(main, 2, tracer=touches)
touches.plot()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.lab.trace.style import FAINT, HEAD_COLOR, INK, SMALL, TAIL_COLOR, TINY, Picture

MOST_MARKS = 64  # of an array, and of threads: beyond, several share a place
THREADS = "threads"


class Touches:
    """A tracer that keeps what the threads of rank 0 touch, themselves or by bulk copies.

    Args: reads, writes  names of arrays, those of the launch's parameters; "shared memory" is that of a block
    """

    def __init__(self, reads: Sequence[str], writes: Sequence[str]):
        self.reads = reads
        self.writes = writes
        self.num_threads = 0  # of the largest launch that touched something
        self.shape = 1, 1  # blocks of that launch, warps of each
        self.places: dict[tuple[str, int, int, int], None] = {}  # (array, byte, block, warp): an ordered set
        self.found: dict[tuple[str, bool, int, int], None] = {}  # (array, is a store, byte, thread): an ordered set
        self.sizes: dict[str, int] = {}

    def on_load(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, False)

    def on_store(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, True)

    def on_atomic(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, True)

    def on_copy(self, thread: Any, allocation: Any, offset: int, data: bytes, *_: Any) -> None:
        for at in range(offset, offset + len(data), 4):
            self._keep(thread, allocation, at, True)

    def _keep(self, thread: Any, allocation: Any, offset: int, is_store: bool) -> None:
        if thread.rank == 0 and allocation.name in (*self.reads, *self.writes):
            self.sizes[allocation.name] = allocation.nbytes
            launch = thread.block.launch
            self.shape = launch.grid, (launch.block + 31) // 32
            self.num_threads = max(self.num_threads, launch.grid * launch.block)
            index = thread.block_idx * launch.block + thread.thread_idx
            self.found[allocation.name, is_store, offset, index] = None
            self.places[allocation.name, offset, thread.block_idx, thread.warp] = None

    def plot(self) -> Picture:
        """Rows of squares: what is read, the threads, what is written. A line for each access."""
        rows = [name for name in self.reads if name in self.sizes]
        rows = [*rows, THREADS, *(name for name in self.writes if name in self.sizes)]
        sizes = {name: max(self.sizes[name] // 4, 1) for name in self.sizes} | {THREADS: max(self.num_threads, 1)}
        picture = Picture(9.5, 0.5 + 0.9 * len(rows))
        axes = picture.subplots()

        def x(name: str, index: int) -> float:
            return (index + 0.5) / sizes[name]

        for name, is_store, offset, thread in self.found:
            ends = [x(name, offset // 4), x(THREADS, thread)], [-rows.index(name), -rows.index(THREADS)]
            color = HEAD_COLOR if is_store else TAIL_COLOR
            axes.plot(*ends, color=color, linewidth=0.5, alpha=0.6, zorder=1)
        for name in rows:
            count = min(MOST_MARKS, sizes[name])
            places = [(index + 0.5) / count for index in range(count)]
            axes.scatter(places, [-rows.index(name)] * count, s=26, marker="s", color="white", edgecolor=INK, zorder=2)
            axes.text(-0.01, -rows.index(name), name, ha="right", va="center", fontsize=SMALL, color=INK)
        axes.set_title("rank 0: read (blue), written (red)", loc="left", fontsize=TINY, color=FAINT)
        axes.set_xlim(-0.12, 1.02)
        axes.axis("off")
        return picture
