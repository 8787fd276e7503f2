"""`nbep check`: what it prints, and its exit status."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from nbep.device.terminal import STDOUT, add_json, console_for, progress, write_json
from nbep.emulator.schedule.strategies import strategy_of
from nbep.host.spawn import COMPILED_STRATEGIES, ENGINES
from nbep.lab.check.catalogue import UnknownName, faults_of, kernels_named, own_faults
from nbep.lab.check.every import check_all, run_schedule
from nbep.lab.check.faults import Fault
from nbep.lab.check.runs import (
    ERROR,
    MODELS,
    SEARCHED,
    STRATEGIES,
    Finding,
    Run,
    World,
    debug,
    faults_in,
    first_finding,
    in_turns,
    named,
    option_of,
    perform,
    planned,
    smallest,
    workers,
)
from nbep.lab.check.scenario import Scenario, ScenarioError, load_module, load_scenario, scenarios

NOTHING_FOUND, FOUND, INTERRUPTED = 0, 1, 130
SEEDS, FAULT_SEEDS = 200, 12  # by default
NOT_COMPARED = """\
No result was compared: only races, hangs and forbidden accesses were looked for.
To compare results, add this to the file:
  """
TO_COMPARE = NOT_COMPARED + "def check(results): assert results[1] == ...  # results: what main has returned, by rank"
TO_COMPARE_IN_SCRIPT = NOT_COMPARED + "assert (array.copy_to_host() == ...).all()"
SHORT_RUN = 20_000  # primitive calls; other processes are no help with such runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 nothing was found, 1 something was, 2 bad arguments, 130 after Ctrl-C.

    Args:
        argv: without the program's name; None takes sys.argv

    Raises:
        SystemExit: as argparse does
    """
    parser = parser_of_check()
    options, rest = parser.parse_known_args(argv)
    console = console_for(options.json, soft_wrap=True, highlight=False, markup=False)
    done = Done()
    try:
        return _main(parser, options, rest, console, done)
    except (ScenarioError, UnknownName) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        if done.runs == 0:
            raise
        file = sys.stderr if options.json == STDOUT else sys.stdout
        print(f"Interrupted after {done.runs} runs; nothing was found up to there.", file=file)
        return INTERRUPTED


class Done:
    """How many runs are over."""

    runs = 0


def _main(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str], console: Console, done: Done
) -> int:
    if options.list:
        print_scenarios(console, options.json)
        return NOTHING_FOUND
    if options.faults is not None:
        if rest or options.scenario:
            parser.error(f"--faults takes one file: {' '.join([*rest, options.scenario or ''])} is too much")
        return check_faults(console, options.faults, options.seeds or FAULT_SEEDS, options.jobs, options.json)
    if options.list_faults:
        return print_faults(console, options.scenario, options.json)
    if options.schedule is not None:
        return run_schedule(console, options.schedule, options.pdb, options.json)
    if options.scenario is None:
        parser.error("which SCENARIO? `nbep check --list` lists them")
    scenario = load_scenario(options.scenario)
    base = Run(scenario.name, parameters_of(parser, scenario, rest), faults=tuple(options.fault), engine=options.engine)
    faults_in(base)  # a wrong name is an error before anything runs
    if options.strategy is not None:
        try:
            strategy_of(options.strategy, 0, random.Random(0))
        except ValueError as error:
            parser.error(str(error))
    if options.engine == "compiled":
        if options.strategy == "few_preemptions" or options.all or options.trace:
            parser.error("--engine compiled: takes no --all, --trace or few_preemptions")
    if options.weak and not options.all:
        parser.error("--weak: takes --all, too; seeds take --memory-model delayed")
    if options.all:
        note = note_of(scenario)
        limits = options.limit, options.minutes
        return check_all(console, base, *limits, options.json, note, options.weak, not options.no_shrink)
    if options.pdb and options.seed is None:
        parser.error("--pdb: takes --seed, too; the command that a search prints has one")
    if options.trace and (options.seed is None or options.pdb):
        parser.error("--trace: takes --seed, too, and no --pdb; the command that a search prints has a seed")
    if options.trace and options.trace.suffix not in (".html", ".json"):
        parser.error(f"--trace: {options.trace}; must end in .html or .json")
    if options.seed is not None:
        strategy, model = options.strategy or "uniform", options.memory_model or "checked"
        run = replace(base, seed=options.seed, strategy=strategy, memory_model=model)
        return run_once(console, run, options)
    return search(console, base, options, done)


def run_once(console: Console, run: Run, options: argparse.Namespace) -> int:
    if options.pdb:
        return FOUND if debug(run) else nothing_found(console, run, 1)
    finding = perform(run) if options.trace is None else traced(run, options.trace)
    write_json(options.json, as_json(1, finding, run))
    if finding is None:
        return nothing_found(console, run, 1)
    console.print(finding.message)
    return FOUND


def traced(run: Run, file: Path) -> Finding | None:
    """Run it, and write what it did."""
    from nbep.lab.trace import Trace

    trace = Trace()
    finding = perform(run, tracer=trace)
    if finding is not None and trace.error is None:  # after all kernels: results are wrong
        trace.error = AssertionError(finding.message)
    (trace.to_html if file.suffix == ".html" else trace.to_perfetto)(file)
    return finding


def nothing_found(console: Console, run: Run, runs: int) -> int:
    console.print(f"{runs} run{'s' * (runs != 1)}: nothing found.")
    if note := note_of(load_scenario(run.scenario)):
        console.print(note)
    return NOTHING_FOUND


def note_of(scenario: Scenario) -> str | None:
    """What to say where nothing is found: how to compare results, if none was compared."""
    if scenario.compares:
        return None
    return TO_COMPARE if scenario.script is None else TO_COMPARE_IN_SCRIPT


def as_json(runs: int, found: Finding | None, first: Run) -> dict[str, Any]:
    """What a search says to programs; first: the run that has found it, before it was made smaller."""
    if found is None:
        return {"runs": runs, "found": None}
    what = {"kind": found.kind, "message": found.message, "calls": found.calls}
    return {"runs": runs, "found": {**what, "command": found.run.command, "first_command": first.command}}


def search(console: Console, base: Run, options: argparse.Namespace, done: Done) -> int:
    """Run until something is found; then make it smaller."""
    if base.engine is None and not load_scenario(base.scenario).lets_time_pass:
        base = replace(base, engine=os.environ.get("NBEP_ENGINE", "auto"))
    usual = COMPILED_STRATEGIES if options.engine == "compiled" else STRATEGIES
    strategies = [options.strategy] if options.strategy else [*usual]
    models = [options.memory_model] if options.memory_model else SEARCHED
    with progress(base.scenario, None) as show:
        shapes = shapes_of(base)
        lengths, first = {}, None
        for shape in dict.fromkeys(shapes):
            seen = World()
            first = first or perform(shape, None, seen)  # also: how long it is
            lengths[shape] = max(seen.calls, 1)
        turns = [(shape, lengths[shape]) for shape in shapes]
        runs = in_turns(turns, range(options.seeds or SEEDS), strategies, models)
        show(total=len(runs))

        def advance(number: int) -> None:
            done.runs = number
            show(completed=number)

        if first is not None and first.kind == ERROR:
            finding: Finding | None = first
        else:
            with workers(options.jobs) as each:
                finding = first_finding(runs, each, advance)
        plain = finding
        if finding is not None:
            with workers(options.jobs if max(lengths.values()) > SHORT_RUN else 1) as each:
                show(description="looking for the cause", total=None)
                finding = named(finding, runs, each) or finding
                if not options.no_shrink and finding.kind != ERROR:
                    show(description="making it smaller", total=None)
                    finding = smallest(finding, each)
    if finding is None or plain is None:
        write_json(options.json, as_json(len(runs), None, base))
        return nothing_found(console, base, len(runs))
    write_json(options.json, as_json(max(done.runs, 1), finding, plain.run))
    console.print(f"Found after {max(done.runs, 1)} of {len(runs)} runs: {plain.kind}")
    if finding.run != plain.run:
        console.print(f"First seen with: {plain.run.command}")
    if finding.kind != plain.kind:
        console.print(f"That run does not say why. Another one does: {finding.kind}")
    console.print()
    console.print(finding.message)
    console.print()
    console.print("See it again, with --pdb in the debugger at the step that fails:")
    console.print(f"  {finding.run.command}")
    return FOUND


def shapes_of(base: Run) -> list[Run]:
    """What seeds take turns with: the scenario's shapes, unless somebody says parameters."""
    if base.parameters:
        return [base]
    return [base.with_values(**shape) for shape in load_scenario(base.scenario).shapes]


def print_scenarios(console: Console, json: Path | None) -> None:
    listed = [{"name": s.name, "about": s.about, "parameters": dict(s.parameters)} for s in scenarios().values()]
    write_json(json, listed)
    for scenario in scenarios().values():
        console.print(f"{scenario.name:24} {scenario.about}")
        console.print(
            " " * 25 + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in scenario.parameters.items())
        )
        for shape, times in Counter(tuple(shape.items()) for shape in scenario.shapes if shape).items():
            words = " ".join(f"{option_of(name)} {value}" for name, value in shape)
            console.print(f"{'':24} {times} of {len(scenario.shapes)} seeds, if nothing is given: {words}")
    console.print("A file with main(comm) is one, too; numbers that main takes are its options.")


def print_faults(console: Console, name: str | None, json: Path | None) -> int:
    """The faults of a scenario's kernels, of a kernel, or of all."""
    faults: list[Fault]
    if name is None:
        faults = list(own_faults().values())
    elif name.endswith(".py"):
        faults = faults_of(load_module(Path(name)))
    else:
        kernels = scenarios()[name].kernels if name in scenarios() else (name,)
        faults = faults_of(*(kernel for one in kernels for kernel in kernels_named(one)))
    write_json(json, [{"name": fault.name, "change": fault.change} for fault in faults])
    for fault in faults:
        console.print(f"{fault.name:80} {fault.change}")
    return NOTHING_FOUND


# --- The options of `nbep check`. Those of a scenario are its parameters ----------------------------------------------
EXAMPLES = """\
examples:
  nbep check --list                                      the scenarios
  nbep check intranode.combine                           200 seeds of one
  nbep check my_kernel.py --ranks 4 --seeds 50           a file with main(comm)
  nbep check kernels.py --seeds 50                       a script that uses numba.cuda, as it is
  nbep check kernels.py --seed 3 --trace run.html        what one run did, step by step, as a page
  nbep check my_kernel.py --all                          every schedule of a small program
  nbep check intranode.dispatch --list-faults            what can be broken there
  nbep check intranode.dispatch --fault NAME             break it, and see it found
  nbep check --faults my_kernel.py                       break each step in turn: what finds it
"""


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be an integer of at least 1")
    return int(text)


def parser_of_check() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbep check",
        description="Run a scenario under many schedules and memory models, and keep the smallest run that fails.",
        epilog=EXAMPLES,
        allow_abbrev=False,  # --min may be a parameter of a scenario
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a name, or a file with main(comm)")
    parser.add_argument("--list", action="store_true", help="list the scenarios and their options")
    parser.add_argument("--all", action="store_true", help="every schedule of a small program, each once")
    parser.add_argument("--weak", action="store_true", help="with --all: late stores and early loads are choices, too")
    parser.add_argument("--limit", type=positive, metavar="N", help="with --all: runs at most (100000)")
    parser.add_argument("--minutes", type=float, metavar="M", help="with --all: time at most (10)")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="run again what --all has found")
    parser.add_argument("--seeds", type=positive, metavar="N", help="how many (200; with --faults 12)")
    parser.add_argument("--seed", type=int, metavar="S", help="this one alone, with --strategy and --memory-model")
    parser.add_argument("--strategy", metavar="NAME", help=f"one of {', '.join(STRATEGIES)}; else in turn")
    parser.add_argument(
        "--memory-model",
        choices=MODELS,
        metavar="NAME",
        help=f"one of {', '.join(MODELS)}; else {' and '.join(SEARCHED)}, and so sc: checked takes the same steps",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="what runs kernels, as nbep.spawn says; else auto in a search, python for one seed",
    )
    parser.add_argument("--jobs", type=positive, default=default_jobs(), metavar="N", help="processes (one a CPU)")
    parser.add_argument("--no-shrink", action="store_true", help="show the first run that fails, not the smallest")
    parser.add_argument(
        "--pdb", action="store_true", help="with --seed or --schedule: stop in the debugger at the step that fails"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --seed: write it as .html or Perfetto's .json")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME", help="break a step; may be repeated")
    parser.add_argument("--list-faults", action="store_true", help="list the faults of SCENARIO's kernels, or of all")
    add_json(parser)
    parser.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help="break each step of the kernels of a file in turn; print what finds it",
    )
    return parser


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parameters_of(
    parser: argparse.ArgumentParser, scenario: Scenario, rest: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The parameters of a scenario that the command line changes; others are refused by the parser."""
    prog = f"nbep check {scenario.name}"
    own = argparse.ArgumentParser(prog=prog, add_help=False, usage=argparse.SUPPRESS, allow_abbrev=False)
    for name in scenario.parameters:
        if option_of(name) in parser._option_string_actions:
            parser.error(f"{scenario.name}: main takes {name}, and {option_of(name)} is for nbep check: rename it")
        own.add_argument(option_of(name), type=int, dest=name, default=None)
    values, unknown = own.parse_known_args(rest)
    if unknown:
        allowed = " ".join(map(option_of, scenario.parameters)) or "no numbers of its own"
        parser.error(f"unknown: {' '.join(unknown)}; {scenario.name} takes {allowed}")
    for name in ("ranks", "sms"):
        number = getattr(values, name, None)
        if number is not None and number < 1:
            parser.error(f"--{name}: got {number}; must be at least 1")
    given = {name: getattr(values, name) for name in scenario.parameters}
    return tuple((name, value) for name, value in given.items() if value not in (None, scenario.parameters[name]))


# --faults: break each step of the kernels of a file in turn


FEW_TASKS = 16  # are for one process
MOST_CALLS = 12_000_000  # primitive calls after which no further seed is begun
LENGTH = 10_000  # primitive calls of a usual run, for preemptions


class Task(NamedTuple):
    """A fault, and the runs that lead to it: for each seed all of them."""

    fault: str
    bases: tuple[Run, ...]
    num_seeds: int


class Row(NamedTuple):
    """What has found a fault; kind is "" if nothing has.

    num_seeds: how many it took, or were tried
    run: that has found it
    """

    fault: str
    kind: str
    num_seeds: int
    run: Run | None

    @property
    def found(self) -> str:
        if self.run is not None:
            seeds = "1 seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
            return f"{self.kind} ({self.run.memory_model}), {seeds}"
        return f"NOTHING in {self.num_seeds} seeds: a hole"


def check_fault(task: Task) -> Row:
    """Break one step and run until something is found."""
    calls, seen = 0, World()
    for seed in range(task.num_seeds):
        if calls > MOST_CALLS:
            return Row(task.fault, "", seed, None)
        for base in task.bases:
            for run in planned(replace(base, faults=(task.fault,)), [seed], STRATEGIES, SEARCHED, LENGTH):
                finding = perform(run, None, seen)
                calls += seen.calls
                if finding is not None and finding.kind != ERROR:
                    return Row(task.fault, finding.kind, seed + 1, run)
    return Row(task.fault, "", task.num_seeds, None)


def check_faults(console: Console, file: Path, num_seeds: int, jobs: int, json: Path | None = None) -> int:
    """Print what finds each fault. Exit status: 1 if there is a hole."""
    tasks = [Task(fault.name, (Run(str(file)),), num_seeds) for fault in faults_of(load_module(file))]
    width = max((len(task.fault) for task in tasks), default=0)
    rows = []
    with progress("faults", len(tasks)) as advance, workers(min(jobs, -(-len(tasks) // FEW_TASKS))) as each:
        for row in each(check_fault, tasks):
            rows.append(row)
            console.print(f"{row.fault:{width}}  {row.found}")
            advance()
    of_rows = (
        {"fault": row.fault, "kind": row.kind, "num_seeds": row.num_seeds, "command": row.run and row.run.command}
        for row in rows
    )
    write_json(json, list(of_rows))
    found = sum(bool(row.kind) for row in rows)
    console.print(f"{len(rows)} faults: {found} found, {len(rows) - found} not found.")
    return 1 if found < len(rows) else 0
