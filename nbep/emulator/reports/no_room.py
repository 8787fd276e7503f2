"""The lines about blocks that cannot start, because other kernels hold the SMs of their rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..machine.memory import OFFSET_BITS, Allocation
from ..machine.names import name_of, ranges
from .waiting import Group

if TYPE_CHECKING:
    from ..machine.stream import Launch
    from ..run import Run


def cannot_start(world: Run, groups: list[Group]) -> list[str]:
    """For each rank with blocks that wait for an SM: which, who holds the SMs, and whether that waits for them."""
    stuck = [launch for context in world.ranks.values() for launch in list(context.sms.waiting)[:1]]
    return [_line(launch, stuck, groups) for launch in stuck]


def _line(launch: Launch, stuck: list[Launch], groups: list[Group]) -> str:
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
