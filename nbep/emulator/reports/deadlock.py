"""The report of a deadlock: its cause in one paragraph, then who waits for what, who was last to write it, who misses.

A report of more than 40 lines is shortened: what ranks wait for in the same way takes the lines of one. The whole is
`error.full`; environment variable NBEP_REPORT=full puts it into the message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..machine.errors import DeadlockError, explaining
from ..machine.memory import OFFSET_BITS
from ..machine.names import name_of, ranges
from ..machine.source import call_chain, describe_site
from .expected import expire, look, quiet
from .hang_cause import Waits
from .hang_words import paragraph
from .waiting import Group, count, waiting_groups, who

if TYPE_CHECKING:
    from ..machine.stream import Launch, Mark
    from ..machine.thread import Thread
    from ..run import Run
    from ..schedule.scheduler import Stuck

MOST_LINES = 40
_MOST_ASKED = 2000  # groups


def deadlock_error(stuck: Stuck) -> DeadlockError:
    """The error for a run in which nothing can go on."""
    world: Any = stuck.world
    hosts = [(f"the host of rank {host.rank}", host.waits_for) for host in stuck.hosts]
    hosts += [("the host", stuck.caller)] if stuck.caller else []
    end = "nothing changes any more" if world.runnable else "nothing can run any more"
    groups = waiting_groups(world)
    described = [(name, waits_for() if callable(waits_for) else waits_for) for name, waits_for in hosts]
    others = [
        *(f"  {name_of(s.rank)}, {s.describe()}" for s in world.streams if s.running is None and s.queue),
        *(f"  {name} waits for {what}" for name, what in described),
    ]
    listed = {group: _lines(group) for group in groups}
    error = DeadlockError("")
    cause = ["Why they wait is not known"]
    with explaining(error):
        ask(groups)
        cause = [*cannot_start(world, groups), *paragraph(Waits(world, groups), described)]
    threads_text = count(sum(len(group.threads) for group in groups), "thread")
    all_text = f"{threads_text} in {count(len(groups), 'group')} and {count(len(hosts), 'host')}"
    head = [*cause, "", f"{end}: {all_text} wait (seed {world.seed})"]
    full = [*head, *(line for lines in listed.values() for line in lines), *others]
    is_long = len(full) > MOST_LINES and os.environ.get("NBEP_REPORT") != "full"
    error.args = ("\n".join(_shorten(head, listed, others) if is_long else full),)
    error.full = "\n".join(full)
    return error


def ask(groups: list[Group]) -> None:
    """Find out what the groups that poll want to see. Their threads go on a little: see `expected`."""
    polling = {group: _together(group) for group in groups if group.wait.cells}
    if not polling:
        return
    asked = list(polling.items())[:_MOST_ASKED]
    with quiet(asked[0][0].launch.world):
        for group, threads in asked:
            group.expected = look(threads, group.wait.cells)
        for group, threads in asked:
            group.report = expire(threads)


def _together(group: Group) -> list[Thread]:
    """The first thread of a group, and the lanes of its warp that wait at the same line for some cell."""
    first = group.threads[0]
    if first not in first.world.polling:
        return [first]
    lanes = [t for t in first.warp_state.lanes if t is not first and t in t.world.polling]
    return [first, *(t for t in lanes if call_chain(t.gr_frame, 1) == list(group.chain[:1]))]


def _lines(group: Group) -> list[str]:
    """The lines of one group."""
    return [
        f"  {group.who()}",
        "    at " + ", called from ".join(map(describe_site, group.chain)),
        *(f"    {line}" for line in group.wait.body),
    ]


def _shorten(head: list[str], listed: dict[Group, list[str]], others: list[str]) -> list[str]:
    """At most MOST_LINES lines: groups at one place are one, of any number of ranks."""
    same: dict[tuple, list[Group]] = {}
    for group in listed:
        same.setdefault((group.launch.name, group.chain, bool(group.wait.cells)), []).append(group)
    places = sorted(same.values(), key=lambda groups: not groups[0].wait.cells)  # who polls comes first
    blocks = [_merged(groups, listed) for groups in places]
    room = MOST_LINES - len(head) - 1
    kept_others = others if len(others) <= 3 else [*others[:2], f"  ... and {len(others) - 2} more hosts and streams"]
    room -= len(kept_others)
    lines: list[str] = []
    shown = 0
    for block in blocks:
        if len(lines) + len(block) > room:
            break
        lines += block
        shown += 1
    left = "" if shown == len(blocks) else f"{count(len(blocks) - shown, 'more place')}; "
    return [*head, *lines, *kept_others, f"  ... {left}all of it: error.full, or NBEP_REPORT=full"]


def _merged(groups: list[Group], listed: dict[Group, list[str]]) -> list[str]:
    """The lines of groups at one place: those of the first, and how many are like it."""
    first = listed[groups[0]]
    if len(groups) == 1:
        return [first[0], first[1], *first[2:5], *(["      ..."] if len(first) > 5 else [])]
    ranks = sorted({group.rank for group in groups})
    threads = [thread for group in groups for thread in group.threads]
    names = ", ".join(map(name_of, ranks)) if len(ranks) < 2 or ranks[-1] >= 256 else f"ranks {ranges(ranks)}"
    where = who(threads)
    head = f"  {names}, kernel `{groups[0].launch.name}`, {where if len(where) < 80 else count(len(threads), 'thread')}"
    return [head, first[1], *first[2:4], f"    ... and {count(len(groups) - 1, 'group')} more like it"]


# --- what cannot start ------------------------------------------------------------------------------------------------


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
    memory = getattr(allocation, "identity", allocation)  # an mbarrier has none
    theirs = (segments.get(value >> OFFSET_BITS) for value in _leaves(launch.args))
    if any(one is not None and one.identity is memory for one in theirs):
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
