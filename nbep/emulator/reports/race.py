"""The report of a data race: its cause in one sentence, both accesses, and the cells that were to order them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..machine.access import describe_thread
from ..machine.memory import Allocation
from ..models.knowledge import Access
from . import errors
from .chains import Link
from .race_cause import Cause, Race, find_cause
from .source import describe_site, source_line

if TYPE_CHECKING:
    from ..models.checked import CheckedThread

MAX_LINKS = 4  # of a chain that are shown


def race(thread: CheckedThread, allocation: Allocation, access: Access, earlier: Access) -> errors.EmulatorError:
    """The error for an access that meets an earlier one, which the thread cannot know of."""
    one = Race(thread, allocation, access, earlier)
    error = errors.DataRace("")
    cause = Cause(f"nothing orders {one.accesses} of {one.cell}")
    with errors.explaining(error):
        cause = find_cause(one)
    who = "this thread" if earlier.owner is thread.owner else "another thread"
    who = "a bulk copy" if earlier.order == "bulk" else "the CPU" if earlier.owner.is_cpu else who
    what = f"{access.how} {access.verb} {'to' if access.verb == 'store' else 'of'} {access.end - access.begin} bytes"
    lines = [
        cause.sentence,
        f"  {what} that {who} has {'loaded' if earlier.verb == 'load' else 'stored'}",
        f"  in {one.cell}",
        *_describe(earlier),
        *_describe_links(cause.links),
    ]
    here = [f"  by {thread.describe()}", *_place(access, "  ")]
    error.args = ("\n".join(lines + here),)
    error.thread, error.source = thread.describe(), describe_site(access.site)
    return error


def _describe_links(links: tuple[Link, ...]) -> list[str]:
    lines: list[str] = []
    for allocation, store, load in links[-MAX_LINKS:]:
        lines += [f"  then {allocation.cell(load.begin)}", *_describe(store), *_describe(load)]
    return lines


def _describe(access: Access) -> list[str]:
    owner = access.owner
    thread = describe_thread(owner.rank, owner.kernel, owner.launch, owner.block_idx, owner.thread_idx)
    done = "changed" if access.is_atomic else "stored" if access.verb == "store" else "loaded"
    how = "by a bulk copy of" if access.order == "bulk" else f"with {access.how} order by"
    by = "by the CPU" if owner.is_cpu else f"{how} {thread}"
    lines = [f"    {done} {by}", *_place(access, "      ")]
    if access.serving is not None:
        queue_pair, entry = access.serving
        lines.append(f"      for entry {entry} of queue pair {queue_pair}")
    return lines


def _place(access: Access, indent: str) -> list[str]:
    """The line that accesses, and what stands there."""
    text = source_line(access.site)
    return [f"{indent}at {describe_site(access.site)}", *([f"{indent}  {text}"] if text else [])]
