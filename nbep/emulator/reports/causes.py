"""What a race is due to, as a kind with cells and lines, and the one table that makes sentences of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..machine.memory import Allocation
from ..models.knowledge import Access


class Link(NamedTuple):
    """A store to a cell, and the load of it, or the atomic."""

    allocation: Allocation
    store: Access
    load: Access

    @property
    def cell(self) -> str:
        return self.allocation.cell(self.store.begin)


class Cause(NamedTuple):
    """One thing that is wrong.

    kind: which of SENTENCES says it
    cells: the names of the cells that it is about
    lines: the stores and loads that were to order the accesses, in the order of the run
    words: what else the sentence says, by name
    """

    kind: str
    cells: tuple[str, ...] = ()
    lines: tuple[Link, ...] = ()
    words: Mapping[str, object] = MappingProxyType({})

    @property
    def sentence(self) -> str:
        return SENTENCES[self.kind].format(*self.cells, **self.words)


_NOTHING = "nothing at all orders {order} of {0}: "
_NEITHER = "nothing at all orders the {before} and this {noun} of {0}: "
_UNREAD = "{0} is overwritten by this store, which may come before the other thread has read the old value: "
_OVERWRITTEN = "{0} was overwritten before this load: this thread knows only of the earlier store, and "
_TOO_SMALL = "is too small to order {order}: {name}, but {between}"
_ENGINE = "the copy engine does not know what this thread {known}: "
_RACING = "{ends} {are} too small: {scopes}, but {between}"
_WEAK = (
    "is too weak: it has {{weak}} order, but another thread {does} it with {{strong}} order, as a cell that threads "
    "wait for"
)
_ANOTHER = (
    "no {} orders {{which}} before the {{telling}}, which another thread of its block makes without waiting for it"
)
_LOADED = (
    "no {} orders this {{noun}} behind the load of {{0}}: another thread of its block has made that load, and this "
    "thread has not waited for it"
)
_TWO = "two threads store to {0}, and nothing at all orders one before the other"
_SHUFFLE = "a {name} brings lanes together, but orders no memory"

# By kind. {0}, {1}: the cells; {order}: the order that is missing; {accesses}: both; {noun}: the second one; {before}:
# the first one.
SENTENCES = {
    "unordered": "nothing orders {accesses} of {0}",
    "CPU after the launch": (
        "the CPU {did} {0} after it has queued {launch} on stream `{stream}`, which {does} it, and before it has "
        "waited for that"
    ),
    "hosts": (
        "the host of {other} {did} {0}, and {launch} of {rank} {does} it: nothing orders the two, as neither its host "
        "nor a kernel before it has waited for that host since"
    ),
    # Two launches of one rank.
    "streams": (
        "on {rank}, {first} {does} {0}, {second} {also}, and nothing orders the two: before the second, stream "
        "`{stream}` must wait for the first; {instead}"
    ),
    # A chain of stores and loads that has a flaw.
    "store too weak": (
        "{storing} is too weak to order {order}: with {how} order it releases nothing, and no fence comes before it"
    ),
    "load too weak": (
        "{loading} is too weak to order {order}: with {how} order it acquires nothing, and no fence comes after it"
    ),
    "both too weak": (
        "{ends} {0} are both too weak to order {order}: with {hows} order they release and acquire nothing, and "
        "no fence does it for them"
    ),
    "store scope": "the scope of {storing} " + _TOO_SMALL,
    "load scope": "the scope of {loading} " + _TOO_SMALL,
    "store fence scope": "the scope of the fence before {storing} " + _TOO_SMALL,
    "load fence scope": "the scope of the fence after {loading} " + _TOO_SMALL,
    # The two accesses themselves.
    "racing store's scope": _RACING,
    "racing load's scope": _RACING,
    "both racing scopes": _RACING,
    "weak store": "{which} store to {0} " + _WEAK.format(does="loads") + "{meeting}",
    "weak load": "{which} load of {0} " + _WEAK.format(does="stores to") + "{meeting}",
    "mixed sizes": (
        "{accesses} of {0} overlap in part: the {before} has {had}, this {noun} {has}, and PTX orders only accesses "
        "of the same bytes, however strong they are"
    ),
    "CPU under way": "the CPU {did} {0} while the kernel runs: this {noun} needs {needed}",
    # Threads of a block that do not meet.
    "shuffle": "no syncwarp is between {accesses} of {0}: " + _SHUFFLE,
    "shuffle passes on": "no syncwarp passes on to the other lanes what one has acquired by {0}: " + _SHUFFLE,
    "no syncwarp": "no syncwarp is between {accesses} of {0}: the two lanes of a warp have not met since",
    "no barrier": "no barrier is between {accesses} of {0}: the two warps of a block have not met since",
    "warps not met": (
        "nothing orders {accesses} of {0}: the two warps of a block have not met since, and this thread has "
        "waited for nothing that the other one, or its warp, has stored since{such}"
    ),
    "another lane signals": _ANOTHER.format("syncwarp"),
    "another warp signals": _ANOTHER.format("barrier or syncwarp"),
    "heard by another lane": _LOADED.format("syncwarp"),
    "heard by another warp": _LOADED.format("barrier or syncwarp"),
    # Bulk copies.
    "no proxy fence": _ENGINE + "no fence.proxy.async.global comes before the bulk load of {0}",
    "early proxy fence": (_ENGINE + "its fence.proxy.async.global before the bulk load of {0} comes too early{unmet}"),
    "copy reads": "the bulk copy that reads {0} has not been waited for: a wait_group.read is missing{where}",
    "copy writes": "the bulk copy that writes {0} has not been waited for: a wait_group is missing{where}",
    "copy, mbarrier": "no thread has waited on {1}, which says when the bulk copy that {done} {0} is done",
    "copy, phase": (
        "this thread has waited on {1}, but for an earlier phase than that of the bulk copy that {done} {0}"
    ),
    # Signals that say too much, or too little, or are not waited for.
    "promised": (
        "{0} announces this {noun} too early, or its reader goes beyond it: after the {store} to {0} the reader's "
        "block loads {1} a second time, before this {noun} is made"
    ),
    "no wait": (
        "a wait is missing in kernel `{kernel}`: {who} has stored its signal to {0}, and has gone on without waiting "
        "for {whom}: it has loaded no signal with acquire order"
    ),
    "old signal, loader": (
        "nothing orders the {before} of {0} behind this {noun}: the last signal that the loading thread has seen "
        "from this block is {1}, stored before this {noun}"
    ),
    "old signal": _NOTHING
    + "the last signal that this thread has seen from {who} is {1}, stored before that store{its_signal}",
    "queue pairs": (
        _NOTHING
        + "the NIC has stored it for {wrote}; the last store of the NIC that this thread has seen is {1}, for {heard}, "
        "and nothing orders two queue pairs"
    ),
    "two stores": _TWO,
    "two stores, not waited": (
        _TWO + ": the second has waited for nothing that the first one, or its block, has stored{such}"
    ),
    "gone on": _NOTHING + "this thread has gone on while {behind}",
    "not waited": _NOTHING + "this thread has waited for nothing that the other one, or its block, has stored{last}",
    "loader gone on": _NEITHER + "the thread that loads has gone on while {behind}",
    "neither waited": (
        _NEITHER
        + "neither of the two threads has waited for anything that the other one, or its block, has stored after its "
        "access{last}"
    ),
    # Bytes that are stored to again before they are loaded.
    "overwritten": _OVERWRITTEN + "the later one may come at any time",
    "overwritten, heard": (
        _OVERWRITTEN + "the later one did not wait for this load: the last that its thread knew of this block was {1}"
    ),
    "unread": _UNREAD + "the storing thread has waited for nothing that comes after the load",
    "unread, heard": _UNREAD
    + "the last that the storing thread knows of the other block is {1}, stored before the load",
    # Threads that are behind one that has gone on.
    "behind, polls": "thread {thread} of its block waits for {0}",
    "behind, waits": "thread {thread} of its block waits in {function}",
    "behind, on its way": "thread {thread} of its block is still at {site}",
}
