"""`nbep demo`: a small Mixture-of-Experts layer on emulated ranks, checked against `nbep.reference`.

Read in this order: what is here; layer, or for `--low-latency` decode; checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

import nbep
from nbep.demo.checks import Check, Progress, check_all, check_step, print_checks, print_experts, print_traffic
from nbep.demo.decode import PHASES as DECODE_PHASES
from nbep.demo.decode import run_step
from nbep.demo.layer import CONFIG, PHASES, Model, Settings, make_model, run_layer
from nbep.device.layout.low_latency import MAX_RANKS
from nbep.device.terminal import add_json, console_for, write_json
from nbep.host.config import MAX_TOPK
from nbep.lab.trace import Trace
from nbep.specimens.workloads.cases import Case


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0, or 1 if a check fails or the run stops.

    Args:     argv without the program's name; None takes sys.argv
    Raises:   SystemExit as argparse does, for bad options and for --help
    """
    parser = parser_of_demo()
    options = parser.parse_args(argv)
    settings = settings_of(options)
    check_options(parser, options, settings)

    console = console_for(options.json, soft_wrap=True, highlight=False)
    what = "One decoding step of a Mixture-of-Experts layer" if options.low_latency else "A Mixture-of-Experts layer"
    console.print(
        f"{what} on {settings.num_ranks} emulated ranks: {settings.num_tokens} tokens a rank, "
        f"hidden {settings.hidden}, {settings.num_experts} experts, top-{settings.num_topk}, seed {settings.seed}, "
        f"{'FP8' if settings.fp8 else 'bf16'}"
    )
    trace = None if options.no_picture and options.html is None else Trace()
    progress = Progress(console, settings.num_ranks, DECODE_PHASES if options.low_latency else PHASES)
    run = partial(run_decoding_step, deduplicate=options.deduplicate) if options.low_latency else run_whole_layer
    try:
        outcome = run(console, settings, make_model(settings), trace, progress)
    except (nbep.EmulatorError, nbep.PeerTimeout) as error:
        console.print(f"The run stopped: {type(error).__name__}: {error}", markup=False)
        if trace is not None:
            _save_page(console, trace, options)
        write_json(options.json, {"settings": asdict(settings), "error": f"{type(error).__name__}: {error}"})
        return 1
    checks = outcome.checks
    write_json(options.json, _as_json(settings, outcome, progress))
    print_checks(console, checks)
    counters = progress.world.counters
    rate = counters["primitive_calls"] / max(outcome.seconds, 1e-9)
    console.print(
        f"Emulated in {outcome.seconds:.1f} s: {counters['primitive_calls']:,} primitive calls ({rate:,.0f} a second), "
        f"{counters['switches']:,} switches between threads, {counters['parks']:,} waits that parked"
    )
    if trace is not None and not _save(console, trace, options):
        return 1
    failed = [check.name for check in checks if not check.passed]
    if failed:
        console.print(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}", markup=False)
        return 1
    console.print(f"All {len(checks)} checks passed.")
    look = "`nbep demo --html` writes a page" if options.html is None else "open that page in a browser"
    console.print(f"Next: {look}, which tells how one token travels. Then `nbep puzzle`: the course begins there.")
    return 0


def _as_json(settings: Settings, outcome: Outcome, progress: Progress) -> dict[str, Any]:
    checks = [
        {**asdict(check), "passed": bool(check.passed), "error": float(check.error) if isfinite(check.error) else None}
        for check in outcome.checks
    ]
    return {
        "settings": asdict(settings),
        "seconds": outcome.seconds,
        "counters": progress.world.counters,
        "sent": outcome.sent,
        "tokens_of_experts": outcome.of_experts,
        "checks": checks,
    }


def _save(console: Console, trace: Trace, options: argparse.Namespace) -> bool:
    """Write the picture and the page; whether that went well."""
    try:
        if not options.no_picture:
            (save_halves if options.low_latency else save_rings)(console, trace, options.out)
    except OSError as error:
        console.print(f"--out: {error}", markup=False)
        return False
    return _save_page(console, trace, options)


def _save_page(console: Console, trace: Trace, options: argparse.Namespace) -> bool:
    if options.html is None:
        return True
    try:
        path = trace.to_html(options.html)
    except OSError as error:
        console.print(f"--html: {error}", markup=False)
        return False
    console.print(f"Page of the run, for a browser: {path.resolve()}", markup=False)
    return True


# The options

RANKS = (2, 4, 8)
MAX_LOCAL_EXPERTS = 128
MAX_WEIGHT_BYTES = 1 << 30
DEFAULT_OUT = Path("nbep_demo_rings.png")
DEFAULT_HALVES_OUT = Path("nbep_demo_halves.png")
DEFAULT_HTML = Path("nbep_demo.html")
DECODE_TOKENS = 8  # of each rank, in a decoding step


def parser_of_demo() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbep demo",
        description="Run a small Mixture-of-Experts layer (gate, dispatch, experts, combine) on emulated ranks, "
        "compare it with plain NumPy, and draw the fill of the ring buffers. With --low-latency: one decoding step in "
        "two micro-batches that overlap, and a picture of the two halves of the buffer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = Settings()
    add = parser.add_argument
    add("--low-latency", action="store_true", help="take low-latency dispatch and combine, with hooks")
    add("--deduplicate", action="store_true", help="with --low-latency: a token goes to each rank once")
    of_tokens = f"tokens of each rank (default: {defaults.num_tokens}; {DECODE_TOKENS} with --low-latency)"
    for name, default, text in (
        ("ranks", defaults.num_ranks, f"2, 4 or 8; 2 to {MAX_RANKS} with --low-latency"),
        ("tokens", argparse.SUPPRESS, of_tokens),
        ("hidden", defaults.hidden, "a multiple of 8; of 128 with --fp8 or --low-latency"),
        ("experts", defaults.num_experts, "of all ranks, a multiple of --ranks"),
        ("topk", defaults.num_topk, "experts of a token"),
        ("seed", defaults.seed, "of the inputs and of the schedule"),
    ):
        add(f"--{name}", type=int, default=default, metavar="N", help=text)
    add("--fp8", action="store_true", help="dispatch FP8 tokens with a scale for every 128 columns")
    where = "where the picture goes; the suffix says its format "
    where += f"(default: {DEFAULT_OUT}; {DEFAULT_HALVES_OUT} with --low-latency)"
    add("--out", type=Path, default=argparse.SUPPRESS, metavar="PATH", help=where)
    page = f"write a page of the run, with a slider over its steps (PATH: {DEFAULT_HTML} if left out)"
    add("--html", type=Path, nargs="?", const=DEFAULT_HTML, default=argparse.SUPPRESS, metavar="PATH", help=page)
    add_json(parser)
    add("--no-picture", action="store_true", help="draw nothing; without --html, run without a tracer")
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings; fills in the defaults that depend on the mode."""
    if not hasattr(options, "tokens"):
        options.tokens = DECODE_TOKENS if options.low_latency else Settings().num_tokens
    if not hasattr(options, "out"):
        options.out = DEFAULT_HALVES_OUT if options.low_latency else DEFAULT_OUT
    if not hasattr(options, "html"):
        options.html = None
    return Settings(
        options.ranks, options.tokens, options.hidden, options.experts, options.topk, options.seed, options.fp8
    )


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, settings: Settings) -> None:
    """Exit with a message that names the option, what came and what is allowed."""

    def demand(holds: bool, option: str, got: object, allowed: str) -> None:
        if not holds:
            parser.error(f"argument {option}: got {got}; must be {allowed}")

    ranks, hidden, experts, topk = settings.num_ranks, settings.hidden, settings.num_experts, settings.num_topk
    if options.low_latency:
        demand(2 <= ranks <= MAX_RANKS, "--ranks", ranks, f"2 to {MAX_RANKS} with --low-latency")
    else:
        demand(ranks in RANKS, "--ranks", ranks, "2, 4 or 8")
    demand(options.low_latency or not options.deduplicate, "--deduplicate", "it", "left out without --low-latency")
    demand(settings.num_tokens >= 0, "--tokens", settings.num_tokens, "0 or more")
    demand(hidden > 0 and hidden % 8 == 0, "--hidden", hidden, "a positive multiple of 8")
    for option, needs_scales in (("--fp8", settings.fp8), ("--low-latency", options.low_latency)):
        demand(not needs_scales or hidden % 128 == 0, "--hidden", hidden, f"a multiple of 128 with {option}")
    demand(experts > 0 and experts % ranks == 0, "--experts", experts, f"a positive multiple of --ranks ({ranks})")
    demand(experts <= ranks * MAX_LOCAL_EXPERTS, "--experts", experts, f"at most {MAX_LOCAL_EXPERTS} a rank")
    most = MAX_WEIGHT_BYTES // (4 * hidden * hidden)
    demand(experts <= most, "--experts", experts, f"at most {most} with --hidden {hidden}, for 1 GiB of weights")
    demand(1 <= topk <= min(experts, MAX_TOPK), "--topk", topk, f"1 to {min(experts, MAX_TOPK)}")
    demand(settings.seed >= 0, "--seed", settings.seed, "0 or more")
    if options.html is not None:
        demand(options.html.parent.is_dir(), "--html", options.html, "in a folder that exists")
        demand(options.html.suffix.lower() in (".html", ".htm"), "--html", options.html, "a .html file")
    if not options.no_picture:
        demand(options.out.parent.is_dir(), "--out", options.out, "in a folder that exists")
        demand(
            options.out.suffix.lower() in (".png", ".svg", ".pdf"), "--out", options.out, "a .png, .svg or .pdf file"
        )


# The two runs: a whole layer through rings, and a decoding step in low-latency mode


class Outcome(NamedTuple):
    """sent[src][dst] counts copies of tokens, or messages; of_experts[rank][expert] counts tokens."""

    checks: list[Check]
    seconds: float
    sent: list[list[int]]
    of_experts: list[list[int]]


def run_whole_layer(
    console: Console, settings: Settings, model: Model, trace: Trace | None, progress: Progress
) -> Outcome:
    results = _spawn(settings, trace, progress, lambda comm: run_layer(comm, settings, model, progress.enter))
    seconds, outcomes = progress.seconds, [result.outcome for result in results]
    sent = [[int(count) for count in outcome.layout[0]] for outcome in outcomes]
    print_traffic(console, "Tokens sent", sent, [len(o.recv_topk_idx) for o in outcomes], model.case.num_tokens)
    of_experts = [list(map(int, outcome.counts)) for outcome in outcomes]
    print_experts(console, settings, of_experts)
    return Outcome(check_all(settings, model, results), seconds, sent, of_experts)


def run_decoding_step(
    console: Console, settings: Settings, model: Model, trace: Trace | None, progress: Progress, deduplicate: bool
) -> Outcome:
    results = _spawn(
        settings, trace, progress, lambda comm: run_step(comm, settings, model, progress.enter, deduplicate)
    )
    seconds, sent = progress.seconds, _messages(model.case, deduplicate)
    title = "Messages sent, both batches" + (", each token once to a rank" if deduplicate else "")
    print_traffic(console, title, sent, [sum(column) for column in zip(*sent, strict=True)], model.case.num_tokens)
    counts = [sum(batch.outcome.dispatched.recv_count for batch in batches) for batches in results]
    of_experts = [[int(count) for count in of_rank] for of_rank in counts]
    print_experts(console, settings, of_experts)
    return Outcome(check_step(settings, model, results), seconds, sent, of_experts)


def _spawn(settings: Settings, trace: Trace | None, progress: Progress, run: Callable[[Any], Any]) -> list[Any]:
    def rank_main(comm: Any) -> Any:
        progress.world = comm.runtime.world
        return run(comm)

    with progress.shown():
        return nbep.spawn(rank_main, settings.num_ranks, "emulator", seed=settings.seed, tracer=trace)


def _messages(case: Case, deduplicate: bool) -> list[list[int]]:
    """How many messages each rank sends to each: [src][dst]."""
    counts = []
    for topk_idx in case.topk_idx:
        of_tokens = (topk_idx // (case.num_experts // case.num_ranks)).tolist()
        dsts = [dst for ranks in of_tokens for dst in (set(ranks) if deduplicate else ranks)]
        counts.append([dsts.count(rank) for rank in range(case.num_ranks)])
    return counts


def save_rings(console: Console, trace: Trace, out: Path) -> None:
    waits = [event for event in trace.events("wait", cell="head") if event.role == "sender"]
    config = f"{CONFIG.num_channels} channels, rings of {CONFIG.num_max_nvl_chunked_recv_tokens} slots"
    console.print(f"{config}: senders waited {len(waits)} times for free slots")
    trace.plot_rings().savefig(out)
    console.print(f"Picture of the ring buffers' fill over time: {out.resolve()}", markup=False)


def save_halves(console: Console, trace: Trace, out: Path) -> None:
    waits = trace.events("wait", cell="credits")
    phases = [launch.phases for launch in trace.launches if launch.phases]
    frees = phases.count("free")
    console.print(
        f"{len(phases) - frees} launches, a send and a receive phase for each call, and {frees} that free a half: "
        f"{len(waits)} waits for credits"
    )
    trace.plot_halves().savefig(out)
    console.print(f"Picture of the two halves of the buffer over time: {out.resolve()}", markup=False)
