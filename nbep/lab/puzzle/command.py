"""`nbep puzzle`: list the puzzles of the folder puzzles/, or run one.

nbep puzzle                 what there is, and which you have solved
nbep puzzle 1               check puzzle 1; the same as python puzzles/01_flag.py
nbep puzzle 1 --hint        a hint; --hint 2 shows a second one
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from nbep.device.terminal import STDOUT, add_json, write_json
from nbep.host.target.resolve import resolve_target
from nbep.lab.puzzle.check import MINUTES, MODELS, attempt, check, explain, read_schedule, write_schedule
from nbep.lab.puzzle.frame import Puzzle

PROGRESS = ".progress.json"
CHAPTER_0 = "notebooks/00_the_flag_that_overtook.ipynb"


def folder() -> Path | None:
    """The folder of puzzles: in the working directory, or beside the package in a checkout."""
    for parent in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if list((parent / "puzzles").glob("[0-9][0-9]_*.py")):
            return parent / "puzzles"
    return None


def files() -> list[Path]:
    here = folder()
    return [] if here is None else sorted(here.glob("[0-9][0-9]_*.py"))


def load(path: Path) -> Puzzle:
    """The puzzle that a file defines."""
    return _module(path, f"puzzle_{path.stem}").PUZZLE


def solution_of(path: Path) -> dict:
    """The functions of the solution of a puzzle's file."""
    return vars(_module(path.parent / "solutions" / path.name, f"solution_{path.stem}"))


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # NamedTuples of parameters are looked up there
    spec.loader.exec_module(module)
    return module


def run_file(puzzle: Puzzle, path: str, argv: Sequence[str] | None = None) -> int:
    """What a puzzle's file does when it is run. Returns the exit status: 0 if it is solved."""
    parser = argparse.ArgumentParser(description=puzzle.title)
    parser.add_argument("--target", choices=("emulator", "cuda"), default="emulator", help="where to run it")
    parser.add_argument("--seed", type=int, help="one run on the emulator, under this seed")
    parser.add_argument("--memory-model", choices=MODELS, default="sc", help="of that run")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="run again the schedule that the check has found")
    parser.add_argument("--runs", type=int, help=f"seeds under each memory model (default: {puzzle.runs})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for every schedule (default: 2)")
    parser.add_argument("--solution", action="store_true", help="fill the holes from the folder solutions")
    parser.add_argument("--hint", type=int, nargs="?", const=1, metavar="N", help="show the first hint, or N of them")
    parser.add_argument("--no-picture", action="store_true", help="draw no picture of the run")
    options = parser.parse_args(argv)
    try:
        resolve_target(options.target)
    except RuntimeError as error:
        parser.error(str(error))
    file = Path(path).resolve()
    if options.schedule is not None:
        try:
            read_schedule(options.schedule)
        except ValueError as error:
            parser.error(str(error))
    if options.hint is not None:
        print("\n".join(hints(file, options.hint)))
        return 0
    if options.solution:
        with puzzle.filled(solution_of(file)):
            return _run(puzzle, file, options)
    return _run(puzzle, file, options)


def hints(path: Path, number: int) -> list[str]:
    """The first hints and how to get the next one. They stand beside the solution, from the vaguest to the plainest."""
    every = solution_of(path)["HINTS"]
    shown = [f"Hint {i}: {hint}" for i, hint in enumerate(every[:number], 1)]
    left = len(every) - len(shown)
    more = (
        f"--hint {len(shown) + 1} shows one more." if left else "That was the last one; --solution runs the solution."
    )
    return [*shown, more]


def _run(puzzle: Puzzle, file: Path, options: argparse.Namespace) -> int:
    print(puzzle.text if puzzle.unfilled() else puzzle.title)
    schedule: Path | None = None
    if options.schedule is not None and not puzzle.unfilled() and options.target == "emulator":
        schedule = options.schedule
        solved, kind, seed, model = _once(puzzle.made_smaller(), 0, "checked", schedule)
    elif options.seed is not None and not puzzle.unfilled() and options.target == "emulator":
        solved, kind, seed, model = _once(puzzle, options.seed, options.memory_model, None)
    else:
        verdict = check(puzzle, options.target, options.runs, options.minutes)
        print(verdict.words)
        if verdict.solved and options.target == "emulator" and not options.solution:
            found = progress(file.parent) | {file.stem: checksum(file)}
            with contextlib.suppress(OSError):
                (file.parent / PROGRESS).write_text(json.dumps(found, indent=1))
            print(f"\nNext: {_next(file)}")
        solved, kind, seed, model = verdict.solved, verdict.kind, verdict.seed, verdict.memory_model
        if verdict.replay is not None:
            schedule = file.parent / "pictures" / f"{file.stem}.schedule.json"
            write_schedule(verdict.replay, schedule)
    if kind == "hole":
        print("For a hint: --hint.")
    if kind in ("hole", "unknown") or options.target == "cuda":
        return int(not solved)
    if not solved and options.seed is None and options.schedule is None:
        which = f"--seed {seed} --memory-model {model}" if schedule is None else f"--schedule {_short(schedule)}"
        print(f"\nThis run again: python {_short(file)} {which}")
    if not options.no_picture:
        from nbep.lab.puzzle.picture import save

        picture = file.parent / "pictures" / f"{file.stem}.png"
        if save(puzzle, picture, seed, model, schedule):
            print(f"Picture of this run: {_short(picture)}")
    return int(not solved)


def _once(puzzle: Puzzle, seed: int, memory_model: str, schedule: Path | None) -> tuple[bool, str, int, str]:
    """One run, and what is to be said of it."""
    clue = attempt(puzzle, seed, memory_model, strategy="uniform" if schedule is None else read_schedule(schedule))
    print("This run is right." if clue is None else explain(clue))
    return clue is None, clue.kind if clue else "", seed, memory_model


def progress(folder: Path) -> dict[str, int]:
    """The puzzles that were solved, by the names of their files, each with a checksum of the file."""
    try:
        return json.loads((folder / PROGRESS).read_text())
    except (OSError, ValueError):
        return {}


def checksum(file: Path) -> int:
    return zlib.crc32(file.read_bytes())


def state_of(file: Path, puzzle: Puzzle) -> str:
    """ "solved", "changed" since then, "begun", or "open"."""
    solved = progress(file.parent).get(file.stem)
    if solved is not None:
        return "solved" if solved == checksum(file) else "changed"
    return "open" if len(puzzle.unfilled()) == len(puzzle.holes) else "begun"


def _next(file: Path) -> str:
    """What comes after a puzzle: the first one that is not solved yet, or the course."""
    later = [path for path in sorted(file.parent.glob("[0-9][0-9]_*.py")) if path.stem > file.stem]
    solved = progress(file.parent)
    return next((f"python {_short(path)}" for path in later if path.stem not in solved), "the rest of docs/course.md")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit status."""
    parser = argparse.ArgumentParser(prog="nbep puzzle", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("number", type=int, nargs="?", help="which one; none: list them")
    add_json(parser)
    options, rest = parser.parse_known_args(argv)
    found = files()
    if not found:
        parser.error("no folder puzzles/ here: run it in a checkout of nbep")
    if options.number is None:
        puzzles = {path: load(path) for path in found}
        states = {path: state_of(path, puzzle) for path, puzzle in puzzles.items()}
        rows = [
            {"number": int(path.name[:2]), "title": puzzle.title, "state": states[path]}
            for path, puzzle in puzzles.items()
        ]
        write_json(options.json, rows)
        if options.json != STDOUT:
            print("\n".join(f"{states[path]:8}{puzzle.title}" for path, puzzle in puzzles.items()))
            print(f"\nYou have solved {list(states.values()).count('solved')} of {len(found)}.")
            print(f"Before puzzle 1, read or run {CHAPTER_0}: why a flag can arrive before the data.")
            print("`nbep puzzle 1` checks puzzle 1, and `nbep puzzle 1 --hint` gives a hint.")
        return 0
    if options.json is not None:
        parser.error("--json: is for the list of puzzles, without a number")
    chosen = [path for path in found if int(path.name[:2]) == options.number]
    if not chosen:
        parser.error(f"number: got {options.number}; must be 1 to {len(found)}")
    return run_file(load(chosen[0]), str(chosen[0]), rest)
