"""Dispatch and combine inside a node, as DeepEP's own test measures them, beside what the wire can carry.

    mpirun -n 8 nbep bench intranode [--sms 8,16,24] [--chunks 4,8,16] [--json [FILE.json]] [--plot FILE]
    nbep bench intranode --ranks 4        virtual ranks on one card: the kernels run, but no wire is measured
    nbep bench intranode --zero-copy      the calls without rings; --push-warps 8,12 tries splits of combine's SMs

All with a cached handle; times are the mean over the repetitions and the ranks. GB/s counts every received token, the
rank's own included (DeepEP's unit); "wire" leaves the own ones out; "of push" is wire over what `push`, copies to all
peers at once by 16-byte loads and stores, reaches with the same number of SMs in the same run. What the SMs copy at
home, and what they copy in all when half of it goes to the peers, stands beside. Needs torch.

Source: DeepEP tests/test_intranode.py (test_main, "Tune dispatch performance")
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import nbep
from nbep.bench import UNUSABLE, can_run, mpi_world, numbers, on_ranks, positive, some_of
from nbep.bench.parts.clocks import Clock, HostTime, Step, host_times
from nbep.bench.parts.normal_clock import Push, mean, mean_seconds, push_rates
from nbep.bench.parts.report import Report, draw, push_gbps
from nbep.device.terminal import add_json
from nbep.host.target.memory import HandleType
from nbep.workloads.cases import routes_of

WORKS = ("dispatch bf16", "dispatch fp8", "combine bf16")
NUM_NVL_BYTES = 2_000_000_000 // 128 * 128


@dataclass(frozen=True)
class Row:
    """One measurement. Bandwidths are in GB/s for each rank. num_push_warps is 0 where the config does not say it."""

    work: str
    num_sms: int
    chunk: int
    us: float
    gbps: float
    wire_gbps: float
    of_push: float
    num_push_warps: int = 0

    @property
    def said_warps(self) -> int | None:
        return self.num_push_warps or None


COLUMNS = {
    "work": "work",
    "SMs": "num_sms",
    "push warps": "said_warps",
    "chunk": "chunk",
    "us": "us:.1f",
    "GB/s": "gbps:.1f",
    "wire GB/s": "wire_gbps:.1f",
    "of push": "of_push:.2f",
}


@dataclass
class Setup:
    """One rank's inputs, on its GPU."""

    comm: Any
    buffer: nbep.Buffer
    x: Any
    x_fp8: tuple[Any, Any]
    layout: dict[str, Any]
    topk_idx: Any
    options: argparse.Namespace


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nbep bench intranode", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=numbers, default=[8, 12, 16, 20, 24], help="SMs to try, even numbers")
    parser.add_argument("--chunks", type=numbers, help="tokens a chunk to try; with --zero-copy of combine alone")
    parser.add_argument("--zero-copy", action="store_true", help="calls without rings")
    parser.add_argument("--push-warps", type=numbers, default=[], help="with --zero-copy: warps that begin to push")
    parser.add_argument("--slots", type=int, default=256, help="slots of a ring")
    parser.add_argument("--threads", type=int, default=None, help="threads a block")
    parser.add_argument("--works", type=some_of(WORKS), default=list(WORKS), help=f"some of: {', '.join(WORKS)}")
    parser.add_argument("--repeat", type=positive, default=30, help="timed calls of each kind")
    parser.add_argument("--handle-type", default="ipc", choices=get_args(HandleType), help="as in nbep.Buffer")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="virtual ranks, when not under mpirun")
    add_json(parser)
    parser.add_argument("--plot", type=Path, help="draw GB/s over SMs there")
    options = parser.parse_args(argv)
    if options.chunks is None:
        options.chunks = [2, 4, 8] if options.zero_copy else [4, 6, 8, 12, 16, 24, 32]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if not can_run("intranode", with_torch=True):
        return UNUSABLE
    on_ranks(mpi_world(), options.ranks, measure_rank, options)
    return 0


def measure_rank(comm: Any, options: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 prints and writes."""
    setup = prepare(comm, options)
    memory = setup.buffer._memory
    assert memory is not None
    pushes = {sms: push_rates(setup, memory, sms) for sms in options.sms}
    layout_us = 1e6 * mean_seconds(
        setup, lambda: setup.buffer.get_dispatch_layout(setup.topk_idx, options.experts), behind_sleep=True
    )
    rows = [row for work in options.works for sms in options.sms for row in measure_work(setup, work, sms, pushes[sms])]
    host = host_cost(setup)
    if comm.rank == 0:
        tell(rows, pushes, layout_us, host, comm.size, options)
    setup.buffer.destroy()


def prepare(comm: Any, options: argparse.Namespace) -> Setup:
    import torch

    # The buffer comes first: its GPU is torch's current one from then on.
    num_zero_copy_bytes = 0
    if options.zero_copy:
        sizes = options.tokens, options.hidden, comm.size, options.topk
        num_zero_copy_bytes = nbep.Buffer.get_zero_copy_size_hint(*sizes)
    buffer = nbep.Buffer(
        comm,
        num_nvl_bytes=NUM_NVL_BYTES,
        handle_type=options.handle_type,
        num_zero_copy_bytes=num_zero_copy_bytes,
    )
    generator = torch.Generator("cuda").manual_seed(comm.rank)
    shape = (options.tokens, options.hidden)
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
    scores = torch.randn((options.tokens, options.experts), device="cuda", generator=generator).abs() + 1
    topk_idx = torch.topk(scores, options.topk, dim=-1, sorted=False)[1]
    torch.cuda.current_stream().synchronize()
    x_fp8 = nbep.per_token_cast_to_fp8(x, column_major_scales=True)
    layout = routes_of(buffer.get_dispatch_layout(topk_idx, options.experts))
    torch.cuda.current_stream().synchronize()
    return Setup(comm, buffer, x, x_fp8, layout, topk_idx, options)


def config_of(options: argparse.Namespace, num_sms: int, chunk: int, num_push_warps: int = 0) -> nbep.Config:
    push_warps = num_push_warps or None
    return nbep.Config(num_sms, chunk, options.slots, num_threads=options.threads, num_push_warps=push_warps)


def settings_of(options: argparse.Namespace, work: str, num_sms: int) -> list[tuple[int, int]]:
    """The (chunk, num_push_warps) to try: what has no meaning for a work is not tried."""
    if not options.zero_copy:
        return [(chunk, 0) for chunk in options.chunks]
    if work != "combine bf16":
        return [(options.chunks[0], 0)]
    splits = [0, *options.push_warps]
    return [(chunk, split) for split in splits for chunk in options.chunks]


def measure_work(setup: Setup, work: str, num_sms: int, pushed: Push) -> list[Row]:
    """All chunk sizes of one work at one number of SMs."""
    buffer, options = setup.buffer, setup.options
    config = config_of(options, num_sms, options.chunks[0])
    recv_x, _, _, _, handle, _ = buffer.dispatch(setup.x, config=config, zero_copy=options.zero_copy, **setup.layout)
    token_bytes = options.hidden * 2
    if work == "dispatch fp8":
        token_bytes = options.hidden + options.hidden // 128 * 4
    assert handle is not None
    assert not isinstance(recv_x, tuple)
    num_own = int(setup.layout["num_tokens_per_rank"][setup.comm.rank])
    num_moved = recv_x.shape[0]
    x = setup.x_fp8 if work == "dispatch fp8" else setup.x
    rows = []
    for chunk, num_push_warps in settings_of(options, work, num_sms):
        config = config_of(options, num_sms, chunk, num_push_warps)
        if work == "combine bf16":
            seconds = mean_seconds(
                setup, partial(buffer.combine, recv_x, handle, config=config, zero_copy=options.zero_copy)
            )
        else:
            seconds = mean_seconds(
                setup, partial(buffer.dispatch, x, handle=handle, config=config, zero_copy=options.zero_copy)
            )
        rate = mean(setup, num_moved * token_bytes) / seconds / 1e9
        wire = mean(setup, (num_moved - num_own) * token_bytes) / seconds / 1e9
        rows.append(Row(work, num_sms, chunk, 1e6 * seconds, rate, wire, wire / pushed.to_peers, num_push_warps))
    return rows


def host_cost(setup: Setup) -> HostTime:
    """What a cached dispatch costs the CPU."""
    buffer, options = setup.buffer, setup.options
    config = config_of(options, options.sms[0], options.chunks[0])
    handle = buffer.dispatch(setup.x, config=config, zero_copy=options.zero_copy, **setup.layout)[4]
    call = partial(buffer.dispatch, setup.x, handle=handle, config=config, zero_copy=options.zero_copy)
    clock = Clock(setup.comm, lambda: None, options.repeat)
    return host_times(clock, [Step("cached dispatch", call)])["cached dispatch"]


def tell(
    rows: list[Row],
    pushes: dict[int, Push],
    layout_us: float,
    host: HostTime,
    num_ranks: int,
    options: argparse.Namespace,
) -> None:
    report = Report(options, num_ranks=num_ranks, push_gbps=push_gbps(pushes), layout_us=layout_us, host=host._asdict())
    shape = f"{num_ranks} ranks, {options.tokens} tokens, hidden {options.hidden}, top-{options.topk}"
    report.table(rows, COLUMNS, shape)
    report.say_push(pushes)
    report.say(
        f"get_dispatch_layout: {layout_us:.1f} us; host cost of a cached dispatch: {host.us:.1f} us "
        f"(least {host.least_us:.1f}, in a row {host.in_a_row_us:.1f})"
    )
    for work in options.works:
        for limit in sorted({min(options.sms), 16, 20, max(options.sms)}):
            of_work = [row for row in rows if row.work == work and row.num_sms <= limit]
            if of_work:
                best = max(of_work, key=lambda row: row.gbps)
                report.say(
                    f"best {work} at no more than {limit} SMs: {best.gbps:.1f} GB/s, {best.us:.1f} us "
                    f"({best.num_sms} SMs, chunk {best.chunk}, {best.of_push:.2f} of push)"
                )
    report.add(rows=rows)
    report.close()
    if options.plot:
        plot(rows, pushes, num_ranks, options.plot)


def plot(rows: list[Row], pushes: dict[int, Push], num_ranks: int, path: Path) -> None:
    """Best wire bandwidth over SMs, one line a work, with the push ceiling."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        best = lines.setdefault(row.work, {})
        best[row.num_sms] = max(best.get(row.num_sms, 0.0), row.wire_gbps)
    lines["push"] = {num_sms: rates.to_peers for num_sms, rates in pushes.items()}
    texts = {"xlabel": "SMs", "ylabel": "GB/s on the wire, each GPU", "title": f"{num_ranks} ranks"}
    draw(path, lines, dashed="push", ylim=(0, None), **texts)
