"""`nbep litmus`: what PTX says of each litmus test, beside what the emulator does with it.

nbep litmus                  all of them
nbep litmus MP SB --json     some shapes, for programs
nbep litmus IRIW --all       all outcomes, with every late store and early load, and not samples
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from nbep.device.terminal import STDOUT, add_json, progress, write_json
from nbep.lab.litmus.axioms import Outcome, allowed
from nbep.lab.litmus.programs import PROGRAMS, Program
from nbep.lab.litmus.runs import all_outcomes, is_race, run

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
