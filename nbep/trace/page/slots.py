"""What is in slots over time: rings, the halves of the low-latency mode, and send queues.

ring    a slot is being filled, then a tail publishes it, then a head gives it back
half    a message or a row is there, until the launch ends that receives its call
queue   an entry is reserved, then the doorbell rings for it, then it is done
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nbep.trace.queues import EntryLife, all_lives
from nbep.trace.recorder import Recorder
from nbep.trace.view import views

EMPTY, FILLING, FULL = range(3)
Change = tuple[int, int, int, str]  # step, slot, state, and what is in the slot


class Slots(NamedTuple):
    """A row of slots, and what happens to them. source: the rank that fills them."""

    kind: str  # "ring", "half" or "queue"
    rank: int  # in whose memory they are
    title: str
    source: int
    kernel: str
    call: int
    begin: int
    end: int
    count: int  # type: ignore[assignment]  # hides the method of tuples, which is not called
    changes: list[Change]


def all_slots(trace: Recorder) -> list[Slots]:
    """Everything in a run that has slots, in the order in which it is shown."""
    return [*(slots for view in views() for slots in view.slots(trace)), *_queues(trace)]


def _queues(trace: Recorder) -> Iterator[Slots]:
    for (rank, peer, queue), lives in sorted(all_lives(trace).items()):
        count = _most_at_once(lives)
        changes: list[Change] = []
        for life in lives:
            text = f"entry {life.number}"
            for step, state in ((life.reserved, FILLING), (life.rung, FULL), (life.done, EMPTY)):
                if step is not None:
                    changes.append((step, life.number % count, state, text))
        changes.sort(key=lambda change: change[0])
        title = f"send queue {queue} to rank {peer}"
        yield Slots("queue", rank, title, rank, "", 0, changes[0][0], trace.last_step, count, changes)


def _most_at_once(lives: list[EntryLife]) -> int:
    """So many entries, from the first that is not done to the last that is reserved, that each has a place."""
    most, first = 1, 0
    for life in lives:
        while first < life.number and _is_before(lives[first].done, life.reserved):
            first += 1
        most = max(most, life.number + 1 - first)
    return most


def _is_before(done: int | None, reserved: int | None) -> bool:
    return done is not None and reserved is not None and done < reserved
