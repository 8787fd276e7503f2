"""The classic shapes, as programs of a few steps a thread.

A step is written as PTX would have it, less what is the same everywhere:

    st.weak x 1             store 1 to the cell x; orders weak, relaxed, volatile, release
    ld.acquire r0 x         load x to the register r0; orders weak, relaxed, volatile, acquire
    wait.acquire x 1        load x until it is at least 1
    add.acq_rel r0 x 1      add 1 to x, its old value to r0; also exch; orders relaxed, acquire, release, acq_rel
    cas.acq_rel r0 x 1 5    store 1 to x if that is 5, its old value to r0; the axioms call one that fails "fails"
    fence.acq_rel
    bar                     a barrier of all threads of the block

A scope may follow the order, `st.release.gpu x 1`; else it is the smallest one that reaches all threads. All cells are
0 at first.

Source: Jade Alglave, Luc Maranget, Michael Tautschnig, "Herding Cats" (TOPLAS 2014), for the names of the shapes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Where threads are: (rank, block of that rank) of each.
PLACES = {
    "a block": lambda count: [(0, 0)] * count,
    "a GPU": lambda count: [(0, i) for i in range(count)],
    "ranks": lambda count: [(i, 0) for i in range(count)],
}
REACH = {"cta": 1, "gpu": 2, "sys": 3}
WEAK_ORDERS = frozenset(("weak",))
RELEASING = frozenset(("release", "acq_rel"))
ACQUIRING = frozenset(("acquire", "acq_rel"))


class Step(NamedTuple):
    """One step of a thread. register is "" where there is none; value is what is stored, added or waited for; compare
    is what a compare-and-swap has to find."""

    what: str
    order: str
    scope: str
    register: str
    cell: str
    value: int
    compare: int = 0

    @property
    def reads(self) -> bool:
        return self.what in ("ld", "wait", "fails") or self.modifies

    @property
    def writes(self) -> bool:
        return self.what == "st" or self.modifies

    @property
    def modifies(self) -> bool:
        return self.what in ("add", "exch", "cas")

    def may_read(self, value: int) -> bool:
        """Whether it is over, and what it says it is, with this value."""
        if self.what == "wait":
            return value >= self.value
        return self.what not in ("cas", "fails") or (value == self.compare) == (self.what == "cas")

    @property
    def is_strong(self) -> bool:
        return self.order not in WEAK_ORDERS


class Program(NamedTuple):
    """A shape with some orders.

    weak: the outcome that tells: values of registers, and of cells at the end
    """

    shape: str
    threads: tuple[str, ...]
    where: str
    weak: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.where}: {' || '.join(self.threads)}"

    def is_weak(self, outcome: Iterable[tuple[str, int]]) -> bool:
        return self.weak.items() <= set(outcome)

    @property
    def places(self) -> list[tuple[int, int]]:
        return PLACES[self.where](len(self.threads))

    @property
    def steps(self) -> list[list[Step]]:
        scope = {"a block": "cta", "a GPU": "gpu", "ranks": "sys"}[self.where]
        return [[parse(text.strip(), scope) for text in thread.split(";")] for thread in self.threads]

    @property
    def cells(self) -> list[str]:
        return sorted({step.cell for thread in self.steps for step in thread if step.cell})


def parse(text: str, scope: str) -> Step:
    """A step, with this scope unless it names one."""
    word, *rest = text.split()
    what, *qualifiers = word.split(".")
    order = qualifiers[0] if qualifiers else ""
    scope = qualifiers[1] if len(qualifiers) > 1 else scope
    if what == "bar":
        return Step(what, "", "cta", "", "", 0)
    if what == "fence":
        return Step(what, order, scope, "", "", 0)
    if what == "ld":
        return Step(what, order, scope, rest[0], rest[1], 0)
    if what in ("st", "wait"):
        return Step(what, order, scope, "", rest[0], int(rest[1]))
    return Step(what, order, scope, rest[0], rest[1], *map(int, rest[2:]))


ALL = tuple(PLACES)


def each(shape: str, weak: str, *threads: str, places: tuple[str, ...] = ("a GPU",)) -> list[Program]:
    """The program in each of the places. weak reads `r0=1 r1=0`."""
    outcome = {name: int(value) for name, value in (part.split("=") for part in weak.split())}
    return [Program(shape, threads, place, outcome) for place in places]


# MP: message passing. The payload is weak, so these are the ones that `checked` is for.
MP = [
    *each("MP", "r0=0", "st.weak x 1; st.release y 1", "wait.acquire y 1; ld.weak r0 x", places=ALL),
    *each("MP", "r0=0", "st.weak x 1; st.relaxed y 1", "wait.acquire y 1; ld.weak r0 x", places=ALL),
    *each("MP", "r0=0", "st.weak x 1; st.release y 1", "wait.relaxed y 1; ld.weak r0 x", places=ALL),
    *each("MP", "r0=0", "st.weak x 1; st.relaxed y 1", "wait.relaxed y 1; ld.weak r0 x", places=ALL),
    *each("MP", "r0=0", "st.weak x 1; st.volatile y 1", "wait.volatile y 1; ld.weak r0 x", places=("ranks",)),
    *each("MP", "r0=0", "st.weak x 1; fence.acq_rel; st.relaxed y 1", "wait.relaxed y 1; fence.acq_rel; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; fence.acq_rel; st.relaxed y 1", "wait.acquire y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; fence.acq_rel; st.relaxed y 1", "wait.relaxed y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "fence.acq_rel; st.weak x 1; st.relaxed y 1", "wait.acquire y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; st.release y 1; st.relaxed y 2", "wait.acquire y 2; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; add.release r1 y 1", "wait.acquire y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; add.relaxed r1 y 1", "wait.acquire y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; bar", "bar; ld.weak r0 x", places=("a block",)),
    *each("MP", "r0=0", "st.weak x 1; st.release.cta y 1", "wait.acquire y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; st.release y 1", "wait.acquire.cta y 1; ld.weak r0 x"),
    *each("MP", "r0=0", "st.weak x 1; st.release.gpu y 1", "wait.acquire y 1; ld.weak r0 x", places=("ranks",)),
    *each("MP", "r0=0", "st.weak x 1; st.release y 1", "wait.acquire.gpu y 1; ld.weak r0 x", places=("ranks",)),
    *each(
        "MP",
        "r0=0",
        "st.weak x 1; fence.acq_rel.gpu; st.relaxed y 1",
        "wait.acquire y 1; ld.weak r0 x",
        places=("ranks",),
    ),
    *each("MP", "r0=1 r1=0", "st.relaxed x 1; st.relaxed y 1", "ld.relaxed r0 y; ld.relaxed r1 x", places=ALL),
    *each("MP", "r0=1 r1=0", "st.relaxed x 1; st.release y 1", "ld.acquire r0 y; ld.relaxed r1 x", places=ALL),
]
# A message that goes on: through another thread, or through an atomic of one.
CHAINS = [
    *each(
        "ISA2",
        "r0=0",
        "st.weak x 1; st.release y 1",
        "wait.acquire y 1; st.release z 1",
        "wait.acquire z 1; ld.weak r0 x",
        places=ALL,
    ),
    *each(
        "ISA2",
        "r0=0",
        "st.weak x 1; st.release y 1",
        "wait.relaxed y 1; st.release z 1",
        "wait.acquire z 1; ld.weak r0 x",
    ),
    *each(
        "ISA2",
        "r0=0",
        "st.weak x 1; st.release y 1",
        "wait.acquire y 1; st.relaxed z 1",
        "wait.acquire z 1; ld.weak r0 x",
    ),
    *each(
        "MP+add",
        "r0=0",
        "st.weak x 1; add.release r1 y 1",
        "wait.relaxed y 1; add.relaxed r2 y 1",
        "wait.acquire y 2; ld.weak r0 x",
        places=ALL,
    ),
    *each(
        "MP+add",
        "r0=0",
        "st.weak x 1; add.relaxed r1 y 1",
        "wait.relaxed y 1; add.release r2 y 1",
        "wait.acquire y 2; ld.weak r0 x",
    ),
    *each(
        "MP+st",
        "r0=0",
        "st.weak x 1; st.release y 1",
        "wait.relaxed y 1; st.relaxed y 2",
        "wait.acquire y 2; ld.weak r0 x",
    ),
    *each(
        "WRC",
        "r0=0",
        "st.relaxed x 1",
        "wait.relaxed x 1; st.release y 1",
        "wait.acquire y 1; ld.relaxed r0 x",
        places=ALL,
    ),
    *each("WRC", "r0=0", "st.relaxed x 1", "wait.relaxed x 1; st.relaxed y 1", "wait.acquire y 1; ld.relaxed r0 x"),
    *each("WRC", "r0=0", "st.relaxed x 1", "wait.relaxed x 1; st.release y 1", "wait.relaxed y 1; ld.relaxed r0 x"),
]
# Shapes in which each thread stores and loads. Only fence.sc forbids SB, R and IRIW; no kernel of nbep has one.
BUFFERS = [
    *each("SB", "r0=0 r1=0", "st.relaxed x 1; ld.relaxed r0 y", "st.relaxed y 1; ld.relaxed r1 x", places=ALL),
    *each("SB", "r0=0 r1=0", "st.release x 1; ld.acquire r0 y", "st.release y 1; ld.acquire r1 x", places=ALL),
    *each(
        "SB",
        "r0=0 r1=0",
        "st.relaxed x 1; fence.acq_rel; ld.relaxed r0 y",
        "st.relaxed y 1; fence.acq_rel; ld.relaxed r1 x",
    ),
    *each("SB", "r0=0 r1=0", "add.acq_rel r2 x 1; add.acq_rel r0 y 0", "add.acq_rel r3 y 1; add.acq_rel r1 x 0"),
    *each("LB", "r0=1 r1=1", "ld.relaxed r0 x; st.relaxed y 1", "ld.relaxed r1 y; st.relaxed x 1", places=ALL),
    *each("LB", "r0=1 r1=1", "ld.acquire r0 x; st.release y 1", "ld.acquire r1 y; st.release x 1"),
    *each("R", "y=2 r0=0", "st.relaxed x 1; st.relaxed y 1", "st.relaxed y 2; ld.relaxed r0 x"),
    *each("R", "y=2 r0=0", "st.relaxed x 1; st.release y 1", "st.release y 2; ld.acquire r0 x"),
    *each("S", "x=2", "st.relaxed x 2; st.relaxed y 1", "wait.relaxed y 1; st.relaxed x 1"),
    *each("S", "x=2", "st.relaxed x 2; st.release y 1", "wait.acquire y 1; st.relaxed x 1"),
    *each("2+2W", "x=1 y=1", "st.relaxed x 1; st.relaxed y 2", "st.relaxed y 1; st.relaxed x 2", places=ALL),
    *each("2+2W", "x=1 y=1", "st.release x 1; st.release y 2", "st.release y 1; st.release x 2"),
    *each(
        "IRIW",
        "r0=0 r1=0",
        "st.relaxed x 1",
        "st.relaxed y 1",
        "wait.relaxed x 1; ld.relaxed r0 y",
        "wait.relaxed y 1; ld.relaxed r1 x",
        places=ALL,
    ),
    *each(
        "IRIW",
        "r0=0 r1=0",
        "st.relaxed x 1",
        "st.relaxed y 1",
        "wait.acquire x 1; ld.acquire r0 y",
        "wait.acquire y 1; ld.acquire r1 x",
    ),
    *each(
        "IRIW",
        "r0=0 r1=0",
        "st.release x 1",
        "st.release y 1",
        "wait.acquire x 1; ld.acquire r0 y",
        "wait.acquire y 1; ld.acquire r1 x",
    ),
]
# One cell: never wrong, as long as all accesses are strong and reach each other.
COHERENCE = [
    *each("CoRR", "r0=1 r1=0", "st.relaxed x 1", "ld.relaxed r0 x; ld.relaxed r1 x", places=ALL),
    *each("CoWW", "x=1", "st.relaxed x 1; st.relaxed x 2", "ld.relaxed r0 x", places=ALL),
    *each("CoWR", "r0=0", "st.relaxed x 1; ld.relaxed r0 x", "st.relaxed x 2"),
    *each("CoRW", "r0=1", "ld.relaxed r0 x; st.relaxed x 1", "st.relaxed x 2"),
    *each("CoRW2", "r0=2 x=2", "ld.relaxed r0 x; st.relaxed x 1", "st.relaxed x 2"),
    *each("CoRR", "r0=1 r1=0", "st.weak x 1", "ld.weak r0 x; ld.weak r1 x"),
    *each("add", "r0=0 r1=0", "add.relaxed r0 x 1", "add.relaxed r1 x 1", places=ALL),
    *each("add", "r0=0 r1=0", "add.relaxed.cta r0 x 1", "add.relaxed.cta r1 x 1"),
]
# A ring's head: the load of a slot and the store over it. PTX lets the load see it, unless the head is released.
HEADS = [
    *each("MP, load first", "r0=1", "ld.weak r0 x; st.release y 1", "wait.acquire y 1; st.weak x 1", places=ALL),
    *each("MP, load first", "r0=1", "ld.weak r0 x; st.relaxed y 1", "wait.relaxed y 1; st.weak x 1", places=ALL),
    *each("MP, load first", "r0=1", "ld.weak r0 x", "st.weak x 1"),
]
PROGRAMS = [*MP, *CHAINS, *BUFFERS, *COHERENCE, *HEADS]
