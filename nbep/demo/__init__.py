"""`nbep demo`: a small Mixture-of-Experts layer on emulated ranks, checked against `nbep.reference`.

Read in this order: options, runs; layer, or for `--low-latency` decode; checks, progress, report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import Any

from rich.console import Console

import nbep
from nbep.demo.decode import PHASES as DECODE_PHASES
from nbep.demo.layer import PHASES, Settings, make_model
from nbep.demo.options import check_options, parser_of_demo, settings_of
from nbep.demo.progress import Progress
from nbep.demo.report import print_checks
from nbep.demo.runs import Outcome, run_decoding_step, run_whole_layer, save_halves, save_rings
from nbep.device.terminal import console_for, write_json
from nbep.trace import Trace


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
    _print_counters(console, progress, outcome.seconds)
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


def _print_counters(console: Console, progress: Progress, seconds: float) -> None:
    counters = progress.world.counters
    rate = counters["primitive_calls"] / max(seconds, 1e-9)
    console.print(
        f"Emulated in {seconds:.1f} s: {counters['primitive_calls']:,} primitive calls ({rate:,.0f} a second), "
        f"{counters['switches']:,} switches between threads, {counters['parks']:,} waits that parked"
    )
