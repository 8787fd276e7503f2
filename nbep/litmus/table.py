"""The table of docs/litmus.md: what PTX says of each program, beside what the emulator does with it."""

from __future__ import annotations

from itertools import groupby

from nbep.litmus.axioms import allowed
from nbep.litmus.programs import PROGRAMS, Program
from nbep.litmus.runs import is_race, run

SEEDS = range(60)  # for outcomes that PTX allows
FORBIDDEN_SEEDS = range(4)
CHECKED_SEEDS = range(6)
LINE = "    {:24}{:14}{:12}{:12}{}"


def row(program: Program) -> tuple[str, str, str, str]:
    """Whether PTX allows the weak outcome, and `delayed` shows it; whether PTX sees a race, and `checked`."""
    verdict = allowed(program)
    is_allowed = verdict.allows(program)
    seeds = SEEDS if is_allowed else FORBIDDEN_SEEDS
    is_shown = any(program.is_weak(run(program, "delayed", seed)) for seed in seeds)
    return (
        "allowed" if is_allowed else "forbidden",
        "shown" if is_shown else "-",
        "race" if verdict.has_race else "-",
        "DataRace" if is_race(program, CHECKED_SEEDS) else "-",
    )


def lines() -> list[str]:
    """A line for each program, and under it one for the places where it does the same."""
    out: list[str] = []
    for shape, of_shape in groupby(PROGRAMS, lambda program: program.shape):
        out += ["", LINE.format(shape, "PTX, outcome", "delayed", "PTX, race", "checked")]
        for threads, same in groupby(of_shape, lambda program: program.threads):
            programs = list(same)
            weak = ", ".join(f"{name} = {value}" for name, value in programs[0].weak.items())
            out.append(f"{' || '.join(threads)}: {weak}?")
            rows: dict[tuple[str, str, str, str], list[str]] = {}
            for program in programs:
                rows.setdefault(row(program), []).append(program.where)
            out += [LINE.format(", ".join(places), *found) for found, places in rows.items()]
    return out[1:]


def main() -> None:
    print("\n".join(lines()))
