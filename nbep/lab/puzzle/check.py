"""Run a puzzle under many seeds and memory models, then in every schedule, and say in words what is wrong.

sc        a few seeds: deadlocks, wrong results, accesses that may not be
checked   accesses that nothing orders
delayed   stores that arrive late: wrong results again
cuda      the same kernel on a GPU: wrong results, waits that do not end
"""

from __future__ import annotations

import json
import re
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbep.emulator import EmulatorError
from nbep.emulator.machine import errors
from nbep.emulator.schedule.every import Every, Tree
from nbep.emulator.schedule.every_loops import Endless
from nbep.emulator.schedule.every_step import Replay
from nbep.emulator.schedule.strategies import Strategy
from nbep.host.ranks.timeouts import PeerTimeout
from nbep.lab.check.every import BROKEN, next_run, tree_in
from nbep.lab.puzzle.advice import LAST_WORDS, mistake
from nbep.lab.puzzle.frame import LONGEST_WAIT_MS, Clue, Puzzle

# Every schedule, with few rows, calls or the like: a wrong step that seeds seldom meet shows there.
# docs/every_schedule.md says what "every" means

RUNS = 400  # at most, so that a check stays short
MINUTES = 2.0  # a check that takes longer says so, and is no proof
Attempt = Callable[[Puzzle, Strategy], Clue | None]


class Seen(NamedTuple):
    """What the schedules have shown.

    words: which were run
    is_whole: whether all were; is_over: whether as many were as there should be, and all were right
    clue, replay: of the one that went wrong, and what makes it again
    """

    words: str
    is_whole: bool
    is_over: bool = True
    clue: Clue | None = None
    replay: Replay | None = None


def explore(puzzle: Puzzle, attempt: Attempt, minutes: float = MINUTES) -> Seen:
    """Run every schedule of the puzzle made smaller, or as many as `RUNS`: the same ones on each machine."""
    number, what = puzzle.few or (0, "")
    of = f" of {number} {what}" if what else ""
    if puzzle.has_too_many_schedules:
        return Seen("There are too many schedules to run each of them.", False)
    small, tree = puzzle.made_smaller(), Tree()
    tree.end_time = time.monotonic() + 60 * minutes
    try:
        while tree.schedules + tree.redundant < RUNS and tree.begin():
            if clue := next_run(tree, lambda strategy: attempt(small, strategy)):
                return Seen(f"Schedule {tree.schedules + 1}{of} is wrong.", False, False, clue, tree.replay)
    except Endless as error:
        return Seen(f"A schedule{of} does not end: {error}", False, False)
    if tree.is_whole:
        return Seen(f"the only schedule{of}" if tree.schedules == 1 else f"all {tree.schedules} schedules{of}", True)
    if tree.schedules + tree.redundant >= RUNS:
        return Seen(f"There are too many schedules{of} to run each; {tree.schedules} were run.", False)
    ran = f"{tree.schedules} of at least {tree.schedules + max(tree.num_left, 1)} schedules{of} were run"
    return Seen(f"Out of time: {ran} in {minutes:g} minutes. For more time: --minutes N.", False, False)


def write_schedule(replay: Replay, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(replay._asdict()) + "\n")


def read_schedule(file: Path) -> Every:
    """The strategy that runs a schedule of a file again.

    Raises: ValueError if it is none
    """
    try:
        return Every(tree_in(json.loads(file.read_text())))
    except BROKEN as error:
        raise ValueError(f"{file}: no schedule of a puzzle: {error}") from None


MODELS = ("sc", "checked", "delayed")
_BELOW = ("nbep/emulator", "nbep/host", "nbep/lang.py", "nbep/lab/puzzle")  # frames of these say nothing of the puzzle
SHORT = 24  # elements of an array that are printed
GPU_RUNS = 20
KINDS = {
    errors.DataRace: "race",
    errors.DeadlockError: "deadlock",
    errors.Divergence: "divergence",
    PeerTimeout: "deadlock",
}
KIND_WORDS = {
    "race": "A data race: nothing orders two accesses to the same bytes. A GPU may give a wrong result.",
    "deadlock": "A deadlock: each thread below waits for something that no other thread will do.",
    "divergence": "Divergence: threads of a warp or a block must all come to one line, and some go another way.",
    "memory": "The run stopped at an access, or a step, that is not allowed.",
    "error": "Python stopped the kernel with an error.",
    "wrong result": "All threads have ended, but the result is not what NumPy computes.",
}
ERROR_WORDS = {
    PeerTimeout: "A wait timed out: the thread below waits for something that no other thread did in time.",
    errors.OutOfBounds: "A thread reads or writes past the end of an array, or in front of it.",
    errors.Misaligned: "An address is no multiple of the size of the access.",
    errors.ReadOnly: "A thread writes to an input.",
    errors.Uninitialized: "A thread reads bytes that no thread has written.",
    errors.NonCoherent: "Bytes that were read as constant, with ld_nc, are written while the kernel runs.",
    errors.ProxyFence: "The copy engine reads shared memory that plain stores wrote, with no proxy fence in between.",
    errors.Unmapped: "Nothing lies at this address: is it a value, 0, or the result of wrong arithmetic?",
}


class Verdict(NamedTuple):
    """What the check says: whether the puzzle is solved, in words, and of which run."""

    solved: bool
    words: str
    kind: str = ""
    seed: int = 0
    memory_model: str = "sc"
    replay: Replay | None = None  # of a schedule, if no seed has found anything


def check(puzzle: Puzzle, target: str = "emulator", runs: int | None = None, minutes: float = MINUTES) -> Verdict:
    """Run the puzzle until something is wrong, or all runs were right.

    Args: runs: seeds under each memory model; minutes: for every schedule
    """
    if missing := puzzle.missing():
        where = " and ".join(f"`{name}`" for name in missing)
        return Verdict(False, f"The file has no function {where} any more. The kernel calls it: put it back.", "hole")
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
    seen = explore(puzzle, lambda small, strategy: attempt(small, 0, "checked", strategy=strategy), minutes)
    if seen.clue is not None:
        few = f"No seed has shown this. {seen.words}"
        return Verdict(False, f"{few}\n\n{explain(seen.clue)}", seen.clue.kind, 0, "checked", seen.replay)
    runs_of_seeds = f"{len(MODELS) * num_runs} runs under {', '.join(MODELS)}"
    if not seen.is_over:
        found = f"Nothing wrong was found in {runs_of_seeds}. It is not solved yet, for not every schedule was run."
        return Verdict(False, f"{textwrap.fill(found, 100)}\n\n{seen.words}", "unknown")
    parts = [
        f"Solved: {seen.words}, and {runs_of_seeds}: all are right."
        if seen.is_whole
        else f"Solved: {runs_of_seeds}, and all are right. {seen.words}",
        puzzle.remark(puzzle),
        puzzle.learned and f"What you know now: {puzzle.learned}",
        puzzle.others and f"Other solutions: {puzzle.others}",
    ]
    return Verdict(True, "\n\n".join(textwrap.fill(part, 100) for part in parts if part))


def attempt(
    puzzle: Puzzle,
    seed: int = 0,
    memory_model: str = "sc",
    tracer: Any = None,
    strategy: str | Strategy = "uniform",
) -> Clue | None:
    """One run on the emulator; what is wrong with it, or None."""
    try:
        [results] = puzzle.run(seed=seed, memory_model=memory_model, tracer=tracer, strategy=strategy)
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
    words = f"Right in {GPU_RUNS} runs on the GPU. A missing order may not show there: run it on the emulator, too."
    return Verdict(True, words)


def explain(clue: Clue) -> str:
    """What is wrong, in words: of what kind it is, advice that knows the puzzle, and the evidence."""
    what = clue.report.partition("\n")[0].partition(":")[0]
    words = next((text for error, text in ERROR_WORDS.items() if error.__name__ == what), KIND_WORDS[clue.kind])
    if "invalid type for format" in clue.report or "required argument is not" in clue.report:
        words = "A thread stores something that is not a number of this type."
    advice = mistake(clue) or clue.puzzle.advice(clue)
    advice = advice or next((words for what, words in LAST_WORDS.items() if clue.about(what)), "")
    parts = [words, advice, _missed(clue), clue.report or _difference(clue)]
    return "\n\n".join(part if part is parts[-1] else textwrap.fill(part, 100) for part in parts if part)


def _missed(clue: Clue) -> str:
    """Of a deadlock: that a wait asks for a number that the cell has passed."""
    if not clue.puzzle.ring and not clue.calls("atom_add"):
        return ""
    for wanted, seen in re.findall(r"expects (\d+) and sees (\d+)", clue.report):
        if int(seen) > int(wanted):
            return (
                f"A wait asks for exactly {wanted} and sees {seen}. The cell counts on and may have passed {wanted}: "
                f"wait until it is {wanted} or more."
            )
    return ""


def clue_of(puzzle: Puzzle, error: Exception) -> Clue:
    """What an error that ended a run says."""
    known = isinstance(error, (EmulatorError, PeerTimeout))
    kind = next((name for type_, name in KINDS.items() if isinstance(error, type_)), "memory" if known else "error")
    if "can never fill" in str(error):  # not all threads of the block come to its barrier
        kind = "divergence"
    report = f"{type(error).__name__}: {error}"
    if isinstance(error, PeerTimeout) and error.report is not None:
        who = f"rank {error.rank}, block {error.report.block}, thread {error.report.thread}"
        report = f"PeerTimeout: {who} waited more than {LONGEST_WAIT_MS} ms"
    if kind == "error":
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not any(part in frame.filename for part in _BELOW)
        ][-2:]
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
