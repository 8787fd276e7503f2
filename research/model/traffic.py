"""A tracer that counts what goes over each kind of link: bytes, messages and flags, call by call.

 a thread of rank r stores into memory of   r itself            "home"
                                            a rank of its node  "nvlink"
                                            any other rank      "network"
 the NIC of rank r writes for an entry      any other rank      "network", of the call that reserved the entry

Counted are the accesses themselves, as the emulator executes them. Nothing here knows what a kernel means to send.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from nbep.emulator.machine.kinds import KINDS
from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.emulator.machine.orders import WEAK
from nbep.emulator.tracing import Atomic

HOME, NVLINK, NETWORK = LINKS = ("home", "nvlink", "network")
ROW_ACCESS_BYTES = 16  # of a row at once; smaller accesses to own memory are to counts and choices, and hit caches
RING_CELLS = ("start", "end", "head", "tail")  # which of them depends on the call that the owner is in just now
QUEUES = "queue pairs"
_RESERVED = re.compile(r"RESERVED of queue pair (\d+) ")
_NAME = re.compile(r"\w+")


@dataclass
class Tally:
    """What went over one kind of link.

    payload    bytes of rows with their notes: bulk copies and stores of weak order, a NIC's writes; at "home" only
               what is stored 16 bytes at once or by bulk copies
    loads      bytes of rows that were read, in the same way; "home" alone has them
    messages   on the network: writes that a NIC was asked for, or bulk copies where the memory is mapped
    flags      ordered stores and atomics, by the name of the cell
    """

    payload: int = 0
    loads: int = 0
    messages: int = 0
    flags: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> dict[str, int]:
        """All of it by name; those that are 0 are left out. Flags by the name of their cell: `flags.tail`."""
        named = {"payload": self.payload, "loads": self.loads, "messages": self.messages}
        named |= {f"flags.{name}": count for name, count in self.flags.items()}
        return {name: value for name, value in named.items() if value}


class Traffic:
    """Pass it as `tracer=`. num_nvl_peers: ranks of a node.

    Attributes: tallies: by call and link, of all ranks together
    """

    def __init__(self, num_nvl_peers: int):
        self.num_nvl_peers = num_nvl_peers
        self.tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self._verbs: dict[int, str] = {}
        self._calls: dict[Any, str] = {}
        self._entries: defaultdict[tuple[int, int], list[str]] = defaultdict(list)  # (rank, queue pair) -> of each
        self._written: set[tuple[int, Any]] = set()  # entries whose first byte has come

    def enter(self, rank: int, verb: str) -> None:
        """What the rank launches from now on belongs to this call. What it has launched before has begun."""
        self._verbs[rank] = verb

    # --- hooks ----------------------------------------------------------------------------------------------------

    def on_launch(self, launch: Any) -> None:
        self._calls[launch] = self._verbs.get(launch.rank, "")

    def on_store(
        self, thread: Any, allocation: Any, offset: int, kind: str, value: Any, order: str, scope: str
    ) -> None:
        if _is_shared(allocation):
            return
        size = KINDS[kind].size
        if thread.rank >= NIC_NUMBERS:
            self._by_nic(thread, allocation, size, order)
            return
        if allocation.name == QUEUES:  # what a rank tells its NIC crosses no link
            return
        tally = self._tally(thread, allocation)
        if order not in WEAK:
            _flag(tally, allocation, offset)
        elif allocation.rank != thread.rank or size >= ROW_ACCESS_BYTES:
            tally.payload += size

    def on_copy(self, thread: Any, allocation: Any, offset: int, data: bytes, site: Any) -> None:
        if _is_shared(allocation):  # from this rank's memory: no kernel reads a peer's
            self._home(thread).loads += len(data)
            return
        tally = self._tally(thread, allocation)
        tally.payload += len(data)
        tally.messages += self._link(thread, allocation) == NETWORK

    def on_load(self, thread: Any, allocation: Any, offset: int, kind: str, value: Any, order: str, scope: str) -> None:
        is_row = order in WEAK and KINDS[kind].size >= ROW_ACCESS_BYTES
        if is_row and thread.rank < NIC_NUMBERS and not _is_shared(allocation):
            self._home(thread).loads += KINDS[kind].size

    def on_atomic(self, thread: Any, allocation: Any, offset: int, atomic: Atomic, order: str, scope: str) -> None:
        if _is_shared(allocation):
            return
        if thread.rank >= NIC_NUMBERS:
            _flag(self._tally_of_entry(thread), allocation, offset)
            return
        _flag(self._tally(thread, allocation), allocation, offset)
        if allocation.describe is not None:
            reserved = _RESERVED.match(allocation.describe(offset))
            if reserved is not None:
                entries = self._entries[thread.rank, int(reserved[1])]
                entries.extend([self._calls[thread.block.launch]] * atomic.operand)

    # --- what they share --------------------------------------------------------------------------------------------

    def _by_nic(self, thread: Any, allocation: Any, size: int, order: str) -> None:
        """A NIC's write for an entry; what it stores with an order, or at home, is how the software NIC works."""
        if order in WEAK and allocation.rank not in (thread.rank, thread.rank - NIC_NUMBERS):
            tally = self._tally_of_entry(thread)
            tally.payload += size
            if (thread.rank, thread.serving) not in self._written:
                self._written.add((thread.rank, thread.serving))
                tally.messages += 1

    def _link(self, thread: Any, allocation: Any) -> str:
        here, there = thread.rank, allocation.rank
        is_in_node = here // self.num_nvl_peers == there // self.num_nvl_peers
        return HOME if here == there else NVLINK if is_in_node else NETWORK

    def _tally(self, thread: Any, allocation: Any) -> Tally:
        """Of what a thread of a kernel does to an allocation."""
        return self.tallies[self._calls[thread.block.launch], self._link(thread, allocation)]

    def _home(self, thread: Any) -> Tally:
        return self.tallies[self._calls[thread.block.launch], HOME]

    def _tally_of_entry(self, thread: Any) -> Tally:
        """Of the call that has reserved the entry which a NIC is about."""
        queue_pair, index = thread.serving
        return self.tallies[self._entries[thread.rank - NIC_NUMBERS, queue_pair][index], NETWORK]


def _is_shared(allocation: Any) -> bool:
    return allocation.number == 0


def _flag(tally: Tally, allocation: Any, offset: int) -> None:
    text = allocation.name if allocation.describe is None else allocation.describe(offset)
    found = _NAME.match(text)
    name = found[0] if found else text
    tally.flags["ring" if name in RING_CELLS else name] += 1
