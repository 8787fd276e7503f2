"""The CPU as a reader, for `checked`: what it knows of the stores of kernels that write for it.

It may read bytes that a kernel has stored if something orders the two: it has polled a cell that the kernel released
with scope sys behind the store, or has waited for an event or a stream behind the kernel. A poll may meet a store of
scope sys that nothing orders, as two strong accesses of threads may.

All ranks' hosts are one reader here: what one of them knows it may have told the others, in ways that nobody sees.
After an event the CPU knows all that any kernel had released by then, as a kernel does that starts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..machine.access import describe_thread
from ..machine.memory import Allocation
from ..reports.errors import DataRace
from ..reports.source import describe_site, site_of
from .knowledge import ALL_CLOCKS, GRANULE_BITS, NOT_YET, NOTHING, Access, Numbers, Owner, join, later
from .orders import SCOPES

if TYPE_CHECKING:
    from ..world import World

REACH = SCOPES["sys"]  # between the CPU and any thread


class HostReader:
    """The CPU, as `checked` sees it."""

    def __init__(self, world: World):
        self.owner = Owner(-1, "", world.count_block(), -1, 0, 0)
        self.known: Numbers = {}
        self.observed: set[Access] = set()  # strong stores whose values it has polled

    def wait(self, first_signal: int) -> None:
        """It has waited for an event before which so many signals were given."""
        self.known = later(self.known, {ALL_CLOCKS: first_signal})

    def read(self, allocation: Allocation, offset: int, size: int, count: int, polls: bool) -> None:
        """Stop the run if the CPU reads `count` cells of `size` bytes, and cannot know of the stores to them.

        polls: each cell with acquire order, so that it knows then what was released with the value; else plainly
        """
        site = site_of(sys._getframe(2))
        for begin in range(offset, offset + size * count, size):
            load = Access(self.owner, "load", begin, begin + size, "acquire" if polls else "weak", "sys", site)
            for granule in range(begin >> GRANULE_BITS, (begin + size - 1 >> GRANULE_BITS) + 1):
                for store in allocation.last_stores.get(granule, ()):
                    if store.begin < load.end and load.begin < store.end:
                        self._meet(allocation, load, store)
            message = allocation.messages.get(begin) if polls else None
            if message is not None:
                self.known = later(self.known, join((NOTHING, message.heard(REACH))).stores)

    def _meet(self, allocation: Allocation, load: Access, store: Access) -> None:
        if store.is_beyond(self.known) and store not in self.observed:
            if min(load.reach, store.reach) < REACH:
                raise self._race(allocation, load, store)
            self.observed.add(store)

    def _race(self, allocation: Allocation, load: Access, store: Access) -> DataRace:
        owner = store.owner
        if load.reach and store.reach:
            why = f"scope {store.scope} does not reach the CPU: that takes scope sys"
        elif load.reach:
            why = "the CPU polls these bytes while the kernel runs: that takes a store with an order, and scope sys"
        elif store.number == NOT_YET or store.at_exit:
            why = "its thread has released nothing since, and the CPU has not waited for the end of the kernel"
        else:
            why = "the CPU has polled nothing that was released with scope sys since, nor waited for an event since"
        what = f"the CPU {'polls' if load.reach else 'reads'} {load.end - load.begin} bytes"
        thread = describe_thread(owner.rank, owner.kernel, owner.launch, owner.block_idx, owner.thread_idx)
        lines = [
            f"{what} that a thread has stored: nothing orders the two",
            f"  in {allocation.cell(max(load.begin, store.begin))}",
            f"    stored with {store.how} order by {thread}",
            f"      at {describe_site(store.site)}",
            f"  {why}",
        ]
        return DataRace("\n".join(lines), f"the CPU, for rank {allocation.rank}", describe_site(load.site))
