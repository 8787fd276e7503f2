"""The lines about blocks that find no SM, and about kernels whose streams wait for an event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..machine.memory import OFFSET_BITS
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
        if any(_may_store(launch, allocation) for allocation in polled):
            text += ", which waits for it"
    if mark.before is not None:
        text += f"; record {mark.before.number} {'is' if mark.before.done else 'is not'} done"
    return text


def _without_sm(launch: Launch, stuck: list[Launch], groups: list[Group]) -> str:
    """`block 3 of `combine` cannot start: all 4 SMs of rank 1 are held by `dispatch`, which waits for it`."""
    sms, rank = launch.stream.sms, name_of(launch.rank)
    holders = [one for one in launch.world.launches if one.stream.sms is sms and any(b.live for b in one.blocks)]
    others = [one for one in holders if one is not launch]
    started = len(launch.blocks)
    if launch.starts_together:
        blocks = f"the {launch.grid} blocks of `{launch.name}` cannot start together"
        held = f"{sms.held} of the {sms.number} SMs of {rank}"
    else:
        left = range(started, launch.grid)
        blocks = f"block{'s' * (len(left) > 1)} {ranges(left)} of `{launch.name}` cannot start"
        held = f"all {sms.number} SMs of {rank}"
    by = [f"its block{'s' * (started > 1)} {ranges(range(started))}"] if launch in holders else []
    by += dict.fromkeys(f"`{one.name}`" for one in others)
    return (
        f"{blocks}: {held} are held by {' and '.join(by)}, which {_whom(launch, (others or holders)[0], stuck, groups)}"
    )


def _whom(launch: Launch, holder: Launch, stuck: list[Launch], groups: list[Group]) -> str:
    """For which of the launches that cannot start the one waits that holds the SMs."""
    if holder is launch:
        return "wait for it"
    polled = {cell[0] for group in groups if group.launch is holder for cell in group.wait.cells}
    able = [one for one in stuck if any(_may_store(one, allocation) for allocation in polled)]
    own = [one for one in able if one.name == holder.name and one.rank != holder.rank] or able
    if launch in own:
        return "waits for it"
    return f"waits for `{own[0].name}` of {name_of(own[0].rank)}, which cannot start" if own else "waits, too"


def _may_store(launch: Launch, allocation: Any) -> bool:
    """Whether a launch has an address of some memory, or its rank has one that others have, too."""
    segments = launch.space.segments
    if any(allocation is segments.get(value >> OFFSET_BITS) for value in _leaves(launch.args)):
        return True
    seeing = [space for space in launch.world.spaces.values() if allocation in space.segments.values()]
    return len(seeing) > 1 and launch.space in seeing


def _leaves(value: Any) -> Iterator[int]:
    """The numbers in the arguments of a launch."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _leaves(one)
    elif hasattr(value, "__index__"):
        yield value.__index__()
