"""The options of `nbep demo`, and what they may be."""

from __future__ import annotations

import argparse
from pathlib import Path

from nbep.demo.layer import Settings
from nbep.device.layout.low_latency import MAX_RANKS
from nbep.device.terminal import add_json
from nbep.host.config import MAX_TOPK

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
