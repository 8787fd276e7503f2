"""What the emulator makes of a litmus test: outcomes over seeds, and whether `checked` finds a race."""

from __future__ import annotations

import random
from collections.abc import Iterable

from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.emulator.schedule.strategies import Strategy
from nbep.lab.litmus.axioms import Outcome
from nbep.lab.litmus.programs import Program, Step

CELL_BYTES = 64  # so far apart that no two cells share a line
STARTED = "threads that run"
NEVER = 1 << 62
LONGEST_PAUSE = 12  # primitive calls before a step
WARP = 32
HANG: Outcome = frozenset({("a wait never ends", 1)})


def run(program: Program, memory_model: str, seed: int, strategy: Strategy | None = None) -> Outcome:
    """Run the threads once; the registers, and the cells at the end.

    Args: strategy: one that makes all choices itself; the threads then begin when it says, and make no pauses
    Raises: DataRace
    """
    places = program.places
    is_random = strategy is None
    lanes = WARP if is_random else 1  # of each thread of the program, whose others do nothing
    world = World(1 + max(rank for rank, _ in places), seed, memory_model=memory_model, strategy=strategy or "uniform")
    offsets = {cell: CELL_BYTES * i for i, cell in enumerate([*program.cells, STARTED])}
    owner = world.ranks[places[-1][0]]  # as in a message, memory is the receiver's
    names = {offset: cell for cell, offset in offsets.items()}
    memory = owner.space.allocate(
        CELL_BYTES * len(offsets), "cells", zero=True, describe=lambda offset: names.get(offset, str(offset))
    )
    registers: dict[str, int] = {}
    streams = []
    for rank in sorted(world.ranks):
        context = world.ranks[rank]
        address = memory.address if context is owner else context.space.open(memory.handle).address
        mine = [(i, block) for i, (of_rank, block) in enumerate(places) if of_rank == rank]
        teams = [[program.steps[i] for i, block in mine if block == b] for b in range(1 + max(b for _, b in mine))]

        def kernel(address: int, teams: list[list[list[Step]]] = teams) -> None:
            t = current_thread()
            number, lane = divmod(t.thread_idx, lanes)
            steps = teams[t.block_idx][number]
            choose = random.Random(f"{seed} {t.rank} {t.block_idx} {number}")
            if lane == 0 and is_random:
                started = address + offsets[STARTED]
                t.atomic("add", started, "s32", 1, "relaxed", "sys")
                while t.load(started, "s32", "relaxed", "sys") < len(places):
                    t.spin(NEVER)
            for step in steps:
                if step.what == "bar":
                    t.barrier(0, t.block_dim)
                elif lane == 0:
                    for _ in range(choose.randrange(LONGEST_PAUSE) if is_random else 0):
                        t.globaltimer()
                    do(t, step, address + offsets.get(step.cell, 0), registers)

        streams.append(context.create_stream("stream"))
        streams[-1].launch(kernel, (address,), len(teams), lanes * max(len(team) for team in teams), name="litmus")
    for stream in streams:
        stream.synchronize()
    cells = {cell: memory.read(offsets[cell], "s32") for cell in program.cells}
    return frozenset({**registers, **cells}.items())


def do(t, step: Step, address: int, registers: dict[str, int]) -> None:
    """One step of one thread."""
    if step.what == "fence":
        t.fence(step.order, step.scope)
    elif step.what == "st":
        t.store(address, "s32", step.value, step.order, step.scope)
    elif step.what == "ld":
        registers[step.register] = t.load(address, "s32", step.order, step.scope)
    elif step.what == "wait":
        while t.load(address, "s32", step.order, step.scope) < step.value:
            t.spin(NEVER)
    else:
        compare = step.compare if step.what == "cas" else None
        registers[step.register] = t.atomic(step.what, address, "s32", step.value, step.order, step.scope, compare)


def outcomes(program: Program, memory_model: str, seeds: Iterable[int]) -> set[Outcome]:
    """All that some seeds show. With "checked": of those that end without a race."""
    found = set()
    for seed in seeds:
        try:
            found.add(run(program, memory_model, seed))
        except DataRace:
            continue
    return found


def is_race(program: Program, seeds: Iterable[int]) -> bool:
    """Whether `checked` finds a race under one of the seeds."""
    for seed in seeds:
        try:
            run(program, "checked", seed)
        except DataRace:
            return True
    return False


def all_outcomes(program: Program, is_plain: bool = False, most: int | None = None) -> tuple[Tree, set[Outcome]]:
    """All that `delayed` shows, with every late store and early load; a wait that never ends is the outcome HANG.

    Args: is_plain: without any reduction, to compare with; most: schedules at most
    """
    tree, found = Tree(is_weak=True, is_plain=is_plain), set[Outcome]()
    while tree.schedules != most and tree.begin():
        try:
            found.add(run(program, "delayed", 0, Every(tree)))
        except Redundant:
            tree.end(is_redundant=True)
            continue
        except DeadlockError:
            found.add(HANG)
        tree.end()
    return tree, found
