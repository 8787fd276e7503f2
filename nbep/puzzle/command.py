"""`nbep puzzle`: list the puzzles of the folder puzzles/, or run one.

nbep puzzle                 what there is
nbep puzzle 1               check puzzle 1; the same as python puzzles/01_flag.py
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from nbep.device.terminal import STDOUT, add_json, write_json
from nbep.host.target.resolve import resolve_target
from nbep.puzzle.check import MODELS, attempt, check, explain
from nbep.puzzle.frame import Puzzle


def folder() -> Path | None:
    """The folder of puzzles: in the working directory, or beside the package in a checkout."""
    for parent in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if list((parent / "puzzles").glob("[0-9][0-9]_*.py")):
            return parent / "puzzles"
    return None


def files() -> list[Path]:
    here = folder()
    return [] if here is None else sorted(here.glob("[0-9][0-9]_*.py"))


def load(path: Path) -> Puzzle:
    """The puzzle that a file defines."""
    spec = importlib.util.spec_from_file_location(f"puzzle_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuples of parameters are looked up there
    spec.loader.exec_module(module)
    return module.PUZZLE


def solution_of(path: Path) -> dict:
    """The functions of the solution of a puzzle's file."""
    spec = importlib.util.spec_from_file_location(f"solution_{path.stem}", path.parent / "solutions" / path.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def run_file(puzzle: Puzzle, path: str, argv: Sequence[str] | None = None) -> int:
    """What a puzzle's file does when it is run. Returns the exit status: 0 if it is solved."""
    parser = argparse.ArgumentParser(description=puzzle.title)
    parser.add_argument("--target", choices=("emulator", "cuda"), default="emulator", help="where to run it")
    parser.add_argument("--seed", type=int, help="one run on the emulator, under this seed")
    parser.add_argument("--memory-model", choices=MODELS, default="sc", help="of that run")
    parser.add_argument("--runs", type=int, help=f"seeds under each memory model (default: {puzzle.runs})")
    parser.add_argument("--solution", action="store_true", help="fill the holes from the folder solutions")
    parser.add_argument("--no-picture", action="store_true")
    options = parser.parse_args(argv)
    try:
        resolve_target(options.target)
    except RuntimeError as error:
        parser.error(str(error))
    file = Path(path).resolve()
    if options.solution:
        with puzzle.filled(solution_of(file)):
            return _run(puzzle, file, options)
    return _run(puzzle, file, options)


def _run(puzzle: Puzzle, file: Path, options: argparse.Namespace) -> int:
    print(puzzle.text if puzzle.unfilled() else puzzle.title)
    if options.seed is not None and not puzzle.unfilled() and options.target == "emulator":
        clue = attempt(puzzle, options.seed, options.memory_model)
        print("This run is right." if clue is None else explain(clue))
        solved, kind, seed, model = clue is None, clue.kind if clue else "", options.seed, options.memory_model
    else:
        verdict = check(puzzle, options.target, options.runs)
        print(verdict.words)
        solved, kind, seed, model = verdict.solved, verdict.kind, verdict.seed, verdict.memory_model
    if kind == "hole" or options.target == "cuda":
        return int(not solved)
    if not solved and options.seed is None:
        print(f"\nThis run again: python {_short(file)} --seed {seed} --memory-model {model}")
    if not options.no_picture:
        from nbep.puzzle.picture import save

        picture = file.parent / "pictures" / f"{file.stem}.png"
        if save(puzzle, picture, seed, model):
            print(f"Picture of this run: {_short(picture)}")
    return int(not solved)


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
        titles = {int(path.name[:2]): load(path).title for path in found}
        write_json(options.json, [{"number": number, "title": title} for number, title in titles.items()])
        if options.json != STDOUT:
            print("\n".join(titles.values()))
        return 0
    if options.json is not None:
        parser.error("--json: is for the list of puzzles, without a number")
    chosen = [path for path in found if int(path.name[:2]) == options.number]
    if not chosen:
        parser.error(f"number: got {options.number}; must be 1 to {len(found)}")
    return run_file(load(chosen[0]), str(chosen[0]), rest)
