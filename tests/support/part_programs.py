"""Programs for `oracle` that fall into parts: two pairs of blocks with cells of their own, and kernels behind them."""

from __future__ import annotations

import random

from oracle import Op, Program, Thread
from oracle_programs import lone

ONE, OTHER, REST = (0, 8), (16, 24), (32, 40)  # cells of one pair, of the other one, and what nobody has by right
NUM_BYTES = 64
# Two blocks of which each waits for the other one: their kernels run at the same time in all schedules.
MEETING = (
    (Op("st", "release", 48, 1), Op("wait", "acquire", 56, 1)),
    (Op("st", "release", 56, 1), Op("wait", "acquire", 48, 1)),
)


class Draw:
    """Draws steps. stray: how often one is at any cell; weak: how often it is weak; waits: and a wait"""

    def __init__(self, seed: object):
        self.random = random.Random(f"parts {seed}")
        self.stray = self.random.choice((0, 0, 0.1, 0.25))
        self.weak = self.random.choice((0, 0, 0.1, 0.25))
        self.waits = self.random.choice((0.02, 0.06))

    def happens(self, share: float) -> bool:
        return self.random.random() < share

    def step(self, cells: tuple[int, ...], answers: int) -> Op:
        draw = self.random
        cell = draw.choice(ONE + OTHER + REST if self.happens(self.stray) else cells)
        what = "wait" if self.happens(self.waits) else draw.choice(("st", "st", "ld", "ld", "ld", "add", "exch", "cas"))
        orders = {"st": ("relaxed", "release"), "ld": ("relaxed", "acquire"), "wait": ("relaxed", "acquire")}
        order = draw.choice(orders.get(what, ("relaxed", "release", "acquire", "acq_rel")))
        if what in ("st", "ld") and self.happens(self.weak):
            order = "weak"
        asks = {"add": ("all", "none", "least", "late"), "ld": ("all", "all", "least", "late")}
        op = Op(what, order, cell, draw.randint(1, 2), other=draw.randint(0, 2))
        op = op._replace(asks=draw.choice(asks.get("add" if what == "exch" else what, ("all",))))
        given = draw.randrange(answers) if answers and what != "wait" and self.happens(0.35) else -1
        return op._replace(given=given)

    def thread(self, cells: tuple[int, ...], *lengths: int) -> Thread:
        steps: list[Op] = []
        for _ in range(self.random.choice(lengths)):
            answers = sum(op.what in ("ld", "add", "exch", "cas") and op.asks != "none" for op in steps)
            steps.append(self.step(cells, answers))
        return tuple(steps)

    def of_host(self, share: float) -> list[Op]:
        if not self.happens(share):
            return []
        cell = self.random.choice(ONE + OTHER + REST)
        store = Op("st", "release", cell, self.random.randint(1, 2))
        return [
            self.random.choice(
                (Op("ld", "acquire", cell), Op("ld", "weak", cell), store, Op("wait", "acquire", cell, 1))
            )
        ]


def in_parts(seed: object) -> Program:
    """A kernel of each rank with a block of each pair, or one kernel with all; then maybe another one of each rank."""
    draw = Draw(seed)
    first, second = ([lone(draw.thread(cells, 1, 2, 2, 3)) for cells in (ONE, OTHER)] for _ in range(2))
    for blocks in (first, second):
        if draw.happens(0.2):
            blocks.append(lone(draw.thread(ONE + OTHER + REST, 1)))
    draw.random.shuffle(second)
    match draw.random.choice(("one kernel", "one kernel", "meet", "meet", "meet", "")):
        case "one kernel":
            first, second = first + second, [lone(draw.thread(ONE + OTHER + REST, 1))]
        case "meet":
            first.insert(0, lone(MEETING[0]))
            second.insert(0, lone(MEETING[1]))
    behind = [
        [
            lone(draw.thread(draw.random.choice((ONE, OTHER, ONE + OTHER)), 1, 2))
            for _ in range(draw.random.choice((1, 1, 2)))
        ]
        for _ in range(2)
    ]
    ranks = (0, 1) if draw.happens(0.75) else (0, 0)
    kernels = [(rank, tuple(blocks)) for rank, blocks in zip(ranks * 2, (first, second, *behind), strict=True)]
    hosts: list[list[Op]] = [[] for _ in range(1 + ranks[1])]
    streams = (0, 1 - ranks[1])
    for number, rank in enumerate(ranks):
        hosts[rank].append(Op("launch", cell=streams[number], value=number))
    meets, quiet = ranks[1] and draw.happens(0.25), draw.random.choice((0.05, 0.05, 0.3))
    for number, rank in enumerate(ranks):
        host = hosts[rank]
        if draw.happens(0.35):
            host.append(Op("sync", cell=streams[number]))
        if meets:
            host.append(Op("meet", value=0))
        host += draw.of_host(quiet)
        if draw.happens(0.5):
            host.append(Op("launch", cell=streams[number], value=2 + number))
        host += draw.of_host(quiet / 2)
    if draw.happens(0.06):
        for host in hosts if ranks[1] else ():
            host.append(Op("meet", value=1))
        draw.random.choice(hosts).append(Op("free"))
    return Program(tuple(kernels), tuple(map(tuple, hosts)), NUM_BYTES)
