"""Dispatch and combine inside a node, as DeepEP's own test measures them, beside what the wire can carry.

    mpirun -n 8 nbep bench intranode [--sms 8,16,24] [--chunks 4,8,16] [--json [FILE.json]] [--plot FILE]
    nbep bench intranode --ranks 4        virtual ranks on one card: the kernels run, but no wire is measured
    nbep bench intranode --zero-copy      the calls without rings

All with a cached handle; times are the mean over the repetitions and the ranks. GB/s counts every received token, the
rank's own included (DeepEP's unit); "wire" leaves the own ones out; "of push" is wire over what `push`, copies to all
peers at once by 16-byte loads and stores, reaches with the same number of SMs in the same run. What the SMs copy at
home, and what they copy in all when half of it goes to the peers, stands beside. Needs torch.

Source: DeepEP tests/test_intranode.py (test_main, "Tune dispatch performance")
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import nbep
from nbep.bench.harness.clocks import Clock, HostTime, Step, host_times, mean, mean_us
from nbep.bench.harness.command import Parser, numbers, run
from nbep.bench.harness.normal_calls import DISPATCH_BF16, WORKS, Inputs, call_of, make_inputs, token_bytes
from nbep.bench.harness.report import Case, Push, Pushes, Report, Row, draw, push_gbps, push_rates, say_push
from nbep.specimens.workloads.cases import routes_of

NUM_NVL_BYTES = 2_000_000_000 // 128 * 128
COLUMNS = {
    "work": "work",
    "SMs": "num_sms",
    "chunk": "chunk",
    "us": "us:.1f",
    "GB/s": "gbps:.1f",
    "wire GB/s": "wire_gbps:.1f",
    "of push": "of_push:.2f",
}


@dataclass
class Setup:
    """One rank's."""

    comm: Any
    options: argparse.Namespace
    buffer: nbep.Buffer
    inputs: Inputs
    layout: dict[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("intranode", __doc__)
    parser.add("tokens", "hidden", "topk", "experts")
    parser.add_argument("--sms", type=numbers, default=[8, 12, 16, 20, 24], help="SMs to try, even numbers")
    parser.add_argument("--chunks", type=numbers, help="tokens a chunk to try; with --zero-copy of combine alone")
    parser.add_argument("--zero-copy", action="store_true", help="calls without rings")
    parser.add_argument("--slots", type=int, default=256, help="slots of a ring")
    parser.add("threads")
    parser.add_works(WORKS)
    parser.add("repeat", "handle-type", "ranks", "json")
    parser.add("plot", help="draw GB/s over SMs there")
    options = parser.parse_args(argv)
    if options.chunks is None:
        options.chunks = [2, 4, 8] if options.zero_copy else [4, 6, 8, 12, 16, 24, 32]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    return run("intranode", parse(argv), measure_rank)


def measure_rank(comm: Any, options: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 prints and writes."""
    setup = prepare(comm, options)
    buffer, clock = setup.buffer, Clock(comm, options.repeat, sleeps=False)
    assert buffer._memory is not None
    pushes = push_rates(clock, buffer._memory, options.sms)
    layout_us = mean_us(
        Clock(comm, options.repeat), lambda: buffer.get_dispatch_layout(setup.inputs.topk_idx, options.experts)
    )
    rows = [
        case.row(mean_us(clock, case.call))
        for work in options.works
        for num_sms, push in pushes.items()
        for case in cases(setup, work, num_sms, push)
    ]
    cached = next(cases(setup, DISPATCH_BF16, options.sms[0], pushes[options.sms[0]])).call
    host = host_times(clock, [Step("cached dispatch", cached)])["cached dispatch"]
    if comm.rank == 0:
        tell(rows, pushes, layout_us, host, comm.size, options)
    buffer.destroy()


def prepare(comm: Any, options: argparse.Namespace) -> Setup:
    sizes = options.tokens, options.hidden, comm.size, options.topk
    num_zero_copy_bytes = nbep.Buffer.get_zero_copy_size_hint(*sizes) if options.zero_copy else 0
    memory = {"num_zero_copy_bytes": num_zero_copy_bytes, "handle_type": options.handle_type}
    buffer = nbep.Buffer(comm, num_nvl_bytes=NUM_NVL_BYTES, **memory)
    inputs = make_inputs(comm.rank, options)
    return Setup(comm, options, buffer, inputs, routes_of(buffer.get_dispatch_layout(inputs.topk_idx, options.experts)))


def cases(setup: Setup, work: str, num_sms: int, push: Push) -> Iterator[Case]:
    """All chunk sizes of one work at one number of SMs."""
    buffer, options, way = setup.buffer, setup.options, {"zero_copy": setup.options.zero_copy}

    def config_of(chunk: int) -> nbep.Config:
        return nbep.Config(num_sms, chunk, options.slots, num_threads=options.threads)

    x, config = setup.inputs.xs[DISPATCH_BF16], config_of(options.chunks[0])
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, config=config, **way, **setup.layout)
    num_own = int(setup.layout["num_tokens_per_rank"][setup.comm.rank])
    size = token_bytes(work, options.hidden)
    moved, wire = (mean(setup.comm, size * number) for number in (len(recv_x), len(recv_x) - num_own))
    # Without rings nothing lands in chunks.
    for chunk in options.chunks[:1] if options.zero_copy else options.chunks:
        yield Case(
            {"work": work, "num_sms": num_sms, "chunk": chunk},
            call_of(work, buffer, setup.inputs, recv_x, handle, config=config_of(chunk), **way),
            {"gbps": moved, "wire_gbps": wire},
            {"of_push": wire / push.to_peers / 1e3},
        )


def tell(
    rows: list[Row], pushes: Pushes, layout_us: float, host: HostTime, num_ranks: int, options: argparse.Namespace
) -> None:
    report = Report(options, num_ranks=num_ranks, push_gbps=push_gbps(pushes), layout_us=layout_us, host=host._asdict())
    shape = f"{num_ranks} ranks, {options.tokens} tokens, hidden {options.hidden}, top-{options.topk}"
    report.table(rows, COLUMNS, shape)
    say_push(report, pushes)
    report.say(
        f"get_dispatch_layout: {layout_us:.1f} us; host cost of a cached dispatch: {host.us:.1f} us "
        f"(least {host.least_us:.1f}, in a row {host.in_a_row_us:.1f})"
    )
    for work in options.works:
        for limit in sorted({min(options.sms), 16, 20, max(options.sms)}):
            of_work = [row for row in rows if row["work"] == work and row["num_sms"] <= limit]
            if of_work:
                best = max(of_work, key=lambda row: row["gbps"])
                report.say(
                    "best {work} at no more than {limit} SMs: {gbps:.1f} GB/s, {us:.1f} us "
                    "({num_sms} SMs, chunk {chunk}, {of_push:.2f} of push)".format(limit=limit, **best)
                )
    report.add(rows=rows)
    report.close()
    if options.plot:
        best_first = sorted(rows, key=lambda row: -row["wire_gbps"])
        points = [(row["work"], row["num_sms"], row["wire_gbps"]) for row in best_first]
        points += [("push", num_sms, rates.to_peers) for num_sms, rates in pushes.items()]
        texts = {"xlabel": "SMs", "ylabel": "GB/s on the wire, each GPU", "title": f"{num_ranks} ranks"}
        draw(options.plot, points, dashed="push", ylim=(0, None), **texts)
