"""The two runs of the demo: a whole layer through rings, and a decoding step in low-latency mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

import nbep
from nbep.demo.checks import Check, check_all, check_step
from nbep.demo.decode import run_step
from nbep.demo.layer import CONFIG, Model, Settings, run_layer
from nbep.demo.progress import Progress
from nbep.demo.report import print_experts, print_traffic
from nbep.trace import Trace
from nbep.workloads.cases import Case


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
        goals = [goal for ranks in of_tokens for goal in (set(ranks) if deduplicate else ranks)]
        counts.append([goals.count(rank) for rank in range(case.num_ranks)])
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
