"""The report of a deadlock: who waits for what, what they see, who was last to write it, who is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .block import NamedBarrier, ranges
from .errors import DeadlockError
from .kinds import KINDS
from .memory import OFFSET_BITS, Allocation
from .source import describe_site, site_of
from .warp import Collective, place

if TYPE_CHECKING:
    from .scheduler import Describe, Scheduler
    from .thread import Thread


def deadlock_error(scheduler: Scheduler, describe: Describe) -> DeadlockError:
    """The error for a run in which nothing can go on."""
    groups: dict[tuple, list[Thread]] = {}
    for launch in scheduler.launches:
        for block in launch.blocks:
            for thread in block.threads:
                if not thread.exited:
                    key = (launch, block.index, site_of(thread.gr_frame), _what(thread.waits_for))
                    groups.setdefault(key, []).append(thread)
    lines = []
    for (launch, index, site, what), threads in groups.items():
        who = _who([thread.thread_idx for thread in threads])
        lines.append(f"  rank {launch.rank}, kernel `{launch.name}`, block {index}, {who}")
        lines.append(f"    at {describe_site(site)}")
        lines += [f"    {line}" for line in what]
        lines += [f"    {line}" for line in _missing(threads[0])]
    hosts = [(f"host of rank {host.rank}", host.waits_for) for host in scheduler.waiting_hosts]
    if describe:
        hosts.append(("the host", describe))
    for name, waits_for in hosts:
        lines.append(f"  {name} waits for {waits_for() if callable(waits_for) else waits_for}")
    title = f"nothing can run any more (seed {scheduler.seed}): {len(groups)} groups of threads, {len(hosts)} hosts"
    return DeadlockError("\n".join([title, *lines]))


def _who(indices: list[int]) -> str:
    """Threads by warp and lane."""
    warps: dict[str, list[int]] = {}
    lanes: dict[int, list[int]] = {}
    for index in indices:
        lanes.setdefault(index >> 5, []).append(index & 31)
    for warp, numbers in lanes.items():
        warps.setdefault(ranges(numbers), []).append(warp)
    return "; ".join(f"warp {ranges(numbers)} lane {names}" for names, numbers in warps.items())


def _what(waits_for: Any) -> tuple[str, ...]:
    """Lines that say what a thread waits for; equal lines make a group."""
    if isinstance(waits_for, list):
        return tuple(line for cell in waits_for for line in _cell(*cell))
    if isinstance(waits_for, NamedBarrier):
        arrived = f"{len(waits_for.arrived)} of {waits_for.expected} threads arrived"
        return (f"waits at barrier {waits_for.number}: {arrived}",)
    if isinstance(waits_for, Collective):
        return (f"waits at {waits_for.name} with mask {waits_for.mask:#010x}",)
    return (f"waits for {waits_for}",)


def _cell(allocation: Allocation, offset: int, kind: str, value: Any) -> list[str]:
    if allocation.freed:
        return [f"polls {allocation.cell(offset)}, which is freed"]
    address = allocation.number << OFFSET_BITS | offset
    lines = [f"polls {allocation.cell(offset)} at {address:#x}: sees {value} ({kind})"]
    writer = None
    for start in range(offset // 8 * 8, offset + KINDS[kind].size):
        if start in allocation.writers:
            writer = allocation.writers[start]
    if writer is None:
        lines.append("  no signalling store to it so far")
    else:
        block, thread, site = writer
        lines.append(f"  last written by {block.describe()}, {_who([thread])}, at {describe_site(site)}")
    return lines


def _missing(thread: Thread) -> list[str]:
    """Who has not come to the barrier or collective that `thread` waits at, and where they are instead."""
    waits_for = thread.waits_for
    if isinstance(waits_for, NamedBarrier):
        absent = [t for t in thread.block.threads if t.thread_idx not in set(waits_for.arrived)]
    elif isinstance(waits_for, Collective):
        absent = [t for t in thread.warp_state.lanes if waits_for.missing >> t.lane & 1]
    else:
        return []
    places: dict[str, list[int]] = {}
    for other in absent:
        places.setdefault(place(other), []).append(other.thread_idx)
    return [f"missing: {_who(indices)}, which {where}" for where, indices in places.items()]
