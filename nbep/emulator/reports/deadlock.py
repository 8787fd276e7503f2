"""The report of a deadlock: its cause in one paragraph, then who waits for what, who was last to write it, who misses.

A report of more than 40 lines is shortened: what ranks wait for in the same way takes the lines of one. The whole is
`error.full`; environment variable NBEP_REPORT=full puts it into the message.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..machine.errors import DeadlockError, explaining
from ..machine.names import name_of, ranges
from ..machine.source import call_chain, describe_site
from .cannot_start import cannot_start
from .expected import expire, look, quiet
from .hang_cause import Waits
from .hang_words import paragraph
from .waiting import Group, count, waiting_groups, who

if TYPE_CHECKING:
    from ..machine.thread import Thread
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
            group.told = expire(threads)


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
