"""Small programs with late stores and early loads: whether they have a data race, by `--all --weak` and by the axioms.

A thread is a list of steps of litmus tests, and of `if r0 1`: what follows is left out unless the register holds 1.

The axioms know neither waits that go on nor branches. So a program is taken as several: of each thread what it does if
it comes past a wait or stops there, its last look having failed, and if it takes a branch or not.
"""

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.lab.litmus.axioms import Event, Execution, Reading, closure, has_cycle, readings
from nbep.lab.litmus.programs import PLACES, Program, Step, parse
from nbep.lab.litmus.runs import do

CELL = 64  # bytes
SCOPE = {"a block": "cta", "a GPU": "gpu", "ranks": "sys"}


class Branching(NamedTuple):
    """Threads of steps, in one of the PLACES."""

    threads: tuple[tuple[str, ...], ...]
    where: str

    @property
    def name(self) -> str:
        return f"{self.where}: {' || '.join('; '.join(steps) for steps in self.threads)}"

    @property
    def cells(self) -> list[str]:
        steps = (parse(text, "sys") for thread in self.threads for text in thread if not text.startswith("if "))
        return sorted({step.cell for step in steps if step.cell})


def of(program: Program) -> Branching:
    threads = tuple(tuple(step.strip() for step in thread.split(";")) for thread in program.threads)
    return Branching(threads, program.where)


# --- by `--all --weak` ------------------------------------------------------------------------------------------------


def run(program: Branching, strategy) -> None:
    """Run the threads once. Raises: DataRace, DeadlockError"""
    places = PLACES[program.where](len(program.threads))
    world = World(1 + max(rank for rank, _ in places), 0, memory_model=strategy.memory_model, strategy=strategy)
    offsets = {cell: CELL * i for i, cell in enumerate(program.cells)}
    memory = world.ranks[0].space.allocate(CELL * max(len(offsets), 1), "cells", zero=True)
    streams = []
    for rank in sorted(world.ranks):
        space = world.ranks[rank].space
        base = memory.address if rank == 0 else space.open(memory.handle).address
        mine = [(i, block) for i, (of_rank, block) in enumerate(places) if of_rank == rank]
        blocks = [[i for i, block in mine if block == b] for b in range(1 + max(b for _, b in mine))]

        def kernel(base, blocks=blocks):
            t = current_thread()
            registers = {}
            for text in program.threads[blocks[t.block_idx][t.thread_idx]]:
                if text.startswith("if "):
                    _, register, value = text.split()
                    if registers[register] != int(value):
                        return
                else:
                    step = parse(text, SCOPE[program.where])
                    if step.what == "bar":
                        t.barrier(0, t.block_dim)
                    else:
                        do(t, step, base + offsets.get(step.cell, 0), registers)

        streams.append(world.ranks[rank].create_stream("stream"))
        streams[-1].launch(kernel, (base,), len(blocks), max(len(block) for block in blocks), name="steps")
    for stream in streams:
        stream.synchronize()


def found_race(program: Branching, most: int, *, is_weak: bool = True, is_plain: bool = False) -> bool | None:
    """Whether a schedule has a race; None if there are too many."""
    tree = Tree(is_weak=is_weak, finds_races=True, is_plain=is_plain)
    while tree.begin():
        if tree.schedules + tree.redundant == most:
            return None
        try:
            run(program, Every(tree))
        except Redundant:
            tree.end(is_redundant=True)
            continue
        except DeadlockError:
            pass
        except DataRace:
            return True
        tree.end()
    return False


# --- by the axioms ----------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """What a thread may do: its steps, and of some what they read: (number, "is", "is not" or "less", value)."""

    steps: tuple[str, ...]
    reads: tuple[tuple[int, str, int], ...]


def parts(thread: tuple[str, ...]) -> Iterator[Part]:
    steps: list[str] = []
    reads: list[tuple[int, str, int]] = []
    for text in thread:
        word, *rest = text.split()
        if word == "if":
            number = next(i for i, step in enumerate(steps) if rest[0] in step.split())
            yield Part(tuple(steps), (*reads, (number, "is not", int(rest[1]))))
            reads.append((number, "is", int(rest[1])))
            continue
        if word.startswith("wait"):
            looks = f"ld{word.removeprefix('wait')} unused {rest[0]}"
            yield Part((*steps, looks), (*reads, (len(steps), "less", int(rest[1]))))
        steps.append(text)
    yield Part(tuple(steps), tuple(reads))


def holds(value: int, what: str, number: int) -> bool:
    return {"is": value == number, "is not": value != number, "less": value < number}[what]


class Races(NamedTuple):
    """by_ptx: whether PTX has a race; is_one: also if loads are over before their threads store; is_sure: in an
    execution of which no load is late."""

    by_ptx: bool
    is_one: bool
    is_sure: bool


def races_of(program: Branching) -> Races:
    by_ptx = is_one = is_sure = False
    for chosen in product(*(list(parts(thread)) for thread in program.threads)):
        threads = tuple("; ".join(part.steps) for part in chosen if part.steps)
        number_of = {i: n for n, i in enumerate(i for i, part in enumerate(chosen) if part.steps)}
        expected = [(number_of[i], *one) for i, part in enumerate(chosen) for one in part.reads]
        if not threads:
            continue
        for reading, _ in allowed_readings(Program("", threads, program.where, {}), expected):
            by_ptx |= reading.has_race()
            has_one = has_race(reading)
            is_one |= has_one
            is_sure |= has_one and not has_late_load(reading)
            if is_sure:
                return Races(by_ptx, is_one, is_sure)
    return Races(by_ptx, is_one, is_sure)


def allowed_readings(program: Program, expected) -> Iterator[tuple[Reading, dict[Event, int]]]:
    for reading in readings(program):
        values = reading.values()
        if values is None:
            continue
        read = {(event.thread, event.number): values[write] for event, write in reading.reads_from.items()}
        if not all(read.step.may_read(values[write]) for read, write in reading.reads_from.items()):
            continue
        if not all(holds(read[thread, number], what, value) for thread, number, what, value in expected):
            continue
        if any(Execution(reading, order).is_allowed() for order in reading.coherences()):
            yield reading, values


def has_race(reading: Reading) -> bool:
    """As `Reading.has_race`, but a store comes behind a load if it knows of it by strong stores and loads alone."""
    if not reading.has_race():
        return False
    events, observation = reading.events, reading._observation()
    edges = {(a, b) for a, others in reading.base_causality().items() for b in others}
    edges |= {(write, read) for write, read in observation if reading.is_morally_strong(write, read)}
    after = closure(edges)
    return any(
        a.step.cell == b.step.cell != ""
        and (a.step.writes or b.step.writes)
        and not reading.is_morally_strong(a, b)
        and not {(a, b), (b, a)} & reading.causality
        and not is_over(a, b, after)
        and not is_over(b, a, after)
        for a, b in combinations(events, 2)
    )


def is_over(load: Event, store: Event, after: dict[Event, set[Event]]) -> bool:
    return not load.step.writes and store.step.writes and store in after.get(load, ())


def has_late_load(reading: Reading) -> bool:
    """Whether a load reads what its thread, or one that goes on by it, has stored behind it."""
    edges = {(a, b) for a, b in combinations(reading.events, 2) if a.thread == b.thread}
    edges |= {(write, read) for read, write in reading.reads_from.items() if write.thread >= 0}
    return has_cycle(edges)


# --- drawn at random --------------------------------------------------------------------------------------------------


def draw(seed: int) -> Branching:
    """Two or three threads of two to four steps on two or three cells, some of them waits and branches."""
    choose = random.Random(f"late races {seed}")
    where = choose.choice(list(PLACES))
    data, flags = ["d"], ["x", "y"][: choose.choice([1, 2, 2])]
    registers = iter(range(40))
    num_threads = choose.choice([2, 2, 3])

    def scope() -> str:
        return choose.choice(["", "", "", "", ".cta", ".gpu", ".sys"])

    def access() -> str:
        if choose.random() < 0.35:
            cell, orders = choose.choice(data), (["weak"], ["weak"])
            if choose.random() < 0.3:
                orders = ["relaxed", "release"], ["relaxed", "acquire"]
        else:
            cell = choose.choice(flags)
            orders = ["relaxed", "release", "weak"], ["relaxed", "acquire", "weak"]
            orders = [one if choose.random() < 0.2 else one[:2] for one in orders]
        if choose.random() < 0.5:
            return f"st.{with_scope(choose.choice(orders[0]))} {cell} {choose.choice([1, 1, 2])}"
        return f"ld.{with_scope(choose.choice(orders[1]))} r{next(registers)} {cell}"

    def with_scope(order: str) -> str:
        return order if order == "weak" else order + scope()

    def steps() -> list[str]:
        found = []
        for _ in range(choose.choice([2, 2, 3, 3, 4] if num_threads == 2 else [1, 2, 2, 3])):
            kind = choose.random()
            if kind < 0.12:
                found.append(f"wait.{with_scope(choose.choice(['relaxed', 'acquire']))} {choose.choice(flags)} 1")
            elif kind < 0.22:
                found.append(f"fence.acq_rel{scope()}")
            elif kind < 0.32:
                order = with_scope(choose.choice(["relaxed", "release", "acq_rel"]))
                found.append(f"add.{order} r{next(registers)} {choose.choice(flags)} 1")
            else:
                found.append(access())
        reads = [i for i, step in enumerate(found) if step.startswith(("ld", "add"))]
        if reads and choose.random() < 0.5:
            at = choose.choice(reads)
            register = next(word for word in found[at].split() if word.startswith("r"))
            found.insert(at + 1, f"if {register} {choose.choice([0, 0, 1])}")
            last = choose.choice([f"st.weak {data[0]} 1", f"ld.weak r{next(registers)} {data[0]}"])
            found.append(last)
        return found

    return Branching(tuple(tuple(steps()) for _ in range(num_threads)), where)


def draw_behind(seed: int) -> Branching:
    """Threads that store and load two or three flags, and access data if they have read what few schedules show."""
    choose = random.Random(f"behind {seed}")
    where, num_threads = choose.choice(list(PLACES)), choose.choice([2, 2, 2, 3])
    flags = ["x", "y"] if num_threads == 2 else ["x", "y", "z"][: choose.choice([2, 3])]
    registers = iter(range(40))
    has_stored = False

    def steps(number: int) -> list[str]:
        nonlocal has_stored
        own, other = flags[number % len(flags)], flags[(number + 1) % len(flags)]
        store = f"st.{choose.choice(['relaxed', 'relaxed', 'release'])} {own} 1"
        add = f"add.{choose.choice(['relaxed', 'acq_rel'])} r{next(registers)} {own} 1"
        load = f"ld.{choose.choice(['relaxed', 'relaxed', 'acquire'])} r{(register := next(registers))} {other}"
        first = choose.choice([store, store, store, add])
        between = choose.choice([[], [], ["fence.acq_rel"], [f"st.relaxed {other} 2"]])
        begin = [load, *between, first] if choose.random() < 0.1 else [first, *between, load]
        is_store, has_stored = not has_stored or choose.random() < 0.3, True
        data = "st.weak d 1" if is_store else f"ld.weak r{next(registers)} d"
        return [*begin, f"if r{register} {choose.choice([1, 2]) if choose.random() < 0.1 else 0}", data]

    return Branching(tuple(tuple(steps(number)) for number in range(num_threads)), where)


__all__ = ["Branching", "Races", "Step", "draw", "draw_behind", "found_race", "of", "races_of"]
