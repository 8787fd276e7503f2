"""`nbep check --all`: every schedule of a small program; and `--schedule`, one of them again from a file.

docs/every_schedule.md says what "all" means, and what it rests on.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from nbep.device.terminal import progress, write_json
from nbep.emulator.schedule.every import Choice, Every, OutOfTime, Redundant, Tree
from nbep.emulator.schedule.every_loops import Endless
from nbep.emulator.schedule.every_step import Access, Replay, Who
from nbep.emulator.schedule.scheduler import few_collections
from nbep.emulator.schedule.strategies import Strategy
from nbep.lab.check.runs import ERROR, LOOK_ON, WRONG, Finding, Run, debug, made_smaller, option_of, perform
from nbep.lab.check.scenario import ScenarioError, load_scenario

Found = TypeVar("Found")
NOTHING_FOUND, FOUND, NOT_ALL = 0, 1, 3
LIMIT, MINUTES = 100_000, 10.0  # runs and time, by default
TRIED = 20  # runs with smaller parameters at most, for each of them
SMALLER_S = 60.0  # for those of one choice of parameters
SWITCH_RUNS = 60  # runs at most in which a thread gives way less often
COVERS = """\
Every order that can make a difference was tried: of relaxed, volatile, acquire, release and atomic accesses, and of the
moments at which copies, hosts and kernels go on. What this assumes: docs/every_schedule.md"""
COVERS_WEAK = """\
Every order that can make a difference was tried: of accesses to memory, with late stores and early loads, and of the
moments at which copies, hosts and kernels go on. What this assumes: docs/every_schedule.md#weak-memory"""


def check_all(
    console: Console,
    base: Run,
    limit: int | None,
    minutes: float | None,
    to: Path | None,
    note: str | None,
    is_weak: bool = False,
    shrinks: bool = True,
) -> int:
    """Run every schedule, or as many as there is time for. Exit status: 0 none fails, 1 one does, 3 not all were run.

    Args: to: where --json writes; note: what to say if nothing is found; is_weak: with late stores and early loads;
          shrinks: whether to look for a smaller one
    """
    if load_scenario(base.scenario).lets_time_pass:
        raise ScenarioError(f"{base.scenario}: lets time pass, so its waits end by the clock; --all knows no clock")
    limit = limit or LIMIT
    tree = Tree(is_weak=is_weak, finds_races=True, has_parts=True)
    tree.end_time = time.monotonic() + 60 * (minutes or MINUTES)
    failing: Failing | None = None
    first_kind = endless = ""
    number = 0
    with few_collections(), progress(base.scenario, 1000) as show:  # else each run would end with one
        try:
            while failing is None and tree.schedules + tree.redundant < limit and tree.begin():
                if finding := one(tree, base):
                    number = tree.schedules + 1
                    failing = Failing(finding, tree.replay, "")
                show(completed=int(1000 * tree.share))
            first_kind = "" if failing is None else failing.finding.kind
            if first_kind == WRONG:
                show(description="looking for the cause", total=None)
                failing = named(tree, base) or failing
        except Endless as error:
            endless = str(error)
        if failing is not None and shrinks and failing.finding.kind != ERROR:
            show(description="making it smaller", total=None)
            failing = smallest(failing, is_weak)
    summary: dict[str, Any] = {"schedules": tree.schedules, "redundant": tree.redundant, "all": tree.is_whole}
    if failing is not None:
        finding = failing.finding
        write_schedule(finding.run, failing.replay, Path(FILE))
        what = {"kind": finding.kind, "message": finding.message, "schedule": FILE, "smaller": failing.smaller}
        write_json(to, {**summary, "found": {**what, "parameters": finding.run.values}})
        console.print(f"Found in schedule {number}: {first_kind}")
        if finding.kind != first_kind:
            console.print(f"It does not say why. Another schedule does: {finding.kind}")
        if failing.smaller:
            console.print(failing.smaller)
        console.print(f"\n{finding.message}\n")
        console.print(
            f"See it again, with --pdb in the debugger at the step that fails:\n  nbep check --schedule {FILE}"
        )
        return FOUND
    write_json(to, {**summary, "found": None, "share": tree.share, **({"endless": endless} if endless else {})})
    redundant = f"{tree.redundant} more runs were given up as repetitions"
    if not tree.is_whole:
        left = f"about {round(tree.schedules / tree.share) - tree.schedules:,}" if tree.share > 1e-9 else "many"
        left = "many" if endless else left
        console.print(f"Not all: {tree.schedules:,} schedules seen, {left} to go ({redundant}). Nothing found so far.")
        if endless:
            console.print(f"\nA schedule does not end: {endless}")
        return NOT_ALL
    whole = "The only schedule" if tree.schedules == 1 else f"All {tree.schedules:,} schedules"
    if tree.parts is not None and (number := len(tree.parts.several)) > 1:
        whole += f" of {number} parts that share nothing while they run"
    console.print(f"{whole}: nothing found ({redundant}).")
    console.print(COVERS_WEAK if is_weak else COVERS)
    if note is not None:
        console.print(note)
    return NOTHING_FOUND


def named(tree: Tree, run: Run) -> Failing | None:
    """One of the next schedules that says why, where the one under way ends with a wrong result, which says nothing."""
    tree.end()
    last = tree.schedules + LOOK_ON
    while tree.schedules < last and tree.begin():
        finding = one(tree, run)
        if finding is None:
            continue
        if finding.kind not in (WRONG, ERROR):
            return Failing(finding, tree.replay, "")
        tree.end()
    return None


class Failing(NamedTuple):
    """A schedule that fails: what it finds, what makes it again, and what is said of a smaller one."""

    finding: Finding
    replay: Replay
    smaller: str


def smallest(failing: Failing, is_weak: bool = False) -> Failing:
    """A schedule that fails in the same way, with smaller parameters, and then with fewer switches."""
    kind, replays = failing.finding.kind, {failing.finding.run: failing.replay}

    def attempt(run: Run, most: int) -> tuple[Finding | None, int]:
        tree, runs = Tree(is_weak=is_weak, finds_races=True, has_parts=True), 0
        tree.end_time = time.monotonic() + SMALLER_S
        with suppress(Endless):
            while runs < min(most, TRIED) and tree.begin():
                runs += 1
                if finding := one(tree, run):
                    replays[finding.run] = tree.replay
                    return (finding if finding.kind == kind else None), runs
        return None, runs

    finding = made_smaller(failing.finding, attempt)

    def fails(strategy: Every) -> Finding | None:
        found = perform(finding.run, strategy=strategy)
        return found if found is not None and found.kind == kind else None

    both = fewest_preemptions(replays[finding.run], fails, SWITCH_RUNS, is_weak)
    if both is None:
        return Failing(finding, replays[finding.run], "")
    first, best = both
    words = " ".join(f"{option_of(name)} {value}" for name, value in finding.run.parameters)
    left = len(best.preemptions)
    numbers = f"{left} preemption{'s' * (left != 1)} in place of {len(first.preemptions)}"
    return Failing(best.found, best.replay, f"Smallest: {words or 'the same parameters'}, with {numbers}")


def one(tree: Tree, run: Run) -> Finding | None:
    """The next run of the tree."""
    return next_run(tree, lambda strategy: perform(replace(run, memory_model=strategy.memory_model), strategy=strategy))


def next_run(tree: Tree, attempt: Callable[[Every], Found | None]) -> Found | None:
    """The next run of the tree; what it finds, or None.

    Raises: Endless
    """
    gc.collect(0)  # what the last run has left is young now: each look at it later would cost time
    try:
        found = attempt(Every(tree))
    except Redundant:
        tree.end(is_redundant=True)
        return None
    except OutOfTime:
        return None
    if found is None:
        tree.end()
    return found


def run_schedule(console: Console, file: Path, with_pdb: bool, to: Path | None) -> int:
    """Say which program a schedule of a file runs, and run it again. Exit status: 0 nothing was found, 1 something."""
    run, strategy = read_schedule(file)
    path = Path(run.scenario).resolve()
    print(f"{file} runs {path if path.exists() else run.scenario}", file=sys.stderr, flush=True)
    for name, number in run.parameters:
        if name not in load_scenario(run.scenario).parameters or number < (name in ("ranks", "sms")):
            raise ScenarioError(f"{file}: {run.scenario} cannot run with {option_of(name)} {number}")
    if with_pdb:
        return FOUND if debug(run, strategy) else NOTHING_FOUND
    finding = perform(run, strategy=strategy)
    write_json(to, {"found": None if finding is None else {"kind": finding.kind, "message": finding.message}})
    console.print("1 run: nothing found." if finding is None else finding.message)
    return NOTHING_FOUND if finding is None else FOUND


# --- The smallest schedule that fails as one does: it switches seldom away from a thread that could have gone on ------
# Such a switch is a *preemption*. Some are left out: their threads go on, and all others keep their order.
#
#  picks:  a a b a c c b      preemptions: at b, and at the first c if a could go on there
#  tried:  a a a b c c b      without the first one


Fails = Callable[[Every], Any]  # runs under a strategy; what it finds, or None if that is not what is looked for


class Schedule(NamedTuple):
    """A run; at which of its picks somebody was preempted; what it has found."""

    replay: Replay
    preemptions: tuple[int, ...]
    found: Any

    @property
    def switches(self) -> int:
        return sum(one != other for one, other in pairwise(self.replay.picks))

    @property
    def size(self) -> tuple[int, int]:
        return len(self.preemptions), self.switches


class Led(Tree):
    """A run that follows some picks as far as it can, and preempts only at some of them.

    left: the numbers of the picks that have not been made, by who makes them, the next one last
    """

    is_search = False

    def __init__(self, replay: Replay, kept: Container[int], is_weak: bool):
        super().__init__(looked_at=replay.events, is_weak=is_weak, finds_races=True)
        plan = self.plan = replay.picks
        self.planned_decisions = replay.decided
        self.kept = kept
        self.at = 0
        self.left: dict[Who, list[int]] = {}
        for at in reversed(range(len(plan))):
            self.left.setdefault(plan[at], []).append(at)
        self.preemptions: list[int] = []
        self.begin()

    def choose(self, waiting: dict[Who, Access]) -> Who:
        if len(self.steps) == len(self.choices):
            self.choices.append(Choice(waiting, {}, {}))
        who, last = self.next_of(waiting), self.picks[-1] if self.picks else None
        if last is not None and last in waiting and who != last and last not in self.idle:
            if self.at in self.kept:
                self.preemptions.append(len(self.picks))
            else:
                who = last
        left = self.left.get(who)
        self._decided.append(self.planned_decisions[left.pop()] if left else ())
        self.choices[len(self.steps)].chosen = who
        self.note_pick(who)
        return who

    @property
    def is_led(self) -> bool:
        return self.at < len(self.plan)

    def next_of(self, waiting: dict[Who, Access]) -> Who:
        """Whose turn it is by the plan; behind its end anybody's."""
        while self.at < len(self.plan):
            who = self.plan[self.at]
            left = self.left[who]
            if left and left[-1] <= self.at and who in waiting:
                return who
            if left and left[-1] <= self.at:
                left.pop()
            self.at += 1
        return min(waiting)


def led(replay: Replay, kept: Container[int], fails: Fails, is_weak: bool) -> Schedule | None:
    """The run that follows another one, if it fails."""
    tree = Led(replay, kept, is_weak)
    found = fails(Every(tree))
    return None if found is None else Schedule(tree.replay, tuple(tree.preemptions), found)


def fewest_preemptions(
    replay: Replay, fails: Fails, most: int, is_weak: bool = False
) -> tuple[Schedule, Schedule] | None:
    """The schedule of a run, and the smallest one that still fails, in so many runs; None if it fails no more."""
    first = led(replay, range(len(replay.picks)), fails, is_weak)
    if first is None:
        return None
    best, length = first, max(len(first.preemptions), 1)
    while length > 0:
        end = len(best.preemptions)
        while end > 0 and most > 0:
            most -= 1
            kept = {*best.preemptions[: max(end - length, 0)], *best.preemptions[end:]}
            found = led(best.replay, kept, fails, is_weak)
            if found is not None and found.size < best.size:
                best = found
                end = min(end, len(best.preemptions))
            else:
                end -= length
        length //= 2
    return first, best


# A schedule in a file: what --schedule needs to make a run again


FILE = "schedule.json"


def write_schedule(run: Run, replay: Replay, file: Path) -> None:
    """What a run depends on: the scenario, the memory model, and what was chosen."""
    of_run = {"scenario": run.scenario, "parameters": dict(run.parameters), "faults": run.faults}
    file.write_text(json.dumps({**of_run, "memory_model": run.memory_model, **replay._asdict()}) + "\n")


# How reading a file may fail that is no schedule.
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_schedule(file: Path) -> tuple[Run, Strategy]:
    """The run of a file, and its strategy. Nothing of the run is loaded by then.

    Raises: ScenarioError if it is none
    """
    try:
        value = json.loads(file.read_text())
        parameters = tuple((name, number(given)) for name, given in value["parameters"].items())
        model, scenario = text(value["memory_model"]), text(value["scenario"])
        tree = tree_in(value, model == "delayed")
        run = Run(scenario, parameters, 0, "uniform", model, tuple(map(text, value["faults"])))
    except BROKEN as error:
        raise ScenarioError(f"{file}: no schedule of `nbep check --all`: {error}") from None
    return run, Every(tree)


def tree_in(value: Any, is_weak: bool = False) -> Tree:
    """A run of who went on at each choice, as a file says it, with the events that were choices, and all else."""
    events = ((text(one[0]), number(one[1]), number(one[2]), number(one[3])) for one in value["events"])
    decided = [list(map(number, made)) for made in value["decided"]]
    tree = Tree(map(thread, value["picks"]), events, decided, is_weak=is_weak, finds_races=True)
    tree.begin()
    return tree


def thread(who: Any) -> Who:
    """A thread, as a file has it."""
    return number(who[0]), text(who[1]), number(who[2]), number(who[3]), number(who[4])


def number(value: Any) -> int:
    if type(value) is not int or abs(value) >> 31:
        raise ValueError(f"{str(value)[:20]} stands where a number of 32 bits must be")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{str(value)[:20]} stands where text must be")
    return value
