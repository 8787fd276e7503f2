"""One run of a scenario: all that it depends on, what it finds, and the command that does it again."""

from __future__ import annotations

import multiprocessing
import pdb
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import Any

from nbep.device.extras import what_is_missing
from nbep.emulator import DataRace, DeadlockError, EmulatorError
from nbep.emulator.machine.source import kernel_frame
from nbep.emulator.schedule.strategies import Strategy
from nbep.host.faults import NetworkError
from nbep.host.ranks.timeouts import PeerTimeout
from nbep.host.spawn import spawn
from nbep.lab.check.catalogue import fault_of, faults_of
from nbep.lab.check.faults import Fault, broken
from nbep.lab.check.scenario import Scenario, accepted, load_module, load_scenario

MODELS = ("checked", "delayed", "sc")  # the one that says most comes first
# What a search runs if no model is asked for: a run of `checked` takes the same steps as one of `sc` with its seed, so
# what `sc` shows, `checked` has shown.
SEARCHED = MODELS[:2]
STRATEGIES = ("uniform", "few_preemptions", "starved", "late")
PACKAGE_PARENT = Path(__file__).resolve().parents[3]

# What a run may find, in the words of the table of faults.
RACE, WRONG, DEADLOCK, MEMORY, TIMEOUT, REPORTED = (
    "race",
    "wrong result",
    "deadlock",
    "memory check",
    "time-out",
    "kernel's report",
)
ERROR = "error"


@dataclass(frozen=True)
class Run:
    """All that a run depends on.

    Attributes:
        parameters: those of the scenario that are not as it says
        strategy: see nbep.emulator.schedule.strategies
        faults: names of what is broken in it
        engine: what runs kernels, see nbep.spawn: no part of what it finds
    """

    scenario: str
    parameters: tuple[tuple[str, int], ...] = ()
    seed: int = 0
    strategy: str = "uniform"
    memory_model: str = "sc"
    faults: tuple[str, ...] = ()
    engine: str | None = None

    @property
    def values(self) -> dict[str, int]:
        """All parameters of the scenario."""
        return {**load_scenario(self.scenario).parameters, **dict(self.parameters)}

    def with_values(self, **changed: int) -> Run:
        """The same run with other parameters."""
        plain = load_scenario(self.scenario).parameters
        values = {**self.values, **changed}
        return replace(self, parameters=tuple((name, values[name]) for name in plain if values[name] != plain[name]))

    @property
    def command(self) -> str:
        """What a user types to see it again."""
        words = ["nbep", "check", self.scenario]
        for name, value in self.parameters:
            words += [option_of(name), str(value)]
        words += ["--seed", str(self.seed), "--strategy", self.strategy, "--memory-model", self.memory_model]
        for name in self.faults:
            words += ["--fault", name]
        return shlex.join(words)


@dataclass(frozen=True)
class Finding:
    """What a run has found.

    Attributes:
        kind: one of the words above
        message: what was raised
        calls: primitive calls up to there
    """

    run: Run
    kind: str
    message: str
    calls: int

    @property
    def first_line(self) -> str:
        return self.message.partition("\n")[0]


class World:
    """Takes note of the world of a run."""

    def __init__(self) -> None:
        self.world: Any = None

    @property
    def calls(self) -> int:
        return 0 if self.world is None else self.world.calls


def option_of(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")


def faults_in(run: Run) -> list[Fault]:
    """The faults of a run, of nbep's kernels or of those in the user's file."""
    path = Path(run.scenario)
    own = faults_of(load_module(path)) if run.faults and path.suffix == ".py" else []
    return [fault_of(name, own) for name in run.faults]


def perform(
    run: Run,
    on_failure: Callable[[BaseException], object] | None = None,
    seen: World | None = None,
    strategy: Strategy | None = None,
    tracer: Any = None,
) -> Finding | None:
    """Run it; what it finds, or None.

    Args:
        on_failure: is called with the first error, while all threads still stand where they were
        seen: takes note of the world
        strategy: is that of `--all`, which has no name
        tracer: sees the run
    """
    scenario = load_scenario(run.scenario)
    seen = seen or World()
    with broken(*faults_in(run)):
        try:
            _run(scenario, run, on_failure, seen, strategy, tracer)
        except Exception as error:
            if isinstance(error, ImportError) and what_is_missing(error):
                raise  # the command says what to install
            kind = ERROR if isinstance(error, ValueError) and seen.calls == 0 else kind_of(error)  # wrong numbers
            return Finding(run, kind, text_of(error), seen.calls)
    return None


def _run(
    scenario: Scenario, run: Run, on_failure: Callable | None, seen: World, strategy: Strategy | None, tracer: Any
) -> None:
    values = run.values
    options: dict[str, Any] = {
        "seed": run.seed, "memory_model": run.memory_model, "strategy": strategy or run.strategy, "engine": run.engine,
        "num_sms": values.get("sms"), "on_failure": on_failure, "tracer": tracer,
    }  # fmt: skip
    if scenario.script is not None:
        scenario.script(seen, **options)
        return
    arguments = accepted(scenario.main, values)

    def main(comm: Any) -> Any:
        seen.world = comm.runtime.world
        return scenario.main(comm, **arguments)

    on_deadlock = "expire" if scenario.lets_time_pass else "raise"
    results = spawn(main, values["ranks"], "emulator", on_deadlock=on_deadlock, **options)
    if scenario.check is not None:
        try:
            scenario.check(results, **accepted(scenario.check, values))
        except Exception as error:
            if on_failure is not None:
                on_failure(error)
            raise


def kind_of(error: BaseException) -> str:
    """What a run that ends so has found."""
    if isinstance(error, DataRace):
        return RACE
    if isinstance(error, DeadlockError):
        return DEADLOCK
    if isinstance(error, (PeerTimeout, NetworkError)):
        return TIMEOUT
    if isinstance(error, EmulatorError):
        return MEMORY
    if isinstance(error, AssertionError):
        return WRONG
    if not isinstance(error, ValueError):
        return ERROR
    raised_in = [Path(frame.f_code.co_filename).parts for frame, _ in walk_tb(error.__traceback__)]
    return REPORTED if raised_in and "nbep" in raised_in[-1] else ERROR  # by nbep, and not by the user's code


def text_of(error: BaseException) -> str:
    """An error as it is shown: without the machine's paths."""
    name = type(error).__name__
    text = re.sub(r"[^\s(]*site-packages/", "", str(error).replace(f"{PACKAGE_PARENT}/", ""))
    return f"{name}: {text}" if text else name


def planned(
    base: Run, seeds: Sequence[int], strategies: Sequence[str], models: Sequence[str], length: int
) -> list[Run]:
    """The runs of a search: each seed under all models, and the strategies in turn.

    Args:
        length: primitive calls of such a run, among which preemptions are chosen
    """
    runs = []
    for seed in seeds:
        # Each strategy meets all residues of the seed: the longest quantum depends on them.
        strategy = strategies[(seed + seed // 6) % len(strategies)]
        if strategy == "few_preemptions":
            strategy = f"few_preemptions:{1 + seed // 8 % 4}:{length}"
        runs += [replace(base, seed=seed, strategy=strategy, memory_model=model) for model in models]
    return runs


def in_turns(
    shapes: Sequence[tuple[Run, int]], seeds: Sequence[int], strategies: Sequence[str], models: Sequence[str]
) -> list[Run]:
    """The same, where a few seeds run one shape, the next few the next one, each with its length."""
    runs: list[Run] = []
    for seed in seeds:
        base, length = shapes[seed // len(STRATEGIES) % len(shapes)]
        runs += planned(base, [seed], strategies, models, length)
    return runs


# A run again, under pdb: it stops at the step that fails, with all threads where they stand


def debug(run: Run, strategy: Strategy | None = None) -> bool:
    """Run it with pdb at the step that fails. Returns whether one did."""
    seen = World()

    def stop(error: BaseException) -> None:
        print(text_of(error))
        trace = stop_of(error, seen.world)
        if trace is not None:
            pdb.post_mortem(trace)

    return perform(run, stop, seen, strategy) is not None


def stop_of(error: BaseException, world: Any) -> TracebackType | None:
    """Where pdb stops: at the kernel's line that failed; in a deadlock, at that of a thread that waits for a cell."""
    result: TracebackType | None
    if isinstance(error, DeadlockError):
        waiting = [thread for thread in world.polling if thread.gr_frame is not None]
        result = None
        for frame, line in walk_stack(kernel_frame(waiting[0].gr_frame)) if waiting else ():  # of one that does not run
            result = TracebackType(result, frame, frame.f_lasti, line)
        return result or error.__traceback__
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while len(frames) > 1 and kernel_frame(frames[-1].tb_frame) is not frames[-1].tb_frame:
        frames.pop()
    result = None
    for part in reversed(frames):
        result = TracebackType(result, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return result


# The search: until one run fails, and then for the smallest that does

FIRST_RUNS = 6  # before other processes start: much that is wrong shows at once
LOOK_ON = 60  # runs at most, for one that names the cause of a wrong result
SHRINK_SEEDS = 2  # tried for each smaller shape, besides the failing one
SHRINK_RUNS = 150  # at most, in all

Workers = Callable[..., Iterable[Any]]  # calls a function for items; the results come in the order of the items


@contextmanager
def workers(jobs: int) -> Iterator[Workers]:
    """So many processes, started when they are needed; with one, it is this one. Leaving ends what they do."""
    with ExitStack() as stack:
        pool: Any = None

        def each(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
            nonlocal pool
            if jobs == 1:
                return map(function, items)
            if pool is None:
                with _without_interrupts():
                    pool = multiprocessing.get_context("spawn").Pool(jobs)
                stack.callback(pool.join)
                stack.callback(pool.terminate)
            return pool.imap(function, items)

        yield each


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that start inside leave Ctrl-C to this one, from their first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def first_finding(runs: Sequence[Run], each: Workers, advance: Callable[[int], object]) -> Finding | None:
    """The first of the runs that finds something. advance(number) is called after each."""
    results = chain(map(perform, runs[:FIRST_RUNS]), _later(each, runs[FIRST_RUNS:]))
    for number, finding in enumerate(results, 1):
        advance(number)
        if finding is not None:
            return finding
    return None


def _later(each: Workers, runs: Sequence[Run]) -> Iterator[Finding | None]:
    yield from each(perform, runs)


def named(finding: Finding, runs: Sequence[Run], each: Workers) -> Finding | None:
    """One of the next runs that says why, where the finding is a wrong result and says nothing of that."""
    if finding.kind != WRONG:
        return None
    later = [run for run in runs[runs.index(finding.run) + 1 :] if run.memory_model == "checked"][:LOOK_ON]
    return next((one for one in each(perform, later) if one is not None and one.kind not in (WRONG, ERROR)), None)


def smallest(finding: Finding, each: Workers) -> Finding:
    """A run with less of everything that still finds something of the same kind."""

    def attempt(run: Run, most: int) -> tuple[Finding | None, int]:
        seeds = dict.fromkeys((run.seed, *range(SHRINK_SEEDS)))
        attempts = [replace(run, seed=seed) for seed in seeds][:most]
        return next((f for f in each(perform, attempts) if f is not None and f.kind == finding.kind), None), len(
            attempts
        )

    return made_smaller(finding, attempt)


# Looks for something of the same kind with a smaller run, in so many runs at most. Returns it, and how many there were.
Attempt = Callable[[Run, int], tuple[Finding | None, int]]


def made_smaller(finding: Finding, attempt: Attempt) -> Finding:
    """Preemptions first, then each parameter of the scenario: its least value, then values between.

    And again, until nothing gets smaller.
    """
    left = SHRINK_RUNS
    before = None
    while finding.run != before and left > 0:
        before = finding.run
        for parts in _parts(before):
            for smaller in parts:
                run = smaller(finding.run)
                if run is None or left <= 0:
                    continue
                found, runs = attempt(run, left)
                left -= runs
                if found is not None:
                    finding = found
                    break
    return finding


Smaller = Callable[[Run], Run | None]


def _parts(run: Run) -> Iterator[list[Smaller]]:
    """For each thing of which there can be less: how to get less of it, the largest steps first."""

    def less(run: Run) -> Run | None:
        name, *numbers = run.strategy.split(":")
        if not numbers or int(numbers[0]) == 0:
            return None
        return replace(run, strategy=":".join([name, str(int(numbers[0]) - 1), *numbers[1:]]))

    yield [lambda run: None if run.strategy == "uniform" else replace(run, strategy="uniform"), less]
    scenario = load_scenario(run.scenario)
    for name, value in run.values.items():
        least = scenario.least.get(name, 1)
        if name != "inputs" and value > least:
            values = dict.fromkeys((least, (least + value) // 2, value - 1))
            yield [partial(Run.with_values, **{name: less}) for less in values]  # type: ignore[arg-type]
