"""Many runs, in several processes: the first that finds something, and the smallest one like it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from nbep.check.runs import ERROR, WRONG, Finding, Run, perform
from nbep.check.scenario import load_scenario

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
    yield [_uniform, _one_preemption_less]
    scenario = load_scenario(run.scenario)
    for name, value in run.values.items():
        least = scenario.least.get(name, 1)
        if name != "inputs" and value > least:
            yield [
                partial(_with_value, name, smaller)
                for smaller in dict.fromkeys((least, (least + value) // 2, value - 1))
            ]


def _uniform(run: Run) -> Run | None:
    return None if run.strategy == "uniform" else replace(run, strategy="uniform")


def _one_preemption_less(run: Run) -> Run | None:
    name, *numbers = run.strategy.split(":")
    if not numbers or int(numbers[0]) == 0:
        return None
    return replace(run, strategy=":".join([name, str(int(numbers[0]) - 1), *numbers[1:]]))


def _with_value(name: str, value: int, run: Run) -> Run:
    return run.with_values(**{name: value})
