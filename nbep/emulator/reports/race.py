"""The report of a data race: both accesses, what is missing between them, and what the thread polled last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..machine.access import describe_thread
from ..machine.memory import Allocation
from ..models.knowledge import NOT_WAITED, NOT_YET, Access, distance
from ..models.orders import ACQUIRES, RELEASES, SCOPES
from . import errors
from .faults import error_at
from .source import describe_site

if TYPE_CHECKING:
    from ..models.checked import CheckedThread

BETWEEN = {1: "threads of a block", 2: "blocks of a rank", 3: "ranks"}


def race(thread: CheckedThread, allocation: Allocation, access: Access, earlier: Access) -> errors.EmulatorError:
    """The error for an access that meets an earlier one, which the thread cannot know of."""
    is_load = earlier.verb == "load"
    is_mbarriers = earlier.order == "bulk" and (allocation is thread.shared) is not is_load
    if earlier.number == NOT_WAITED:
        what = "nobody has waited on the mbarrier of" if is_mbarriers else "its thread has not waited for"
        why = f"{what} that copy"
    elif is_mbarriers and not is_load:
        why = "this thread has not waited on the mbarrier of that copy, nor met one that has"
    elif not is_load and not thread.is_new(earlier):
        why = "this thread knows of it, but the copy engine does not: there is no fence.proxy.async.global"
    elif earlier.reach and access.reach:
        why = "the scope of one of them does not reach the other"
    elif earlier.number == NOT_YET or earlier.at_exit:
        why = "its thread has stored nothing since" if is_load else "its thread has released nothing since"
    elif is_load:
        why = "its thread has signalled since, but this thread has read nothing that says so"
    else:
        why = "the store has been released, but this thread has acquired nothing that says so"
    who = "this thread" if earlier.owner is thread.owner else "another thread"
    who = "a bulk copy" if earlier.order == "bulk" else who
    nbytes = access.end - access.begin
    what = f"{access.how} {access.verb} {'to' if access.verb == 'store' else 'of'} {nbytes} bytes"
    lines = [
        f"{what} that {who} has {'loaded' if is_load else 'stored'}: nothing orders the two",
        f"  in {allocation.cell(max(access.begin, earlier.begin))}",
        *_describe(earlier),
        f"  {why}",
    ]
    return error_at(thread, errors.DataRace, "\n".join(lines + _describe_poll(thread, earlier.owner.block)))


def _describe_poll(thread: CheckedThread, block: int) -> list[str]:
    """Lines for a poll that should have ordered the thread behind a block: its own, or one of another of its block."""
    for poller in (thread, *thread.block.threads):
        if poller.last_poll is not None and not poller.last_poll[0].freed:
            allocation, offset, order, scope = poller.last_poll
            message = allocation.messages.get(offset)
            for store in () if message is None else message.stores:
                if store.owner.block == block:
                    who = "this thread" if poller is thread else f"thread {poller.thread_idx} of this block"
                    return [
                        f"  {who} last polled {allocation.cell(offset)}, with {order}.{scope} order",
                        *_describe(store),
                        *_what_lacks(store, order, scope, distance(store.owner, thread.owner)),
                    ]
    return []


def _what_lacks(store: Access, order: str, scope: str, needed: int) -> list[str]:
    """A line that says why a store and a load of the value do not order anything, if they do not."""
    if min(store.reach, SCOPES[scope]) < needed:
        names = {reach: name for name, reach in SCOPES.items()}
        return [f"      between {BETWEEN[needed]} both take scope {names[needed]} at least"]
    if store.order not in RELEASES:
        return [f"      a {store.order} store releases nothing, unless a fence comes before it"]
    if order not in ACQUIRES:
        return [f"      a {order} load acquires nothing, unless a fence comes after it"]
    return []


def _describe(access: Access) -> list[str]:
    owner = access.owner
    thread = describe_thread(owner.rank, owner.kernel, owner.block_idx, owner.thread_idx)
    done = "stored" if access.verb == "store" else "loaded"
    how = "by a bulk copy of" if access.order == "bulk" else f"with {access.how} order by"
    lines = [f"    {done} {how} {thread}", f"      at {describe_site(access.site)}"]
    if access.serving is not None:
        queue_pair, entry = access.serving
        lines.append(f"      for entry {entry} of queue pair {queue_pair}")
    return lines
