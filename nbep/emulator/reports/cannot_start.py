"""The lines about blocks that find no SM, and about kernels whose streams wait for an event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..machine.memory import OFFSET_BITS, Allocation
from ..machine.names import name_of, ranges
from .waiting import Group

if TYPE_CHECKING:
    from ..machine.stream import Launch, Mark
    from ..run import Run


def cannot_start(world: Run, groups: list[Group]) -> list[str]:
    """What cannot start: who holds the SMs, or what its stream waits for, and whether that waits for it."""
    stuck = [launch for context in world.ranks.values() for launch in list(context.sms.waiting)[:1]]
    lines = [_without_sm(launch, stuck, groups) for launch in stuck]
    for stream in world.streams:
        if stream.running is None and stream.queue and stream.queue[0][0] == "wait":
            held_back = [item for what, item, _ in stream.queue if what == "launch"]
            lines += [_behind_event(launch, stream.queue[0][1], groups) for launch in held_back[:1]]
    return lines


def _behind_event(launch: Launch, mark: Mark, groups: list[Group]) -> str:
    """`kernel `copy` of rank 1 cannot start: its stream waits for an event of `forward` behind kernel `replay``."""
    text = f"{launch.title} of {name_of(launch.rank)} cannot start: its stream `{launch.stream.name}` waits for "
    text += "an event" if mark.number == 1 else f"record {mark.number} of an event"
    text += f" of stream `{mark.stream.name}`"
    if mark.behind is not None:
        text += f", behind {mark.behind.title}"
        polled = {cell[0] for group in groups if group.launch is mark.behind for cell in group.wait.cells}
        if polled & set(_memory_of(launch)):
            text += ", which waits for it"
    if mark.before is not None:
        text += f"; record {mark.before.number} {'is' if mark.before.done else 'is not'} done"
    return text


def _without_sm(launch: Launch, stuck: list[Launch], groups: list[Group]) -> str:
    """`block 3 of `combine` cannot start: all 4 SMs of rank 1 are held by `dispatch`, which waits for it`."""
    sms, rank = launch.stream.sms, name_of(launch.rank)
    here = [other for other in launch.world.launches if other.stream.sms is sms]
    holders = [other for other in here if any(block.live for block in other.blocks)]
    names = " and ".join(dict.fromkeys(f"`{other.name}`" for other in holders))
    started = len(launch.blocks)
    if launch.starts_together:
        blocks = f"the {launch.grid} blocks of `{launch.name}` cannot start together"
        held = f"{sms.held} of the {sms.number} SMs of {rank}"
    else:
        left = range(started, launch.grid)
        blocks = f"block{'s' * (len(left) > 1)} {ranges(left)} of `{launch.name}` cannot start"
        held = f"all {sms.number} SMs of {rank}"
    if holders == [launch]:
        return (
            f"{blocks}: {held} are held by its blocks {ranges(range(started))}, {_whom(launch, launch, stuck, groups)}"
        )
    others = [other for other in holders if other is not launch] or holders
    return f"{blocks}: {held} are held by {names}, {_whom(launch, others[0], stuck, groups)}"


def _whom(launch: Launch, holder: Launch, stuck: list[Launch], groups: list[Group]) -> str:
    """For which of the launches that cannot start the one waits that holds the SMs."""
    polled = {cell[0] for group in groups if group.launch is holder for cell in group.wait.cells}
    able = [one for one in stuck if polled & set(_memory_of(one))]
    if launch in able and (holder.rank == launch.rank and len(able) == 1):
        return "which waits for it" if holder is not launch else "which wait for it"
    elsewhere = [one for one in able if one.name == holder.name] or able
    if launch in elsewhere or not elsewhere:
        whom = "for it" if elsewhere else "for others"
        return f"which {'wait' if holder is launch else 'waits'} {whom}"
    other = elsewhere[0]
    return f"which waits for `{other.name}` of {name_of(other.rank)}, which cannot start"


def _memory_of(launch: Launch) -> Iterator[Allocation]:
    """The memory that a launch has an address of."""
    segments = launch.space.segments
    for value in _leaves(launch.args):
        if isinstance(value, int) and value >> OFFSET_BITS in segments:
            yield segments[value >> OFFSET_BITS]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _leaves(one)
    elif hasattr(value, "__index__"):
        yield value.__index__()
