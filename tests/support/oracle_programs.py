"""Random programs for `oracle`: messages between threads that are right, and then some of their steps changed.

Each shape draws what one kind of fault needs; "all" of it is mixed in the last one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from oracle import ATOMIC, READING, Block, Op, Program, Thread

CELLS = (0, 8, 16, 24)  # of 8 bytes
SCOPES = ("cta", "gpu", "sys")
PLACES = {"lanes": 0, "blocks": 1, "ranks": 2}  # where threads are, and the number of the least scope that reaches
ORDERS = {
    "st": ("weak", "relaxed", "release"),
    "ld": ("weak", "relaxed", "acquire"),
    "wait": ("relaxed", "acquire"),
    "fence": ("acq_rel",),
    **dict.fromkeys(ATOMIC, ("relaxed", "release", "acquire", "acq_rel")),
}


class Draw:
    """Draws one program. steps: of each thread so far; changed: how often a step is."""

    def __init__(self, seed: object, num_threads: int):
        self.random = random.Random(f"oracle {seed}")
        self.steps: list[list[Op]] = [[] for _ in range(num_threads)]
        self.numbers, self.changed = dict.fromkeys(CELLS, 0), 0.12
        self.sizes: tuple[int, ...] = (4,)
        self.scopes: tuple[str, ...] = ("sys",)

    def cell(self) -> int:
        return self.random.choice(CELLS[:3])

    def access(self, cell: int | None = None, what: str | None = None) -> Op:
        """An access to data."""
        what = what or self.random.choice(("st", "ld", "ld", "st", "add", "cas", "exch"))
        order = "weak" if what in ("st", "ld") and self.random.random() < 0.7 else self.random.choice(ORDERS[what])
        cell = self.cell() if cell is None else cell
        size = self.random.choice(self.sizes)
        cell += self.random.choice((0, 0, 4)) if len(self.sizes) > 1 and size == 4 else 0
        op = Op(what, order, cell, self.random.randint(1, 2), self.random.choice(self.scopes), size)
        return self.asking(op) if what != "st" else op

    def asking(self, op: Op) -> Op:
        asks = self.random.choice(("all", "least", "late") + (("none",) if op.what != "ld" else ()))
        other = self.random.randint(0, 2)
        return op._replace(asks="all" if op.what == "cas" else asks, other=other)

    def message(self, a: int, b: int, data: int, flag: int) -> None:
        """Thread a accesses data and tells b, which waits and accesses it."""
        sends, waits = self.steps[a], self.steps[b]
        sends.append(self.access(data))
        how = self.random.random()
        self.numbers[flag] += 1
        number, scope = self.numbers[flag], self.random.choice(self.scopes)
        size = self.random.choice(self.sizes)
        order = "release"
        if how < 0.25:
            sends.append(Op("fence", "acq_rel", scope=scope))
            order = "relaxed"
        if self.random.random() < 0.4:
            sends.append(self.asking(Op("add", order, flag, 1, scope, size)))
        else:
            sends.append(Op("st", order, flag, number, scope, size))
        scope = self.random.choice(self.scopes)
        if self.random.random() < 0.3:
            waits.append(Op("ld", "acquire", flag, 0, scope, size, number, "least"))
            of_threads = sum(op.what in ("ld", "vote", *ATOMIC) and op.asks != "none" for op in waits) - 1
            waits.append(self.access(data)._replace(given=of_threads))
            return
        if self.random.random() < 0.3:
            waits += [Op("wait", "relaxed", flag, number, scope, size), Op("fence", "acq_rel", scope=scope)]
        else:
            waits.append(Op("wait", "acquire", flag, number, scope, size))
        waits.append(self.access(data))

    def messages(self, count: int) -> None:
        """Along chains: whom a message has come to sends the next one."""
        for _ in range(count):
            a, b = self.random.sample(range(len(self.steps)), 2)
            data = self.cell()
            self.message(a, b, data, self.random.choice([cell for cell in CELLS if cell != data]))

    def change(self, keep: tuple[str, ...] = ()) -> None:
        """Drop, weaken or add steps here and there. Answers keep their numbers."""
        for steps in self.steps:
            for n, op in reversed(list(enumerate(steps))):
                if self.random.random() >= self.changed or op.what in keep or op.what not in ORDERS:
                    continue
                match self.random.randrange(4):
                    case 0 if op.what in ("st", "fence", "wait"):
                        del steps[n]
                    case 1:
                        steps[n] = op._replace(scope=self.random.choice(self.scopes))
                    case 2 if op.what in ("st", "wait", "fence"):
                        steps.insert(n, self.access(what="st"))
                    case _:
                        steps[n] = op._replace(order=self.random.choice(ORDERS[op.what]))

    def threads(self) -> list[Thread]:
        return [tuple(steps) for steps in self.steps]


def lone(thread: Thread) -> Block:
    return ((thread,),)


def start(kernels: list[int], stream: int = 0) -> list[Op]:
    return [Op("launch", cell=stream, value=kernel) for kernel in kernels]


def ranks(seed: object) -> Program:
    """A kernel or two of each rank, in one stream each."""
    draw = Draw(seed, 3)
    for _ in range(draw.random.choice((0, 1, 1, 2))):
        a, b = sorted(draw.random.sample(range(3), 2))  # a later kernel of the rank may be the one that waits
        data, flag = draw.random.sample(CELLS, 2)
        draw.message(a, b, data, flag)
    for steps in draw.steps:
        if draw.random.random() < 0.4:
            steps.append(draw.access())
    draw.change()
    numbers = draw.random.choice(((0, 1, 1), (0, 1, 2), (0, 0, 1), (0, 1, 0)))
    kernels = [(rank, (lone(thread),)) for rank, thread in zip(numbers, draw.threads(), strict=True) if thread]
    hosts: list[list[Op]] = [[] for _ in range(1 + max((rank for rank, _ in kernels), default=0))]
    for number, (rank, _) in enumerate(kernels):
        hosts[rank] += start([number])
        if draw.random.random() < 0.2:
            hosts[rank].append(Op("sync"))
    return Program(tuple(kernels), tuple(map(tuple, hosts)), 32)


def flags(seed: object) -> Program:
    """Blocks of one kernel and chains of flags, some overwritten."""
    draw = Draw(seed, 3)
    draw.messages(2)
    draw.change()
    return of_blocks(draw)


def scopes(seed: object) -> Program:
    """The same with all scopes, between lanes, blocks or ranks; most of them reach."""
    draw = Draw(seed, 3)
    where = draw.random.choice(tuple(PLACES))
    draw.scopes = (*SCOPES[: PLACES[where]], *SCOPES[PLACES[where] :] * 5)
    draw.messages(2)
    draw.change()
    return in_place(draw, where)


def sizes(seed: object) -> Program:
    """Accesses of 4 and 8 bytes to the same cells."""
    draw = Draw(seed, 2)
    draw.sizes = (4, 4, 4, 8)
    draw.messages(2)
    draw.change()
    return in_place(draw, draw.random.choice(tuple(PLACES)))


def observed(seed: object) -> Program:
    """Chains in which strong stores and loads of the data itself are links."""
    draw = Draw(seed, 3)
    first, second, third = draw.steps
    data, flag, last = draw.random.sample(CELLS, 3)
    first.append(Op(draw.random.choice(("st", "st", "exch")), draw.random.choice(("relaxed", "release")), data, 1))
    if draw.random.random() < 0.6:
        first.append(Op("st", draw.random.choice(("relaxed", "relaxed", "release")), flag, 1))
        second.append(Op("wait", draw.random.choice(("relaxed", "relaxed", "acquire")), flag, 1))
    if draw.random.random() < 0.6:
        second.append(Op(draw.random.choice(("wait", "wait", "ld")), "relaxed", data, 1))
    if draw.random.random() < 0.6:
        second.append(draw.access(data))
    second.append(Op("st", draw.random.choice(("release", "release", "relaxed")), last, 1))
    third.append(Op("wait", "acquire", last, 1))
    third.append(draw.access(data))
    draw.changed = 0.05
    draw.change()
    return in_place(draw, draw.random.choice(tuple(PLACES)))


def counters(seed: object) -> Program:
    """Adds, exchanges and compares whose old values some ask for, and loads."""
    draw = Draw(seed, 3)
    for steps in draw.steps:
        for _ in range(draw.random.choice((1, 2, 2, 3))):
            what = draw.random.choice(("add", "add", "add", "ld", "ld", "exch", "cas", "st", "wait"))
            order = draw.random.choice([order for order in ORDERS[what] if order != "weak"])
            cell = draw.random.choice((0, 0, 8))
            op = Op(what, order, cell, 1 if what == "wait" else draw.random.randint(1, 2))
            if what not in ("st", "wait"):
                op = draw.asking(op)._replace(other=draw.random.randint(what != "cas", 3))
            steps.append(op)
    if draw.random.random() < 0.5:
        a, b = draw.random.sample(range(3), 2)
        sends, waits = draw.steps[a], draw.steps[b]
        sends.insert(draw.random.randrange(len(sends) + 1), Op("st", "weak", 16, 1))
        waits.insert(draw.random.randrange(len(waits) + 1), Op("ld", "weak", 16))
    return of_blocks(draw)


def tickets(seed: object) -> Program:
    """Adds that ask whether a number is reached, alone or for all lanes, or for a bit; then some read data by that."""
    draw = Draw(seed, 3)
    where = draw.random.choice(tuple(PLACES))
    draw.scopes = (*SCOPES[: PLACES[where]], *SCOPES[PLACES[where] :] * 4)
    least, is_shared = draw.random.randint(1, 2), where == "lanes" and draw.random.random() < 0.6
    writer = draw.random.choice((0, 0, 1, -1))
    is_bit = not is_shared and draw.random.random() < 0.4
    for lane, steps in enumerate(draw.steps):
        if lane == writer:
            steps.append(draw.access(16, "st"))
        count = draw.random.choice((1, 1, 2)) if not is_shared or lane == 0 else 0
        for _ in range(count):
            order = "release" if lane == writer else draw.random.choice(ORDERS["add"][:2])
            value = draw.random.choice((2, 2, 2, 4, -2, 1) if is_bit else (1,) * 6 + (2, -1))
            asks = "late" if is_shared else draw.random.choice(("bit" if is_bit else "least",) * 4 + ("late", "none"))
            other = least if is_shared else draw.random.choice((least, least, least + 1))
            steps.append(Op("add", order, 0, value, draw.random.choice(draw.scopes), other=other, asks=asks))
        if is_shared:
            steps.append(Op("shfl", value=least, other=0b111))
        if draw.random.random() < 0.7:
            steps.append(Op("fence", "acq_rel", scope=draw.random.choice(draw.scopes)))
        if draw.random.random() < 0.6:
            told = sum(op.what in (*READING, "shfl") and op.asks != "none" for op in steps)
            steps.append(draw.access(16, draw.random.choice(("ld", "ld", "ld", "st")))._replace(given=told - 1))
        if draw.random.random() < 0.2:
            steps.append(draw.asking(Op("ld", "relaxed", 0)))
    draw.changed = 0.05
    draw.change()
    return in_place(draw, where)


def turns(seed: object) -> Program:
    """Waits for one cell of two or for both, locks, and values that come and go"""
    draw = Draw(seed, draw_from(seed, (2, 3, 3)))
    has_data = draw.random.random() < 0.75

    def strong(what: str, cell: int, value: int, other: int = 0, asks: str = "all") -> Op:
        orders = ORDERS[what if what in ORDERS else "wait"]
        order = draw.random.choice([order for order in orders if order != "weak"])
        return Op(what, order, cell, value, other=other, asks=asks)

    for steps in draw.steps:
        for _ in range(draw.random.randint(1, 4 if len(draw.steps) == 2 else 3)):
            kind = draw.random.random()
            one, other = draw.random.sample(CELLS[:2], 2)
            if kind < 0.45:
                steps.append(strong("st", one, draw.random.choice((1, 1, 1, 2))))
            elif kind < 0.6:
                what = draw.random.choice(("add", "ld", "cas"))
                steps.append(strong(what, one, 1, draw.random.choice((0, 1)), draw.random.choice(("all", "none"))))
            elif kind < 0.66:
                steps.append(strong("wait", one, 1))
            elif kind < 0.8:
                what, value = draw.random.choice(("either", "either", "both")), draw.random.choice((1, 1, 2))
                steps += [strong(what, one, value), strong("again", other, value)]
            elif kind < 0.92:
                steps += [Op("lock", "acquire", CELLS[2], 1), Op("st", "release", CELLS[2], 0)]
            if has_data and (kind > 0.92 or draw.random.random() < 0.4):
                at = len(steps) - (0.8 <= kind < 0.92)
                steps.insert(at, Op(draw.random.choice(("st", "ld")), "weak", 24, 1))
    return in_place(draw, draw.random.choice(tuple(PLACES)))


def lanes(seed: object) -> Program:
    """Lanes of a warp that meet under masks and vote; sometimes beside another block."""
    draw = Draw(seed, 3)
    draw.scopes = ("cta", "sys", "sys")
    for _ in range(draw.random.choice((1, 2, 2, 3))):
        mask = draw.random.choice((0b011, 0b101, 0b110, 0b111, 0b111))
        what = draw.random.choice(("syncwarp", "syncwarp", "syncwarp", "vote"))
        for lane in range(3):
            if draw.random.random() < 0.45:
                draw.steps[lane].append(draw.access(draw.random.choice(CELLS[:2])))
            if mask >> lane & 1:
                draw.steps[lane].append(Op(what, other=mask))
    if draw.random.random() < 0.3:
        a, b = draw.random.sample(range(3), 2)
        draw.message(a, b, *draw.random.sample(CELLS[1:], 2))
    for lane in range(3):
        if draw.random.random() < 0.5:
            draw.steps[lane].append(draw.access(draw.random.choice(CELLS[:2])))
    draw.change()
    return Program(((0, ((tuple(draw.threads()),),)),), (tuple(start([0])),), 32)


def barriers(seed: object) -> Program:
    """Warps at named barriers, of which more may come than a barrier counts."""
    draw = Draw(seed, draw_from(seed, (2, 3, 3)))
    draw.scopes = ("cta", "sys")
    count = len(draw.steps)
    for _ in range(draw.random.choice((1, 2, 2, 3))):
        number = draw.random.choice((1, 1, 2))
        expected = 2 if number == 1 else count
        comers = draw.random.sample(range(count), draw.random.choice((2, 2, count)) if number == 1 else count)
        arrives = draw.random.random() < 0.3
        for place, warp in enumerate(comers):
            if draw.random.random() < 0.5:
                draw.steps[warp].append(draw.access(draw.random.choice(CELLS[:2])))
            draw.steps[warp].append(Op("arrive" if arrives and place == 0 else "bar", cell=number, value=expected))
    for steps in draw.steps:
        if draw.random.random() < 0.5:
            steps.append(draw.access(draw.random.choice(CELLS[:2])))
    if draw.random.random() < 0.15:
        steps = draw.random.choice(draw.steps)
        steps.insert(draw.random.randrange(len(steps) + 1), Op("bar", cell=1, value=2))
    draw.change()
    block = tuple((thread,) for thread in draw.threads())
    return Program(((0, (block,)),), (tuple(start([0])),), 32)


def draw_from(seed: object, of: tuple[int, ...]) -> int:
    return random.Random(f"first {seed}").choice(of)


def streams(seed: object) -> Program:
    """Kernels of a rank in two streams, with events and waits of the host."""
    draw = Draw(seed, 3)
    for steps in draw.steps:
        for _ in range(draw.random.choice((1, 1, 2))):
            steps.append(draw.access(draw.random.choice(CELLS[:2])))
    if draw.random.random() < 0.3:
        draw.message(0, draw.random.choice((1, 2)), *draw.random.sample(CELLS, 2))
    draw.change()
    of_stream = [0, 1, draw.random.randrange(2)]
    host: list[Op] = []
    recorded: list[int] = []
    for kernel in range(3):
        stream = of_stream[kernel]
        if recorded and draw.random.random() < 0.4:
            host.append(Op("follow", cell=stream, value=draw.random.choice(recorded)))
        host.append(Op("launch", cell=stream, value=kernel))
        if draw.random.random() < 0.5:
            recorded.append(kernel)
            host.append(Op("record", cell=stream, value=kernel))
        if draw.random.random() < 0.3:
            host.append(Op("sync", cell=draw.random.randrange(2)))
        if recorded and draw.random.random() < 0.25:
            host.append(Op(draw.random.choice(("join", "ask")), value=draw.random.choice(recorded)))
    kernels = tuple((0, (lone(thread),)) for thread in draw.threads())
    return Program(tuple((rank, blocks) for rank, blocks in kernels), (tuple(host),), 32)


def hosts(seed: object) -> Program:
    """A host that stores, polls and plainly reads words while kernels run in two streams."""
    draw = Draw(seed, 3)  # the last one is the host
    draw.sizes = (4, 4, 4, 8)
    for _ in range(draw.random.choice((1, 2, 2))):
        a, b = draw.random.choice(((0, 2), (1, 2), (2, 0), (2, 1), (0, 1)))
        draw.message(a, b, *draw.random.sample(CELLS, 2))
    draw.change()
    *threads, steps = draw.threads()
    kernels = tuple((0, (lone(thread),)) for thread in threads)
    host = [step for op in steps if (step := of_host(op)) is not None]
    for k in range(2):
        host.insert(draw.random.randrange(min(2, len(host) + 1)), Op("launch", cell=k, value=k))
    for _ in range(draw.random.choice((0, 0, 1))):
        host.insert(draw.random.randrange(len(host) + 1), Op("sync", cell=draw.random.randrange(2)))
    return Program(kernels, (tuple(host),), 32)


def meetings(seed: object) -> Program:
    """Two hosts and a kernel of each: they tell each other something by words, or meet; one may free the memory."""
    draw = Draw(seed, 4)  # the last two are the hosts
    draw.changed = 0.06
    for _ in range(draw.random.choice((1, 2, 2))):
        a, b = draw.random.choice(((0, 2), (0, 3), (2, 0), (2, 1), (2, 3), (3, 2), (3, 0), (0, 1)))
        draw.message(a, b, *draw.random.sample(CELLS, 2))
    draw.change()
    *threads, first, second = draw.threads()
    hosts = [[step for op in steps if (step := of_host(op)) is not None] for steps in (first, second)]
    for rank, host in enumerate(hosts):
        if draw.random.random() < 0.6:
            host.append(Op("sync"))
        at = draw.random.randrange(min(2, len(host) + 1))
        host.insert(
            at if draw.random.random() < 0.7 else draw.random.randrange(len(host) + 1), Op("launch", value=rank)
        )
    for host in hosts:
        if draw.random.random() < 0.3:
            host.insert(draw.random.randrange(len(host) + 1), Op("ld", "weak", draw.cell()))
    count = draw.random.choice((0, 1, 1, 2))
    for host in hosts:
        for number, at in enumerate(sorted(draw.random.randrange(len(host) + 1) for _ in range(count))):
            host.insert(at + number, Op("meet", value=number))
    if draw.random.random() < 0.5:
        draw.random.choice(hosts).append(Op("free", "weak", 0, size=32))
    kernels = tuple((rank, (lone(thread),)) for rank, thread in enumerate(threads))
    return Program(kernels, tuple(map(tuple, hosts)), 32)


def of_host(op: Op) -> Op | None:
    """A step of a thread as a host makes it: it polls, reads plainly, and stores words."""
    if op.what in ("st", *ATOMIC):
        return Op("st", "release", op.cell, op.value, size=op.size)
    if op.what in ("ld", "wait"):
        return Op(op.what, "weak" if op.order == "weak" else "acquire", op.cell, op.value, size=op.size)
    return None


def of_blocks(draw: Draw) -> Program:
    kernel = 0, tuple(lone(thread) for thread in draw.threads() if thread)
    return Program((kernel,) if kernel[1] else (), (tuple(start([0] if kernel[1] else [])),), 32)


def in_place(draw: Draw, where: str) -> Program:
    threads = [thread for thread in draw.threads() if thread]
    if where == "blocks" or not threads:
        return of_blocks(draw)
    if where == "lanes":
        return Program(((0, ((tuple(threads),),)),), (tuple(start([0])),), 32)
    kernels = tuple((i % 2, (lone(thread),)) for i, thread in enumerate(threads))
    hosts = tuple(tuple(Op("launch", cell=i, value=i) for i in range(r, len(threads), 2)) for r in range(2))
    return Program(kernels, hosts, 32)


SHAPES: dict[str, Callable[[object], Program]] = {
    one.__name__: one
    for one in (
        ranks,
        flags,
        observed,
        scopes,
        sizes,
        counters,
        tickets,
        turns,
        lanes,
        barriers,
        streams,
        hosts,
        meetings,
    )
}


def words(program: Program) -> str:
    """A program as a text of few lines."""

    def step(op: Op) -> str:
        parts = [op.what + "".join(f".{part}" for part in (op.order, op.scope if op.scope != "sys" else "") if part)]
        if op.what in ORDERS and op.what != "fence":
            parts += [f"{'xyzwuvst'[op.cell // 8]}{'+4' * (op.cell % 8 > 0)}{':8' * (op.size == 8)}"]
            parts += [] if op.what == "ld" else [str(op.value)]
            parts += (
                [f">={op.other} {op.asks}"] if op.asks in ("least", "late") else [op.asks] if op.asks != "all" else []
            )
            parts += [f"=={op.other}"] if op.what == "cas" else []
        elif op.what != "fence":
            parts += [str(op.cell), str(op.value), hex(op.other)]
        return " ".join(parts) + (f" if {op.given}" if op.given >= 0 else "")

    lines = []
    for k, (rank, blocks) in enumerate(program.kernels):
        for b, block in enumerate(blocks):
            for w, lanes in enumerate(block):
                for lane, thread in enumerate(lanes):
                    lines.append(f"kernel {k} of rank {rank}, block {b}, {w}.{lane}: " + "; ".join(map(step, thread)))
    lines += [f"host {r}: " + "; ".join(map(step, host)) for r, host in enumerate(program.hosts)]
    return "\n".join(lines)


def smallest(program: Program, differs: Callable[[Program], bool]) -> Program:
    """A program with as few steps as will do, for a report."""
    while True:
        for smaller in without_one_step(program):
            try:
                is_smaller = differs(smaller)
            except (KeyError, IndexError, RuntimeError):  # no program any more
                continue
            if is_smaller:
                program = smaller
                break
        else:
            return program


def without_one_step(program: Program) -> list[Program]:
    found = []
    for h, host in enumerate(program.hosts):
        for n in range(len(host)):
            changed = (*program.hosts[:h], (*host[:n], *host[n + 1 :]), *program.hosts[h + 1 :])
            found.append(program._replace(hosts=changed))
    for k, (rank, blocks) in enumerate(program.kernels):
        for b, block in enumerate(blocks):
            for w, lanes in enumerate(block):
                for lane, thread in enumerate(lanes):
                    for n in range(len(thread)):
                        fewer = (*thread[:n], *thread[n + 1 :])
                        new_lanes = (*lanes[:lane], fewer, *lanes[lane + 1 :])
                        new_block = (*block[:w], new_lanes, *block[w + 1 :])
                        new_blocks = (*blocks[:b], new_block, *blocks[b + 1 :])
                        kernels = (*program.kernels[:k], (rank, new_blocks), *program.kernels[k + 1 :])
                        found.append(program._replace(kernels=kernels))
    return found
