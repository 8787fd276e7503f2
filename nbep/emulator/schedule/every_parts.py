"""Parts of a program that share nothing while they run are explored one after the other, so their schedules add up.

A part is blocks of which some depend on each other while they run: what one has done was not known when the other one
started. Other parts meet it at the start and at the end of kernels alone. All parts are explored in turn: only races
within the part under way are reversed. That is right as long as in all runs, of whichever part,

- a part leaves the same values in all words that others, or hosts, read: else these are one part with it;
- two parts with several schedules touch no word of which one stores, unless the one kernel is over before the other
  one starts: else they are one;
- the blocks of a kernel learn of the same other kernels while they run, by the order of steps and by what releases
  tell, and hosts are in no part with several schedules: else all is one.

For take any run of the whole program, and in it the first step that is in no run explored. What comes before it in its
part has then been seen, with the same values from elsewhere, behind the same kernels. So a run of this part has it.

Where something turns out to be one part, all begins again with that known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from ..machine.stream import MAX_BLOCK
from ..models.knowledge import MAX_WARPS, OF_THREAD, STREAM_BITS, latest
from .every_step import Clock, Step, Underway, Who, join, name_of, words_of

Block = tuple[Any, ...]  # the first of a `Who`
HOST: Block = ()  # all hosts, and what they ask of streams


def block_of(who: Who) -> Block:
    return HOST if who[1] in ("", "event") else who[:4]


def kernels_before(steps: list[Step], clocks: list[Clock]) -> set[Block]:
    """The kernels that have made a step before those who have these clocks go on."""
    before: Clock = {}
    for at in sorted({at for clock in clocks for at in clock.values() if at < len(steps)}, reverse=True):
        if before.get(steps[at].who, -1) < at:
            join(before, steps[at].clock)
    return {who[:3] for who in before if block_of(who)}


class Parts:
    """What is known of a program's parts, from all runs so far.

    under_way: a block of the part whose races are reversed; None in the first run; found: how many schedules it has had
    first: whether the first run was one; racing: blocks of parts that have races
    done: of parts that have been explored; several: of those that have more than one schedule
    reads, stores: words of global memory, by block
    left: what each block has stored last in the first run; varied: where that differs in another one
    viewed: which bytes hosts have had views of, by name of the memory
    always, ever: of which kernels blocks learn while they run, in all runs and in some: by the order of steps, and by
        what releases tell; and which ones are over, as a kernel knows at its start
    is_one: whether it has turned out that parts cannot be explored apart
    """

    def __init__(self) -> None:
        self.root: dict[Block, Block] = {}
        self.under_way: Block | None = None
        self.found, self.first = 0, True
        self.racing: set[Block] = set()
        self.several: set[Block] = set()
        self.done: set[Block] = set()
        self.reads: defaultdict[Block, set[Any]] = defaultdict(set)
        self.stores: defaultdict[Block, set[Any]] = defaultdict(set)
        self.left: dict[Block, dict[Any, bytes]] = {}
        self.viewed: dict[Any, set[tuple[int, int]]] = {}
        self.varied: defaultdict[Block, set[Any]] = defaultdict(set)
        self.always: dict[Any, frozenset[Any]] = {}
        self.ever: dict[Any, frozenset[Any]] = {}
        self.is_one = False
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.has_joined = False
        self.stored: defaultdict[Block, dict[Any, bytes]] = defaultdict(dict)
        self.serials: dict[int, Block] = {}
        self.over: list[tuple[Any, Block]] = []
        self.ends: list[tuple[Block, list[Clock], Clock]] = []

    # --- which blocks are one part --------------------------------------------------------------------------------

    def part(self, block: Block) -> Block:
        while block in self.root:
            block = self.root[block]
        return block

    def parts(self, blocks: Iterable[Block]) -> set[Block]:
        return set(map(self.part, blocks))

    def join(self, one: Block, other: Block) -> None:
        one, other = self.part(one), self.part(other)
        if one != other:
            self.root[max(one, other)] = min(one, other)
            self.has_joined = True

    def reverses(self, earlier: Who, later: Who) -> bool:
        """Whether the race of two is to be reversed in the exploration under way."""
        one = block_of(later)
        self.join(block_of(earlier), one)
        self.racing.add(one)
        return self.under_way is not None and self.part(one) == self.part(self.under_way)

    def next(self) -> bool:
        """The part under way is done: go on to the next one, if there is one."""
        if self.under_way is not None:
            self.done.add(self.under_way)
            self.found = 0
        left = self.parts(self.racing) - self.parts(self.done)
        self.under_way = min(left) if left else self.under_way
        return bool(left)

    # --- what runs show -------------------------------------------------------------------------------------------

    def note(self, block: Block, allocation: Any, access: Any) -> None:
        """A block accesses bytes of global memory."""
        if access.verb == "load" or access.is_atomic:
            self.reads[block] |= words_of(name_of(allocation), access.begin, access.end - access.begin)
        if access.verb == "store":
            self.note_left(block, allocation, access.begin, access.end)

    def note_left(self, block: Block, allocation: Any, begin: int, end: int) -> None:
        """A block has stored bytes; bulk stores come twice, the last time when their bytes are there."""
        name, left = name_of(allocation), self.stored[block]
        self.viewed[name] = allocation.viewed
        for word in words_of(name, begin, end - begin):
            left[word] = bytes(allocation.memory[4 * word[1] : 4 * word[1] + 4])

    def launch_over(self, launch: Any, begin: Clock, running: list[Any]) -> None:
        """A kernel is over: what its blocks have left, and of whom they have learned. begin: what came before it"""
        place, title = launch.place, (launch.rank, launch.name, launch.number)
        of_block: defaultdict[Block, list[Any]] = defaultdict(list)
        for one in running:
            of_block[one.who[:4]].append(one)
        self.learn(title, HOST, "start", frozenset(other for known, other in self.over if known.is_before(place)))
        for block, those in of_block.items():
            told = {id(one.knowledge): one.knowledge for one in those if not isinstance(one, Underway)}.values()
            for how in ("stores", "loads"):
                known = getattr(launch.known, how)
                new = {
                    (clock, number)
                    for knowledge in told
                    for clock, number in getattr(knowledge, how).items()
                    if clock > 0 and number > latest(known, clock)
                }
                heard = {of for clock, number in new for of in self.launches_of(clock, number)}
                self.learn(title, block, how, frozenset(heard - {title}))
            self.ends.append((block, [one.clock for one in those], begin))
            now = self.stored[block]
            before = self.left.setdefault(block, now)
            self.varied[block] |= {word for word, _ in now.items() ^ before.items()}
        self.over.append((place, title))

    def launches_of(self, clock: int, number: int) -> Iterable[Block]:
        """Which kernels those have known, at least when these started, who know a signal."""
        within = clock & ((1 << STREAM_BITS) - 1)
        if not within:
            return [title for place, title in self.over if place.clock == clock and place.end <= number]
        serial = (within - OF_THREAD) // MAX_BLOCK if within >= OF_THREAD else within // MAX_WARPS
        return [self.serials[serial][:3]]

    def learn(self, title: Block, block: Block, how: str, those: frozenset[Any]) -> None:
        what = title, how, block
        self.always[what] = self.always.get(what, those) & those
        self.ever[what] = self.ever.get(what, those) | those

    def learns_the_same(self) -> bool:
        """Whether a kernel's blocks learn in all runs of all kernels of which one of them learns in some run."""
        found: defaultdict[Any, set[Any]] = defaultdict(set)
        for (title, how, _), those in self.always.items():
            found[title, how] |= those
        return all(those <= found[title, how] for (title, how, _), those in self.ever.items())

    def end(self, steps: list[Step], linked: set[tuple[Who, Who]], is_redundant: bool) -> None:
        """A run is over. linked: steps of whom depend on each other, and nothing else orders them"""
        self.found += not is_redundant
        if self.under_way is None:
            self.first = not is_redundant
        if self.found > 1 and self.under_way is not None:
            self.several.add(self.part(self.under_way))
        for earlier, later in linked:
            self.join(block_of(earlier), block_of(later))
        for block, clocks, begin in self.ends:
            come, known = (kernels_before(steps, of) for of in (clocks, [begin]))
            self.learn(block[:3], block, "steps", frozenset(come - known - {block[:3]}))
        for block, left in self.stored.items():
            self.stores[block] |= left.keys()
        self.is_one |= any(step.who[3] < 0 for step in steps)  # blocks that wait for SMs
        if len(self.parts(self.racing)) < 2:
            return
        self.is_one |= HOST in self.several or not self.learns_the_same()
        several = self.parts(self.several)
        blocks = [block for block in self.reads.keys() | self.stores.keys() if self.part(block) in several]
        for one, other in combinations(blocks, 2):  # in which order the two store there may differ
            if self.part(one) == self.part(other):
                self.varied[one] |= self.stores[one] & self.stores[other]
        for one, words in self.varied.items():
            for other in [other for other in self.reads if not words.isdisjoint(self.reads[other])]:
                self.join(one, other)
            if any(map(self.host_sees, words)):
                self.join(one, HOST)
        for one, other in combinations(blocks, 2):
            if self.part(one) != self.part(other) and not self.is_apart(one, other):
                self.join(one, other)

    def is_apart(self, one: Block, other: Block) -> bool:
        """Whether two blocks touch nothing of which one stores, or one kernel is over before the other one starts."""
        both = one[:3], other[:3]
        if any(first in self.always.get((last, "start", HOST), ()) for first, last in (both, both[::-1])):
            return True
        ways = (self.stores[one], self.reads[other] | self.stores[other]), (self.stores[other], self.reads[one])
        return all(stored.isdisjoint(touched) for stored, touched in ways)

    def host_sees(self, word: Any) -> bool:
        """Whether a host has a view of a word, or has mapped an array of its own there."""
        name, at = word
        return name[2] < 0 or any(begin < 4 * at + 4 and 4 * at < end for begin, end in self.viewed[name])
