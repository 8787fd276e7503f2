"""`nbep litmus`: what PTX says of each litmus test, beside what the emulator does with it.

nbep litmus                  all of them
nbep litmus MP SB --json     some shapes, for programs
nbep litmus IRIW --all       all outcomes, with every late store and early load, and not samples

`run`, `outcomes` and `is_race` say what the emulator makes of one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from nbep.device.terminal import STDOUT, add_json, progress, write_json
from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.emulator.schedule.strategies import Strategy
from nbep.lab.litmus.axioms import Outcome, allowed
from nbep.lab.litmus.programs import PROGRAMS, Program, Step

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


# The command: a row for each program


SEEDS = range(60)  # for outcomes that PTX allows
FORBIDDEN_SEEDS = range(4)
CHECKED_SEEDS = range(6)
LINE = "    {:24}{:14}{:12}{:12}{}"
HEAD = "PTX, outcome", "delayed", "PTX, race", "checked"
HEAD_OF_SETS = "PTX allows", "shown", "schedules", "allowed, not shown"


class Row(NamedTuple):
    """Whether PTX allows the weak outcome, and `delayed` shows it; whether PTX sees a race, and `checked`."""

    is_allowed: bool
    is_shown: bool
    has_race: bool
    is_found: bool

    @property
    def words(self) -> tuple[str, ...]:
        names = ("allowed", "shown", "race", "DataRace")
        others = ("forbidden", "-", "-", "-")
        return tuple(name if holds else other for holds, name, other in zip(self, names, others, strict=True))

    def as_json(self, program: Program) -> dict[str, Any]:
        return {"weak": program.weak, **self._asdict()}


def row(program: Program) -> Row:
    verdict = allowed(program)
    is_allowed = verdict.allows(program)
    seeds = SEEDS if is_allowed else FORBIDDEN_SEEDS
    is_shown = any(program.is_weak(run(program, "delayed", seed)) for seed in seeds)
    return Row(is_allowed, is_shown, verdict.has_race, is_race(program, CHECKED_SEEDS))


class SetRow(NamedTuple):
    """Of one program.

    allowed, shown: how many outcomes PTX allows, and the emulator shows
    schedules, redundant: runs, and those that were given up as repetitions
    not_shown, forbidden: where the two differ
    """

    allowed: int
    shown: int
    schedules: int
    redundant: int
    not_shown: tuple[Outcome, ...]
    forbidden: tuple[Outcome, ...]

    @property
    def words(self) -> tuple[str, ...]:
        missing = "; ".join(map(words_of, self.not_shown)) or "-"
        wrong = "; ".join(map(words_of, self.forbidden))
        return str(self.allowed), str(self.shown), str(self.schedules), (wrong and f"FORBIDDEN: {wrong}") or missing

    def as_json(self, program: Program) -> dict[str, Any]:
        sets = {name: [dict(sorted(one)) for one in getattr(self, name)] for name in ("not_shown", "forbidden")}
        return {**self._asdict(), **sets}


def words_of(outcome: Outcome) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sorted(outcome))


def set_row(program: Program) -> SetRow:
    can = allowed(program).outcomes
    tree, found = all_outcomes(program)
    missing, wrong = sorted(can - found, key=words_of), sorted(found - can, key=words_of)
    return SetRow(len(can), len(found), tree.schedules, tree.redundant, tuple(missing), tuple(wrong))


def lines(programs: list[Program], rows: Sequence[Row | SetRow]) -> list[str]:
    """A line for each program, and under it one for each place; of samples, one for all places where they agree."""
    out: list[str] = []
    found_of = {program.name: found for program, found in zip(programs, rows, strict=True)}
    are_sets = isinstance(rows[0], SetRow)
    for shape, of_shape in groupby(programs, lambda program: program.shape):
        out += ["", LINE.format(shape, *(HEAD_OF_SETS if are_sets else HEAD))]
        for threads, same in groupby(of_shape, lambda program: program.threads):
            alike = list(same)
            weak = ", ".join(f"{name} = {value}" for name, value in alike[0].weak.items())
            out.append(" || ".join(threads) + ("" if are_sets else f": {weak}?"))
            places: dict[Any, list[str]] = {}
            for program in alike:
                words = found_of[program.name].words
                places.setdefault((words, are_sets and program.where), []).append(program.where)
            out += [LINE.format(", ".join(where), *words) for (words, _), where in places.items()]
    return out[1:]


def main_of_samples() -> None:
    print("\n".join(lines(list(PROGRAMS), list(map(row, PROGRAMS)))))


SUMMARY = "{:16}{:>9}{:>12}{:>9}{:>11}{:>10}"


def summary(programs: list[Program], rows: list[SetRow]) -> list[str]:
    """A line for each shape: sums over its programs."""
    out = [SUMMARY.format("shape", "programs", "PTX allows", "shown", "schedules", "given up")]
    of_shape: dict[str, list[SetRow]] = {}
    for program, found in zip(programs, rows, strict=True):
        of_shape.setdefault(program.shape, []).append(found)
    for shape, some in of_shape.items():
        sums = [sum(numbers) for numbers in zip(*(one[:4] for one in some), strict=True)]
        out.append(SUMMARY.format(shape, len(some), *sums))
    return out


def main_of_sets() -> None:
    print("\n".join(summary(list(PROGRAMS), list(map(set_row, PROGRAMS)))))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Raises: SystemExit as argparse does"""
    shapes = list(dict.fromkeys(program.shape for program in PROGRAMS))
    parser = argparse.ArgumentParser(prog="nbep litmus", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"some of: {', '.join(shapes)}")
    parser.add_argument("--all", action="store_true", help="all outcomes: late stores and early loads as choices")
    add_json(parser)
    options = parser.parse_args(argv)
    unknown = [shape for shape in options.shapes if shape not in shapes]
    if unknown:
        parser.error(f"SHAPE: got {', '.join(unknown)}; must be some of {', '.join(shapes)}")
    programs = [program for program in PROGRAMS if not options.shapes or program.shape in options.shapes]
    rows: list[Row | SetRow] = []
    with progress("litmus tests", len(programs)) as advance:
        for program in programs:
            rows.append(set_row(program) if options.all else row(program))
            advance()
    named = [{"shape": p.shape, "threads": p.threads, "where": p.where} for p in programs]
    write_json(options.json, [name | one.as_json(p) for name, p, one in zip(named, programs, rows, strict=True)])
    if options.json != STDOUT:
        print("\n".join(lines(programs, rows)))
    return 0
