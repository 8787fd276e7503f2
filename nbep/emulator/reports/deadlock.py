"""The report of a deadlock: who waits for what, what they see, who was last to write it, who is missing.

Threads that wait at the same line for the same thing are one group, so that a hung block takes a few lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..machine.block import NamedBarrier, ranges
from ..machine.memory import OFFSET_BITS, Allocation
from ..machine.names import name_of
from ..machine.warp import Collective, place
from .errors import DeadlockError
from .source import Site, call_chain, describe_site

if TYPE_CHECKING:
    from ..machine.stream import Launch, Stream
    from ..machine.thread import Thread
    from ..schedule.scheduler import Describe, Host, Scheduler

_MAX_GROUPS = 40

Body = tuple[str, ...]


def deadlock_error(scheduler: Scheduler, hosts: list[tuple[str, Describe]], streams: list[Stream]) -> DeadlockError:
    """The error for a run in which nothing can go on.

    Args: hosts: names of the waiting hosts and what they wait for; streams: those of all ranks
    """
    groups: dict[tuple[Launch, tuple[Site, ...], Body], list[Thread]] = {}
    bodies: dict[int, Body] = {}
    running = set(scheduler.runnable)
    for launch in scheduler.launches:
        if launch.is_service and is_idle(launch):
            continue
        for block in launch.blocks:
            for thread in block.threads:
                if not thread.exited:
                    body = tuple(_loop(thread)) if thread in running else bodies.get(id(thread.waits_for))
                    if body is None:
                        body = bodies[id(thread.waits_for)] = tuple(_what(thread))
                    chain = tuple(call_chain(thread.gr_frame))
                    groups.setdefault((launch, chain, body), []).append(thread)
    threads_text = _count(sum(map(len, groups.values())), "thread")
    who = f"{threads_text} in {_count(len(groups), 'group')} and {_count(len(hosts), 'host')}"
    end = "nothing changes any more" if running else "nothing can run any more"
    lines = [f"{end}: {who} wait (seed {scheduler.seed})"]
    for (launch, chain, body), threads in list(groups.items())[:_MAX_GROUPS]:
        lines.append(f"  {name_of(launch.rank)}, kernel `{launch.name}`, {_who(threads)}")
        lines.append("    at " + ", called from ".join(map(describe_site, chain)))
        lines += [f"    {line}" for line in body]
    if len(groups) > _MAX_GROUPS:
        lines.append(f"  ... and {len(groups) - _MAX_GROUPS} more groups")
    for stream in streams:
        if stream.running is None and stream.queue:
            lines.append(f"  {name_of(stream.rank)}, {stream.describe()}")
    for name, waits_for in hosts:
        lines.append(f"  {name} waits for {waits_for() if callable(waits_for) else waits_for}")
    return DeadlockError("\n".join(lines))


def is_idle(launch: Launch) -> bool:
    """Whether all threads of a launch wait for cells, or for those that do."""
    threads = [thread for block in launch.blocks for thread in block.threads]
    return all(thread.exited or isinstance(thread.waits_for, (list, Collective)) for thread in threads)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def host_entry(host: Host) -> tuple[str, Describe]:
    return f"the host of rank {host.rank}", host.waits_for


def _who(threads: list[Thread]) -> str:
    """Blocks, warps and lanes of some threads of one launch."""
    blocks: dict[int, list[int]] = {}
    for thread in threads:
        blocks.setdefault(thread.block_idx, []).append(thread.thread_idx)
    same: dict[str, list[int]] = {}
    for block, indices in blocks.items():
        same.setdefault(warps_and_lanes(indices), []).append(block)
    return "; ".join(f"block {ranges(numbers)}, {names}" for names, numbers in same.items())


def warps_and_lanes(indices: list[int]) -> str:
    """`warp 0-2; warp 3, lane 0-7` for thread indices of one block."""
    lanes: dict[int, list[int]] = {}
    for index in indices:
        lanes.setdefault(index >> 5, []).append(index & 31)
    same: dict[str, list[int]] = {}
    for warp, numbers in lanes.items():
        same.setdefault("" if len(numbers) == 32 else f", lane {ranges(numbers)}", []).append(warp)
    return "; ".join(f"warp {ranges(numbers)}{names}" for names, numbers in same.items())


def _what(thread: Thread) -> list[str]:
    """Lines that say what a thread waits for; equal lines make a group."""
    waits_for = thread.waits_for
    if isinstance(waits_for, list):
        return [line for cell in waits_for for line in _cell(*cell)]
    if isinstance(waits_for, NamedBarrier):
        arrived = set(waits_for.arrived)
        absent = [t for t in thread.block.threads if t.thread_idx not in arrived]
        what = f"barrier {waits_for.number}: {len(waits_for.arrived)} of {waits_for.expected} threads have arrived"
    elif isinstance(waits_for, Collective):
        absent = [t for t in thread.warp_state.lanes if waits_for.missing >> t.lane & 1]
        what = f"{waits_for.name} with mask {waits_for.mask:#010x}"
    else:
        return [f"waits for {waits_for}"]
    places: dict[str, list[int]] = {}
    for other in absent:
        places.setdefault(place(other), []).append(other.thread_idx)
    missing = [f"missing: {warps_and_lanes(indices)}, which {where}" for where, indices in places.items()]
    return [f"waits at {what}", *missing]


def _loop(thread: Thread) -> list[str]:
    """Lines for a thread that runs and runs while nothing changes."""
    cells = [line for cell in thread.polled.values() for line in _cell(*cell)]
    return ["waits in a loop that does not call wait_expired", *cells] if cells else ["runs"]


def _cell(allocation: Allocation, offset: int, kind: str, value: Any) -> list[str]:
    """A polled cell: its name, the value seen, and who stored last."""
    if kind == "phase":  # an mbarrier says it all itself
        return [f"waits for {allocation.cell(offset)}"]
    if allocation.freed:
        return [f"polls {allocation.cell(offset)}, which is freed"]
    address = allocation.number << OFFSET_BITS | offset
    writer = allocation.writers.get(offset)
    if writer is None:
        last = "no store of more than weak order to it so far"
    else:
        block, thread, site = writer
        last = f"last written by {block}, {warps_and_lanes([thread])}, at {describe_site(site)}"
    return [f"polls {allocation.cell(offset)} at {address:#x}: sees {value} ({kind})", f"  {last}"]
