"""ElasticBuffer beside Buffer inside a node: compact, with x in shared rows, expanded, without rings; and decoding.

    mpirun -n 8 nbep bench elastic [--sms 16,24] [--json [FILE.json]]
    nbep bench elastic --ranks 4          virtual ranks on one card: the kernels run, but no wire is measured
    nbep bench elastic --tokens 128 --whole     calls of a decoding step: with a count, without the CPU

Without --whole all calls have a handle. Times are the mean over the repetitions and the ranks. GB/s counts every
received token once, the rank's own included (DeepEP's unit), also where it has several rows. Needs torch.

Source: DeepEP tests/elastic/test_ep.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import nbep
from nbep.bench.harness.clocks import Clock, mean, mean_us
from nbep.bench.harness.command import Parser, numbers, positive, run
from nbep.bench.harness.normal_calls import (
    COMBINE_BF16,
    DISPATCH_BF16,
    DISPATCH_FP8,
    WORKS,
    Inputs,
    call_of,
    make_inputs,
    token_bytes,
)
from nbep.bench.harness.report import Case, Report
from nbep.host.elastic.memory import SharedRows
from nbep.specimens.workloads.cases import routes_of

CHUNK = 4  # of the combine without rings
COLUMNS = {"work": "work", "SMs": "num_sms", "us": "us:.1f", "GB/s": "gbps:.1f"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("elastic", __doc__)
    parser.add("tokens", "hidden", "topk", "experts")
    parser.add_argument("--align", type=positive, default=128, help="expert_alignment")
    parser.add_argument("--sms", type=numbers, default=[16, 24], help="SMs to try, even numbers")
    parser.add_argument("--whole", action="store_true", help="calls without a handle and without CPU sync")
    parser.add("repeat", "ranks", "json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    return run("elastic", parse(argv), measure_rank)


def measure_rank(comm: Any, options: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 prints and writes."""
    sizes = options.tokens, options.hidden
    direct_bytes = nbep.Buffer.get_zero_copy_size_hint(*sizes, comm.size, options.topk)
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 20, num_zero_copy_bytes=direct_bytes)
    elastic = nbep.ElasticBuffer(
        comm, num_max_tokens_per_rank=options.tokens, hidden=options.hidden, num_topk=options.topk
    )
    inputs = make_inputs(comm.rank, options)
    clock = Clock(comm, options.repeat, sleeps=options.whole)
    rows = [
        case.row(mean_us(clock, case.call))
        for num_sms in options.sms
        for case in cases(comm, buffer, elastic, inputs, num_sms, options)
    ]
    if comm.rank == 0:
        report = Report(options, num_ranks=comm.size)
        shape = f"{comm.size} ranks, {options.tokens} tokens, hidden {options.hidden}, top-{options.topk}"
        report.table(rows, COLUMNS, f"{shape}, {'whole calls' if options.whole else 'with a handle'}")
        report.add(rows=rows)
        report.close()
    elastic.destroy()
    buffer.destroy()


def _shared(rows: SharedRows, x: Any) -> Any:
    """A copy of x in shared rows, and of its scales, if there are some."""
    shared = rows.like(x)
    for to, values in zip(shared, x, strict=True) if isinstance(x, tuple) else [(shared, x)]:
        to[:] = values
    return shared


def cases(
    comm: Any,
    buffer: nbep.Buffer,
    elastic: nbep.ElasticBuffer,
    inputs: Inputs,
    num_sms: int,
    options: argparse.Namespace,
) -> Iterator[Case]:
    """All works at one number of SMs; those of Buffer with zero_copy are there to compare with compact."""
    x = inputs.xs[DISPATCH_BF16]
    num_tokens = 0.0

    def case(form: str, work: str, call: Callable[[], Any]) -> Case:
        moved = num_tokens * token_bytes(work, options.hidden)
        return Case({"work": f"{form} {work}", "num_sms": num_sms}, call, {"gbps": moved})

    whole = {
        "topk_idx": inputs.topk_idx,
        "topk_weights": inputs.topk_weights,
        "num_experts": options.experts,
        "num_sms": num_sms,
        "expert_alignment": options.align,
        "do_cpu_sync": not options.whole,
    }
    for form, do_expand in (("compact", False), ("expanded", True)):
        recv_x, _, _, handle, _ = elastic.dispatch(x, **whole, do_expand=do_expand)
        num_tokens = mean(comm, int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]))
        way = {**(whole if options.whole else {"handle": handle}), "do_expand": do_expand}
        for work in (DISPATCH_BF16, DISPATCH_FP8):
            yield case(form, work, partial(elastic.dispatch, inputs.xs[work], **way))
        yield case(form, COMBINE_BF16, partial(elastic.combine, recv_x, handle))
        if not do_expand:
            rows = elastic.make_rows(options.tokens * comm.size, options.hidden)
            for work in (DISPATCH_BF16, DISPATCH_FP8):
                yield case("shared", work, partial(elastic.dispatch, _shared(rows, inputs.xs[work]), **way))
            yield case("shared", COMBINE_BF16, partial(elastic.combine, _shared(rows, recv_x), handle))
    if options.whole:
        return
    direct: dict[str, Any] = {"config": nbep.Config(num_sms, CHUNK, 256), "zero_copy": True}
    layout = routes_of(buffer.get_dispatch_layout(inputs.topk_idx, options.experts))
    for work in WORKS:
        received, *_, routes, _ = buffer.dispatch(x, **layout, **direct)  # lent until the next dispatch
        yield case("zero_copy", work, call_of(work, buffer, inputs, received, routes, **direct))
