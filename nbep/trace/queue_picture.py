"""The picture of a send queue: what becomes of each entry over time.

entry 0   |wrt|..|---- the NIC ----|
entry 1      |write|.......|--------- the NIC ---------|       .. written, and not rung for yet
entry 2            |write|.|----------------------------------|
"""

from __future__ import annotations

from matplotlib.patches import Patch

from nbep.trace.queues import entry_lives
from nbep.trace.recorder import Recorder
from nbep.trace.style import (
    HEAD_COLOR,
    INK,
    SMALL,
    STUCK_COLOR,
    TAIL_COLOR,
    WAIT_COLOR,
    Picture,
    count_steps,
    plain_axes,
)

HEIGHT = 0.5
MOST = 64  # entries that one picture shows
PARTS = (
    ("reserved: its owner writes it, and waits for its turn", HEAD_COLOR),
    ("ready: not rung for yet", WAIT_COLOR),
    ("rung: the NIC has it", TAIL_COLOR),
)
STUCK = "not done"


def queue_picture(trace: Recorder, rank: int, peer: int, queue: int) -> Picture:
    """A bar for each entry, the first on top, from its reservation to its completion."""
    lives = entry_lives(trace, rank, peer, queue)[:MOST]
    picture = Picture(9.5, 1.1 + 0.22 * len(lives))
    axes = picture.subplots()
    plain_axes(axes)
    is_stuck = False
    for life in lives:
        # Who rings for its own entry does so just before the next one has the turn.
        ready = min((step for step in (life.ready, life.rung) if step is not None), default=None)
        steps = (life.reserved, ready, life.rung, life.done)
        for (_, color), begin, end in zip(PARTS, steps, steps[1:], strict=False):
            if begin is None:
                break
            until = trace.last_step if end is None else end
            if until == begin:
                continue
            lost = end is None or (life.is_refused and end == life.done)
            is_stuck = is_stuck or lost
            axes.barh(-life.number, until - begin, HEIGHT, begin, color=STUCK_COLOR if lost else color)
    axes.set_yticks([-life.number for life in lives], [f"entry {life.number}" for life in lives])
    axes.set_ylim(-len(lives) + 0.4, 0.6)
    axes.set_title(f"Queue {queue} from rank {rank} to rank {peer}", loc="left", fontsize=SMALL, color=INK)
    count_steps(axes)
    kinds = [Patch(color=color, label=text) for text, color in (*PARTS, (STUCK, STUCK_COLOR))[: 4 if is_stuck else 3]]
    picture.legend(handles=kinds, loc="outside lower left", ncols=2, fontsize=SMALL, frameon=False)
    return picture
