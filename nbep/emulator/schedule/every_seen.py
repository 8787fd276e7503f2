"""What a thread asks of a value that it has loaded: two values that give the same answers are no different for it.

A load, or an atomic add or exchange, gives a `Seen`. Comparing it is a question, also behind a shift, a mask, or a sum
with a number. Anything else needs the number itself, and then the load is *exact*. `seen >= 3` has the same answer for
all later values of a counter that grows: so it does not matter whether such a store comes before the load. The load
counts as made as early as its answers allow, and its thread has seen no more than the cell held then. An atomic whose
old value no thread asks for shows its thread nothing at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..machine.kinds import KINDS, Loaded, wrap
from ..machine.memory import Allocation
from ..machine.orders import SCOPES
from ..models.knowledge import Access as CheckedAccess
from ..models.knowledge import Knowledge, Message, distance, last_to, latest

# What was done to the value before it was compared, the comparison, and with what.
Question = tuple[tuple[tuple[str, int], ...], str, int]

NEVER = 4  # more than any scope reaches
INTEGERS = frozenset(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"))
SIGNED = {1: "s8", 2: "s16", 4: "s32", 8: "s64", 16: "v4"}  # how a cell of so many bytes is read
# What the others make of such a number before they ask.
UNSIGNED = {kind: (("and", (1 << 8 * KINDS[kind].size) - 1),) for kind in INTEGERS if not KINDS[kind].signed}


STEPS: dict[str, Callable[[int, int], int]] = {
    "rshift": operator.rshift,
    "and": operator.and_,
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda value, other: other - value,
}


def signed(value: Any, kind: str) -> int:
    """What a cell holds in which a value of an integer kind is stored."""
    return wrap(value, SIGNED[KINDS[kind].size])


def answer(question: Question, value: int) -> bool:
    steps, name, other = question
    for step, operand in steps:
        value = STEPS[step](value, operand)
    return bool(getattr(operator, name)(value, other))


def agree(asked: dict[Question, bool], value: int) -> bool:
    """Whether a value gives the answers that were given."""
    return all(answer(question, value) == given for question, given in asked.items())


def is_final(question: Question, given: bool) -> bool:
    """Whether each greater value gives the same answer."""
    steps, name, _ = question
    return not steps and given == {"lt": False, "le": False, "gt": True, "ge": True}.get(name)


class Entry:
    """What a cell held from one store on.

    message: what that store publishes; stores: the store, for `checked`
    step: the number of the step, None if it was none; who: of which thread
    is_add: whether it is an add that may commute with others
    is_alone: whether the stores before it are known to come before it: it is no add, or the adds are all of its thread
    phase: of a barrier, to which the store belongs: those of one phase commute
    lacks: how many arrivals and bytes that phase lacked before it
    least: the least reach of a reader that hears at least what it heard from the cell before; NEVER if none does
    """

    __slots__ = (
        "value", "message", "stores", "step", "who", "is_add", "is_alone", "phase", "lacks", "least", "is_wall",
    )  # fmt: skip

    def __init__(self, value: int, message: Message | None, stores: tuple, is_wall: bool = False):
        self.value = value
        self.message = message
        self.stores = stores
        self.step: int | None = None
        self.who: Any = None
        self.is_add = False
        self.is_alone = True
        self.least = 1
        self.is_wall = is_wall
        self.phase = 0
        self.lacks: tuple[int, int] | None = None


class Cell:
    """The bytes that one size of access meets, and what they held: as signed numbers, whatever kind stored them.

    is_mixed: others meet them with another size: then nothing commutes
    has_phases: whether it is a barrier, which holds how many of its phases are over
    """

    __slots__ = ("allocation", "offset", "size", "kind", "entries", "is_mixed", "has_phases")

    def __init__(self, allocation: Allocation, offset: int, size: int):
        self.allocation = allocation
        self.offset = offset
        self.size = size
        self.kind = SIGNED.get(size, "")
        self.entries: list[Entry] = []
        self.is_mixed = self.has_phases = False

    def look(self, value: int) -> None:
        """Before an access: whatever has changed it, but for stores that are steps, is a wall."""
        message = self.allocation.messages.get(self.offset)
        stores = self.allocation.last_stores.get(self.offset >> 4, ())
        last = self.entries[-1] if self.entries else None
        is_same = last is not None and last.value == value and last.message is message
        if last is not None and is_same and self.is_mixed:  # another size may have stored the value that was there
            is_same = self.last_to(stores) is self.last_to(last.stores)
        if not is_same:
            end = self.offset + self.size
            here = tuple(store for store in stores if store.begin < end and self.offset < store.end)
            self.entries.append(Entry(value, message, here, is_wall=True))

    def wrap(self, value: int) -> int:
        """A sum as the cell would hold it; vectors and fractions are not added to."""
        return wrap(value, self.kind) if self.kind in INTEGERS else value

    def last_to(self, stores: Iterable[CheckedAccess]) -> CheckedAccess | None:
        return last_to(stores, self.offset, self.offset + self.size)

    def add(self, entry: Entry) -> int:
        """A store that is a step. Returns its number."""
        before = self.entries[-1]
        entry.least = least_reach(before.message, entry.message)
        is_first = not before.is_add or before.phase != entry.phase
        is_same = before.is_alone and before.who == entry.who and not before.is_wall
        entry.is_alone = not entry.is_add or is_first or is_same
        self.entries.append(entry)
        return len(self.entries) - 1


class Cells:
    """All cells of a run."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int, int], Cell] = {}
        self.by_word: dict[Any, set[Cell]] = {}
        self.kept: list[Any] = []  # so that no other object gets an id that is in use
        self.of_barriers: dict[Any, Cell] = {}

    def of(self, allocation: Allocation, offset: int, size: int, words: Iterable[Any]) -> Cell:
        """words: what the tree takes for its words"""
        history = id(allocation.messages)  # views of an array share it
        cell = self.cells.get((history, offset, size))
        if cell is None:
            cell = self.cells[history, offset, size] = Cell(allocation, offset, size)
            self.kept.append(allocation.messages)
            own = ((history, word) for word in range(offset >> 2, (offset + size + 3) >> 2))
            for word in (*own, *words):
                others = self.by_word.setdefault(word, set())
                others.add(cell)
                if len(others) > 1:
                    for one in others:
                        one.is_mixed = True
        return cell

    def of_phases(self, barrier: Any, phases: int) -> Cell:
        """Of an mbarrier, or of a named one. phases: how many of them are over"""
        cell = self.of_barriers.get(barrier)
        if cell is None:
            cell = self.of_barriers[barrier] = Cell(barrier, 0, 8)
            cell.has_phases = True
            cell.entries.append(Entry(phases, None, (), is_wall=True))
        return cell


class Reading:
    """A load, or the read of an add: which cell, when, and what was asked of the value.

    index: the entry that was there; position: the earliest one that gives the same answers
    proxies: how many can still be asked
    is_old: whether it is the value that an atomic has replaced, which tells nothing before somebody asks for it
    grows: whether that is an add of no negative number
    fence: the scope of a fence that its thread has made since; "" if it has made none
    storing: the stores of its thread then, whose release tells of what it has read, also if that is asked for later
    """

    __slots__ = (
        "thread", "cell", "index", "position", "order", "scope", "is_old", "grows", "asked", "is_exact", "proxies",
        "fence", "storing",
    )  # fmt: skip

    def __init__(self, thread: Any, cell: Cell, position: int, order: str, scope: str, is_old: bool):
        self.thread = thread
        self.cell = cell
        self.index = len(cell.entries) - 1
        self.position = position
        self.order = order
        self.scope = scope
        self.is_old = is_old
        self.grows = False
        self.asked: dict[Question, bool] = {}
        self.is_exact = False
        self.proxies = 0
        self.fence = ""
        self.storing: Any = getattr(thread, "storing", None)

    @property
    def reach(self) -> int:
        return SCOPES[self.scope]

    @property
    def is_open(self) -> bool:
        """Whether more may be asked."""
        return self.proxies > 0

    @property
    def told(self) -> dict[Question, bool]:
        """What its thread knows of the value."""
        return {((), "eq", self.cell.entries[self.index].value): True} if self.is_exact else dict(self.asked)

    def ask(self, question: Question) -> None:
        if self.is_exact or question in self.asked:
            return
        entries, at = self.cell.entries, self.index
        given = answer(question, entries[at].value)
        if self.is_old and not (self.grows and is_final(question, given)):
            self.settle()
            return
        self.asked[question] = given
        while at > self.position and not entries[at].is_wall and entries[at].least <= self.reach:
            if answer(question, entries[at - 1].value) != given:  # else it may as well have come before that entry
                break
            at -= 1
        self.hear(at)

    def settle(self) -> None:
        """The number itself is needed."""
        if not self.is_exact:
            self.is_exact = True
            self.hear(self.index)

    def hear(self, position: int) -> None:
        if position > self.position or self.is_old:
            self.position = position
            self.thread.hear_entry(self)


class Seen(Loaded):
    """A number that was loaded."""

    __slots__ = ("reading", "value", "steps")
    __array_ufunc__ = None

    def __init__(self, reading: Reading, value: int, steps: tuple[tuple[str, int], ...] = ()):
        self.reading = reading
        self.value = value
        self.steps = steps
        reading.proxies += 1

    def __del__(self) -> None:
        self.reading.proxies -= 1

    def settle(self) -> int:
        self.reading.settle()
        return self.value

    def compare(self, name: str, other: Any) -> bool:
        other = settled(other)
        if isinstance(other, (int, np.integer)):
            self.reading.ask((self.steps, name, int(other)))
        else:
            self.reading.settle()
        return getattr(operator, name)(self.value, other)

    def derive(self, name: str, other: Any) -> Any:
        """The result of a step, which is a number that was loaded, too."""
        other = settled(other)
        if type(other) is not int:
            return STEPS[name](self.settle(), other)
        return Seen(self.reading, STEPS[name](self.value, other), (*self.steps, (name, other)))

    def __bool__(self) -> bool:
        return self.compare("ne", 0)

    def __neg__(self) -> Any:
        return self.derive("rsub", 0)


def settled(value: Any) -> Any:
    """The number itself, if it is one that was loaded."""
    return value.settle() if isinstance(value, Seen) else value


def exactly(function: Callable, is_reflected: bool = False) -> Callable:
    def method(self: Seen, *others: Any) -> Any:
        numbers = [settled(other) for other in others]
        return function(*numbers, self.settle()) if is_reflected else function(self.settle(), *numbers)

    return method


def asking(how: Callable, name: str) -> Callable:
    return lambda self, other: how(self, name, other)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Seen, f"__{_name}__", asking(Seen.compare, _name))
for _name in ("rshift", "and", "add", "sub", "rsub"):
    setattr(Seen, f"__{_name}__", asking(Seen.derive, _name))
for _name in ("and", "add"):
    setattr(Seen, f"__r{_name}__", asking(Seen.derive, _name))
BINARY: dict[str, Callable] = {
    "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "divmod": divmod, "pow": operator.pow,
    "lshift": operator.lshift, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
UNARY: dict[str, Callable] = {
    "pos": operator.pos, "abs": abs, "invert": operator.invert, "round": round, "int": int, "index": int, "trunc": int,
    "float": float, "repr": repr, "format": format, "hash": hash,
}  # fmt: skip
for _name, _function in (BINARY | UNARY).items():
    setattr(Seen, f"__{_name}__", exactly(_function))
for _name, _function in {**BINARY, "rshift": operator.rshift}.items():
    setattr(Seen, f"__r{_name}__", exactly(_function, is_reflected=True))


# --- what a cell tells --------------------------------------------------------------------------------------------


def least_reach(before: Message | None, after: Message | None) -> int:
    """The least reach of a reader whom a later message tells at least what an earlier one did."""
    if before is None:
        return 1
    if after is None:
        return NEVER
    reaches = range(1, SCOPES["sys"] + 1)
    if all(covers(after.heard(reach), before.heard(reach)) for reach in reaches):
        return shared_reach([before, after])
    return NEVER


def shared_reach(messages: Iterable[Message | None]) -> int:
    """The least reach of a reader who hears some messages alike, as far as scopes go, if each passes on the others'."""
    there = [message for message in messages if message is not None]
    far = max((distance(one.owner, other.owner) for one in there for other in there), default=1)
    return far if far == 1 or min(min(message.parts) for message in there) >= far else NEVER


def covers(more: Knowledge, less: Knowledge) -> bool:
    pairs = zip(more, less, strict=True)
    return all(one is of or all(latest(one, clock) >= at for clock, at in of.items()) for one, of in pairs)
