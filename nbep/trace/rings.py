"""How full each ring is over time, from the stores to its head and tail.

What a rank sends to itself takes no ring: there is a ring for each channel and each other rank.
"""

from __future__ import annotations

from typing import NamedTuple

from nbep.trace.recorder import Recorder


class RingFill(NamedTuple):
    """One ring during one launch of its owner: a step function.

    A ring of `rank` carries what `src` sends on `channel`. steps[i] is when the fill became fill[i] slots; the first is
    the launch or the first token, the last one the launch's end. Combine leaves tokens in its rings: once its
    receivers are done, nobody waits for another head.
    """

    rank: int
    kernel: str
    call: int
    channel: int
    src: int
    capacity: int
    steps: list[int]
    fill: list[int]
    num_tail_stores: int
    num_head_stores: int
    num_tokens: int

    @property
    def peak(self) -> int:
        return max(self.fill)

    def at(self, step: int) -> int:
        """The fill at a step; 0 outside the launch."""
        fill = 0
        for change, value in zip(self.steps, self.fill, strict=True):
            if change > step:
                break
            fill = value
        return fill


def ring_fills(trace: Recorder, kernel: str | None = None) -> list[RingFill]:
    """All rings of all launches that have rings, by rank, launch, channel and source."""
    stores: dict[tuple, list[tuple[int, str, int]]] = {}
    for event in trace.events("store"):
        cell = event.cell
        if cell.name in ("head", "tail"):
            key = (cell.owner, event.kernel, event.call, cell.channel, cell.src)
            stores.setdefault(key, []).append((event.step, cell.name, event.value))
    rings = []
    for launch in sorted(trace.launches, key=lambda launch: (launch.rank, launch.begin)):
        if launch.shape is None or (kernel is not None and launch.kernel != kernel):
            continue
        end = trace.last_step if launch.end is None else launch.end
        for channel in range(launch.shape.num_channels):
            for src in range(launch.shape.num_ranks):
                if src == launch.rank:
                    continue
                key = (launch.rank, launch.kernel, launch.call, channel, src)
                rings.append(_ring_fill(key, launch.shape.num_slots, launch.begin, end, stores.get(key, [])))
    return rings


def _ring_fill(key: tuple, capacity: int, begin: int, end: int, stores: list[tuple[int, str, int]]) -> RingFill:
    rank, kernel, call, channel, src = key
    # A peer may start sooner than the owner.
    steps, fill = [min([begin, *(step for step, _, _ in stores)])], [0]
    cells = {"head": 0, "tail": 0}
    for step, name, value in stores:
        cells[name] = value
        # Where nothing more can come, combine's head is past every tail.
        now = max(cells["tail"] - cells["head"], 0)
        if now != fill[-1]:
            steps.append(step)
            fill.append(now)
    steps.append(max(end, steps[-1]))
    fill.append(fill[-1])
    names = [name for _, name, _ in stores]
    return RingFill(
        rank, kernel, call, channel, src, capacity, steps, fill, names.count("tail"), names.count("head"), cells["tail"]
    )
