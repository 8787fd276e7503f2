"""`nbep demo`: a small Mixture-of-Experts layer on emulated ranks, checked against `nbep.reference`.

Read in this order: layer (what runs), checks, progress and report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import nbep
from nbep.demo.checks import check_all
from nbep.demo.layer import CONFIG, Model, RankResult, Settings, make_model, run_layer
from nbep.demo.progress import Progress
from nbep.demo.report import print_checks, print_experts, print_traffic
from nbep.host.config import MAX_TOPK
from nbep.trace import Trace

RANKS = (2, 4, 8)
MAX_LOCAL_EXPERTS = 128
MAX_WEIGHT_BYTES = 1 << 30
DEFAULT_OUT = Path("nbep_demo_rings.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0, or 1 if a check fails or the run stops.

    Args:     argv without the program's name; None takes sys.argv
    Raises:   SystemExit as argparse does, for bad options and for --help
    """
    parser = _parser()
    options = parser.parse_args(argv)
    settings = Settings(
        options.ranks, options.tokens, options.hidden, options.experts, options.topk, options.seed, options.fp8
    )
    _check_options(parser, settings, None if options.no_picture else options.out)

    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"A Mixture-of-Experts layer on {settings.num_ranks} emulated ranks: {settings.num_tokens} tokens a rank, "
        f"hidden {settings.hidden}, {settings.num_experts} experts, top-{settings.num_topk}, seed {settings.seed}, "
        f"{'FP8' if settings.fp8 else 'bf16'}"
    )
    model = make_model(settings)
    trace = None if options.no_picture else Trace()
    progress = Progress(console, settings.num_ranks)
    try:
        results = _run(settings, model, trace, progress)
    except (nbep.EmulatorError, nbep.PeerTimeout) as error:
        console.print(f"The run stopped: {type(error).__name__}: {error}", markup=False)
        return 1
    seconds = progress.seconds

    print_traffic(console, results)
    print_experts(console, settings, results)
    checks = check_all(settings, model, results)
    print_checks(console, checks)
    _print_run(console, progress, seconds)
    if trace is not None:
        try:
            _save_picture(console, trace, options.out)
        except OSError as error:
            console.print(f"--out: {error}", markup=False)
            return 1
    failed = [check.name for check in checks if not check.passed]
    if failed:
        console.print(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}", markup=False)
        return 1
    console.print(f"All {len(checks)} checks passed.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbep demo",
        description="Run a small Mixture-of-Experts layer (gate, dispatch, experts, combine) on emulated ranks, "
        "compare it with plain NumPy, and draw the fill of the ring buffers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = Settings()
    add = parser.add_argument
    add("--ranks", type=int, default=defaults.num_ranks, metavar="N", help="2, 4 or 8")
    add("--tokens", type=int, default=defaults.num_tokens, metavar="N", help="tokens of each rank")
    add("--hidden", type=int, default=defaults.hidden, metavar="N", help="a multiple of 8; of 128 with --fp8")
    add("--experts", type=int, default=defaults.num_experts, metavar="N", help="of all ranks, a multiple of --ranks")
    add("--topk", type=int, default=defaults.num_topk, metavar="N", help="experts of a token")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of the inputs and of the schedule")
    add("--fp8", action="store_true", help="dispatch FP8 tokens with a scale for every 128 columns")
    add(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        metavar="PATH",
        help="where the picture goes; the suffix says its format",
    )
    add("--no-picture", action="store_true", help="draw nothing, and run without a tracer")
    return parser


def _check_options(parser: argparse.ArgumentParser, settings: Settings, out: Path | None) -> None:
    """Exit with a message that names the option, what came and what is allowed."""

    def demand(holds: bool, option: str, got: object, allowed: str) -> None:
        if not holds:
            parser.error(f"argument {option}: got {got}; must be {allowed}")

    ranks, hidden, experts, topk = settings.num_ranks, settings.hidden, settings.num_experts, settings.num_topk
    demand(ranks in RANKS, "--ranks", ranks, "2, 4 or 8")
    demand(settings.num_tokens >= 0, "--tokens", settings.num_tokens, "0 or more")
    demand(hidden > 0 and hidden % 8 == 0, "--hidden", hidden, "a positive multiple of 8")
    demand(not settings.fp8 or hidden % 128 == 0, "--hidden", hidden, "a multiple of 128 with --fp8")
    demand(experts > 0 and experts % ranks == 0, "--experts", experts, f"a positive multiple of --ranks ({ranks})")
    demand(experts <= ranks * MAX_LOCAL_EXPERTS, "--experts", experts, f"at most {MAX_LOCAL_EXPERTS} a rank")
    most = MAX_WEIGHT_BYTES // (4 * hidden * hidden)
    demand(experts <= most, "--experts", experts, f"at most {most} with --hidden {hidden}, for 1 GiB of weights")
    demand(1 <= topk <= min(experts, MAX_TOPK), "--topk", topk, f"1 to {min(experts, MAX_TOPK)}")
    demand(settings.seed >= 0, "--seed", settings.seed, "0 or more")
    if out is not None:
        demand(out.parent.is_dir(), "--out", out, "in a folder that exists")
        demand(out.suffix.lower() in (".png", ".svg", ".pdf"), "--out", out, "a .png, .svg or .pdf file")


def _run(settings: Settings, model: Model, trace: Trace | None, progress: Progress) -> list[RankResult]:
    def rank_main(comm: Any) -> RankResult:
        progress.world = comm.runtime.world
        return run_layer(comm, settings, model, progress.enter)

    with progress.shown():
        return nbep.spawn(rank_main, settings.num_ranks, "emulator", seed=settings.seed, tracer=trace)


def _print_run(console: Console, progress: Progress, seconds: float) -> None:
    counters = progress.world.counters
    rate = counters["primitive_calls"] / max(seconds, 1e-9)
    console.print(
        f"Emulated in {seconds:.1f} s: {counters['primitive_calls']:,} primitive calls ({rate:,.0f} a second), "
        f"{counters['switches']:,} switches between threads, {counters['parks']:,} waits that parked"
    )


def _save_picture(console: Console, trace: Trace, out: Path) -> None:
    waits = [event for event in trace.events("wait", cell="head") if event.role == "sender"]
    config = f"{CONFIG.num_channels} channels, rings of {CONFIG.num_max_nvl_chunked_recv_tokens} slots"
    console.print(f"{config}: senders waited {len(waits)} times for free slots")
    trace.plot_rings().savefig(out)
    console.print(f"Picture of the ring buffers' fill over time: {out.resolve()}", markup=False)
