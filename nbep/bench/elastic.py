"""ElasticBuffer beside Buffer inside a node, in one run: compact beside the way without rings, expanded, and decoding.

    mpirun -n 8 nbep bench elastic [--sms 16,24] [--json [FILE.json]]
    nbep bench elastic --ranks 4          virtual ranks on one card: the kernels run, but no wire is measured
    nbep bench elastic --tokens 128 --whole     calls of a decoding step: with a count, without the CPU

Without --whole all calls have a handle. Times are the mean over the repetitions and the ranks. GB/s counts every
received token once, the rank's own included (DeepEP's unit), also where it has several rows. Needs torch.

Source: DeepEP tests/elastic/test_ep.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import nbep
from nbep.bench import UNUSABLE, can_run, mpi_world, numbers, on_ranks, positive
from nbep.bench.parts.normal_clock import mean, mean_seconds
from nbep.bench.parts.report import Report
from nbep.device.terminal import add_json
from nbep.workloads.cases import routes_of

CHUNK = 4  # of the combine without rings


@dataclass(frozen=True)
class Row:
    """One measurement. GB/s are those of each rank."""

    work: str
    num_sms: int
    us: float
    gbps: float


COLUMNS = {"work": "work", "SMs": "num_sms", "us": "us:.1f", "GB/s": "gbps:.1f"}


@dataclass
class Setup:
    """One rank's inputs, on its GPU."""

    comm: Any
    buffer: nbep.Buffer
    elastic: nbep.ElasticBuffer
    x: Any
    x_fp8: tuple[Any, Any]
    topk_idx: Any
    topk_weights: Any
    options: argparse.Namespace


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nbep bench elastic", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--align", type=positive, default=128, help="expert_alignment")
    parser.add_argument("--sms", type=numbers, default=[16, 24], help="SMs to try, even numbers")
    parser.add_argument("--whole", action="store_true", help="calls without a handle and without CPU sync")
    parser.add_argument("--repeat", type=positive, default=30, help="timed calls of each kind")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="virtual ranks, when not under mpirun")
    add_json(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if not can_run("elastic", with_torch=True):
        return UNUSABLE
    on_ranks(mpi_world(), options.ranks, measure_rank, options)
    return 0


def measure_rank(comm: Any, options: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 prints and writes."""
    setup = prepare(comm, options)
    rows = [row for num_sms in options.sms for row in measure(setup, num_sms)]
    if comm.rank == 0:
        report = Report(options, num_ranks=comm.size)
        shape = f"{comm.size} ranks, {options.tokens} tokens, hidden {options.hidden}, top-{options.topk}"
        report.table(rows, COLUMNS, f"{shape}, {'whole calls' if options.whole else 'with a handle'}")
        report.add(rows=rows)
        report.close()
    setup.elastic.destroy()
    setup.buffer.destroy()


def prepare(comm: Any, options: argparse.Namespace) -> Setup:
    import torch

    # The buffers come first: their GPU is torch's current one from then on.
    sizes = options.tokens, options.hidden
    direct_bytes = nbep.Buffer.get_zero_copy_size_hint(*sizes, comm.size, options.topk)
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 20, num_zero_copy_bytes=direct_bytes)
    elastic = nbep.ElasticBuffer(
        comm, num_max_tokens_per_rank=options.tokens, hidden=options.hidden, num_topk=options.topk
    )
    generator = torch.Generator("cuda").manual_seed(comm.rank)
    x = torch.randn(sizes, dtype=torch.bfloat16, device="cuda", generator=generator)
    scores = torch.randn((options.tokens, options.experts), device="cuda", generator=generator).abs() + 1
    weights, topk_idx = torch.topk(scores, options.topk, dim=-1, sorted=False)
    torch.cuda.current_stream().synchronize()
    x_fp8 = nbep.per_token_cast_to_fp8(x, column_major_scales=True)
    torch.cuda.current_stream().synchronize()
    return Setup(comm, buffer, elastic, x, x_fp8, topk_idx, weights, options)


def measure(setup: Setup, num_sms: int) -> list[Row]:
    """All works at one number of SMs."""
    options, elastic = setup.options, setup.elastic
    given = {
        "topk_idx": setup.topk_idx,
        "topk_weights": setup.topk_weights,
        "num_experts": options.experts,
        "num_sms": num_sms,
        "expert_alignment": options.align,
        "do_cpu_sync": not options.whole,
    }
    rows = []
    num_tokens = 0
    for form, do_expand in (("compact", False), ("expanded", True)):
        recv_x, _, _, handle, _ = elastic.dispatch(setup.x, **given, do_expand=do_expand)
        num_tokens = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        way = {**given, "do_expand": do_expand} if options.whole else {"handle": handle, "do_expand": do_expand}
        rows += [
            timed(setup, f"{form} dispatch bf16", num_sms, num_tokens, partial(elastic.dispatch, setup.x, **way)),
            timed(setup, f"{form} dispatch fp8", num_sms, num_tokens, partial(elastic.dispatch, setup.x_fp8, **way)),
            timed(setup, f"{form} combine bf16", num_sms, num_tokens, partial(elastic.combine, recv_x, handle)),
        ]
    return rows if options.whole else rows + measure_without_rings(setup, num_sms, num_tokens)


def measure_without_rings(setup: Setup, num_sms: int, num_tokens: int) -> list[Row]:
    """The same of Buffer with zero_copy, to compare with compact."""
    buffer, config = setup.buffer, nbep.Config(num_sms, CHUNK, 256)
    layout = routes_of(buffer.get_dispatch_layout(setup.topk_idx, setup.options.experts))
    way: dict[str, Any] = {"config": config, "zero_copy": True}
    recv_x, *_, handle, _ = buffer.dispatch(setup.x, **layout, **way)
    assert handle is not None
    dispatch = partial(buffer.dispatch, handle=handle, **way)
    return [
        timed(setup, "zero_copy dispatch bf16", num_sms, num_tokens, partial(dispatch, setup.x)),
        timed(setup, "zero_copy dispatch fp8", num_sms, num_tokens, partial(dispatch, setup.x_fp8)),
        timed(setup, "zero_copy combine bf16", num_sms, num_tokens, partial(buffer.combine, recv_x, handle, **way)),
    ]


def timed(setup: Setup, work: str, num_sms: int, num_tokens: int, call: Callable[[], Any]) -> Row:
    options = setup.options
    token_bytes = options.hidden + options.hidden // 128 * 4 if work.endswith("fp8") else 2 * options.hidden
    seconds = mean_seconds(setup, call, behind_sleep=options.whole)
    return Row(work, num_sms, 1e6 * seconds, mean(setup, num_tokens * token_bytes) / seconds / 1e9)
