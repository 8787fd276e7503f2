"""The table of records/litmus.md: what PTX says of each program, beside what the emulator does with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

from nbep.litmus.axioms import allowed
from nbep.litmus.programs import PROGRAMS, Program
from nbep.litmus.runs import is_race, run

SEEDS = range(60)  # for outcomes that PTX allows
FORBIDDEN_SEEDS = range(4)
CHECKED_SEEDS = range(6)
LINE = "    {:24}{:14}{:12}{:12}{}"


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


def row(program: Program) -> Row:
    verdict = allowed(program)
    is_allowed = verdict.allows(program)
    seeds = SEEDS if is_allowed else FORBIDDEN_SEEDS
    is_shown = any(program.is_weak(run(program, "delayed", seed)) for seed in seeds)
    return Row(is_allowed, is_shown, verdict.has_race, is_race(program, CHECKED_SEEDS))


def rows_of(programs: list[Program], advance: Callable[..., None] = lambda: None) -> list[Row]:
    """A row for each; advance is called after each."""
    rows = []
    for program in programs:
        rows.append(row(program))
        advance()
    return rows


def as_json(programs: list[Program], rows: list[Row]) -> list[dict[str, Any]]:
    return [
        {"shape": p.shape, "threads": p.threads, "where": p.where, "weak": p.weak, **found._asdict()}
        for p, found in zip(programs, rows, strict=True)
    ]


def lines(programs: list[Program], rows: list[Row]) -> list[str]:
    """A line for each program, and under it one for the places where it does the same."""
    out: list[str] = []
    found_of = {program.name: found for program, found in zip(programs, rows, strict=True)}
    for shape, of_shape in groupby(programs, lambda program: program.shape):
        out += ["", LINE.format(shape, "PTX, outcome", "delayed", "PTX, race", "checked")]
        for threads, same in groupby(of_shape, lambda program: program.threads):
            alike = list(same)
            weak = ", ".join(f"{name} = {value}" for name, value in alike[0].weak.items())
            out.append(f"{' || '.join(threads)}: {weak}?")
            places: dict[Row, list[str]] = {}
            for program in alike:
                places.setdefault(found_of[program.name], []).append(program.where)
            out += [LINE.format(", ".join(where), *found.words) for found, where in places.items()]
    return out[1:]


def main() -> None:
    programs = list(PROGRAMS)
    print("\n".join(lines(programs, rows_of(programs))))
