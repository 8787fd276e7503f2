"""Run a puzzle under many seeds and memory models, and say in words what is wrong.

sc        a few seeds: deadlocks, wrong results, accesses that may not be
checked   accesses that nothing orders
delayed   stores that arrive late: wrong results again
cuda      the same kernel on a GPU: wrong results, waits that do not end
"""

from __future__ import annotations

import difflib
import re
import textwrap
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import nbep
from nbep.emulator.machine import errors
from nbep.puzzle.frame import LONGEST_WAIT_MS, Clue, Puzzle

MODELS = ("sc", "checked", "delayed")
SHORT = 24  # elements of an array that are printed
GPU_RUNS = 20
KINDS = {
    errors.DataRace: "race",
    errors.DeadlockError: "deadlock",
    errors.Divergence: "divergence",
    nbep.PeerTimeout: "deadlock",
}
KIND_WORDS = {
    "race": "Two accesses to the same bytes have no order. The result may be right here; on a GPU it need not be.",
    "deadlock": "Nobody can go on: each thread below waits for something that no other will do any more.",
    "divergence": "Threads of a warp, or of a block, that must meet at one line do not: some go another way.",
    "memory": "The run was stopped at an access, or a step, that may not be.",
    "error": "The kernel stopped with an error of Python.",
    "wrong result": "All threads have ended, but the result is not what NumPy computes.",
}
ERROR_WORDS = {
    nbep.PeerTimeout: "A wait did not end: the thread below waits for something that no other does in time.",
    errors.OutOfBounds: "A thread reaches past the end of an array.",
    errors.Misaligned: "An address is no multiple of the size of the access.",
    errors.ReadOnly: "A thread writes to an input.",
    errors.Uninitialized: "A thread reads bytes that nobody has written.",
    errors.NonCoherent: "Bytes that were read as constant, with ld_nc, are written while the kernel runs.",
    errors.ProxyFence: "The copy engine reads shared memory that plain stores wrote, and no proxy fence lies between.",
    errors.Unmapped: "An address means nothing: 0, another rank's own, or arithmetic gone wrong.",
}


class Verdict(NamedTuple):
    """What the check says: whether the puzzle is solved, in words, and of which run."""

    solved: bool
    words: str
    kind: str = ""
    seed: int = 0
    memory_model: str = "sc"


def check(puzzle: Puzzle, target: str = "emulator", runs: int | None = None) -> Verdict:
    """Run the puzzle until something is wrong, or all runs were right."""
    if unfilled := puzzle.unfilled():
        where = " and ".join(f"`{name}`" for name in unfilled)
        return Verdict(False, f"There is still a hole in {where}. Put your code where it says hole().", "hole")
    if target == "cuda":
        return _check_on_gpu(puzzle)
    num_runs = puzzle.runs if runs is None else runs
    for model in MODELS:
        for seed in range(num_runs):
            if clue := attempt(puzzle, seed, model):
                return Verdict(False, explain(clue), clue.kind, seed, model)
    return Verdict(True, f"Solved: {len(MODELS) * num_runs} runs, under {', '.join(MODELS)}, all right.")


def attempt(puzzle: Puzzle, seed: int = 0, memory_model: str = "sc", tracer: Any = None) -> Clue | None:
    """One run on the emulator; what is wrong with it, or None."""
    try:
        [results] = puzzle.run(seed=seed, memory_model=memory_model, tracer=tracer)
    except Exception as error:  # whatever the user's code raises is an answer
        return clue_of(puzzle, error)
    return puzzle.first_difference(results)


def _check_on_gpu(puzzle: Puzzle) -> Verdict:
    try:
        clues = map(puzzle.first_difference, puzzle.run("cuda", GPU_RUNS))
        clue = next((clue for clue in clues if clue is not None), None)
    except Exception as error:
        clue = clue_of(puzzle, error)
    if clue is not None:
        return Verdict(False, explain(clue), clue.kind)
    words = f"Right in {GPU_RUNS} runs on the GPU. That an order is missing may not show there: run the emulator too."
    return Verdict(True, words)


def explain(clue: Clue) -> str:
    """What is wrong, in words: of what kind it is, advice that knows the puzzle, and the evidence."""
    what = clue.report.partition("\n")[0].partition(":")[0]
    words = next((text for error, text in ERROR_WORDS.items() if error.__name__ == what), KIND_WORDS[clue.kind])
    if "invalid type for format" in clue.report or "required argument is not" in clue.report:
        words = "A thread stores something that is no number of this type. Does a function of yours return nothing?"
    parts = [words, clue.puzzle.advice(clue), _missed(clue), clue.report or _difference(clue)]
    return "\n\n".join(part if part is parts[-1] else textwrap.fill(part, 100) for part in parts if part)


def _missed(clue: Clue) -> str:
    """Of a deadlock: that a wait looks for a number that was there and is over."""
    for wanted, seen in re.findall(r"expects (\d+) and sees (\d+)", clue.report):
        if int(seen) > int(wanted):
            return f"A wait looks for {wanted} and sees {seen}: the cell counts on and may be past it."
    return ""


def clue_of(puzzle: Puzzle, error: Exception) -> Clue:
    """What an error that ended a run says."""
    known = isinstance(error, (nbep.EmulatorError, nbep.PeerTimeout))
    kind = next((name for type_, name in KINDS.items() if isinstance(error, type_)), "memory" if known else "error")
    if "can never fill" in str(error):  # not all threads of the block come to its barrier
        kind = "divergence"
    report = f"{type(error).__name__}: {error}"
    if isinstance(error, NameError):
        near = difflib.get_close_matches(error.name, puzzle.scope, n=4, cutoff=0.8)
        hint = f"; near it are {', '.join(near)}" if near else ""
        report += f"{hint}. docs/primitives.md lists all loads, stores and atomics"
    if isinstance(error, nbep.PeerTimeout) and error.report is not None:
        who = f"rank {error.rank}, block {error.report.block}, thread {error.report.thread}"
        report = f"PeerTimeout: {who} waited more than {LONGEST_WAIT_MS} ms"
    if kind == "error":
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        report = "\n".join([report, *(f"  at {frame.filename}:{frame.lineno} ({frame.name})" for frame in frames)])
    return Clue(puzzle, kind, report.replace(f"{Path.cwd()}/", ""))


def _difference(clue: Clue) -> str:
    got, expected = np.asarray(clue.got), np.asarray(clue.expected)
    wrong = np.argwhere(~((got == expected) | ((got != got) & (expected != expected))))
    places = ", ".join(str(tuple(map(int, place)) if len(place) > 1 else int(place[0])) for place in wrong[:6])
    more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
    first = tuple(wrong[0])
    values = f"got {got[first]}, expected {expected[first]}"
    lines = [f"`{clue.name}` of rank {clue.rank} differs at {places}{more}: {values}"]
    if got.size <= SHORT:
        lines += [f"  got      {got.tolist()}", f"  expected {expected.tolist()}"]
    return "\n".join(lines)
