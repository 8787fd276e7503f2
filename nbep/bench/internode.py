"""Dispatch and combine between virtual nodes, as DeepEP's own test measures them, beside what SMs and links can carry.

    mpirun -n 4 nbep bench internode --nodes 2 [--num-sms 16,20,24] [--nvl-chunks 8,16] [--rdma-chunks 16,32]
    nbep bench internode --nodes 2 --num-nvl-peers 4    virtual ranks on one card: the kernels run, no wire is measured

 direct   what goes to another node is written to its mapped memory
 ibgda    it goes through send queues, and the software NIC, a kernel on SMs of the same GPU, copies it

The nodes are ranks of one host. So the "network" is NVLink, or the memory of a card: times over a real network are
others. Calls have a cached handle, and times include its notify; they are the mean over repetitions and ranks. Before a
transport is measured its results are compared bit for bit. "of push" is the time in which `push`, 16-byte loads and
stores with nothing else to do, carries the bytes of both hops with as many SMs in the same run, over that of the call;
the run says what is counted. Needs torch.

Source: DeepEP tests/test_internode.py (test_main, "Tune dispatch performance", "Tune combine performance")
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

import numpy as np

import nbep
from nbep.bench import UNUSABLE, can_run, mpi_world, numbers, on_ranks, positive, some_of
from nbep.bench.parts.internode_calls import (
    COMBINE_BF16,
    DISPATCH_BF16,
    DISPATCH_FP8,
    WORKS,
    Carried,
    GpuArrays,
    Routes,
    allowed_us,
    choose_experts,
    make_tokens,
    token_bytes,
    wrong_results,
)
from nbep.bench.parts.internode_report import Row, add_transport, begin_report
from nbep.bench.parts.normal_clock import Push, mean_seconds, push_bytes, push_rates
from nbep.device.layout.intranode import MAX_NVL_PEERS
from nbep.device.terminal import add_json
from nbep.host.ranks.comm import InProcessComm
from nbep.host.target.memory import HandleType
from nbep.host.transport.base import TransportName
from nbep.workloads.cases import routes_of

WRONG = 1  # the exit code if a result is
MAX_RANKS = MAX_NVL_PEERS  # which push reaches all at once
ARRAYS: Any = GpuArrays


@dataclass
class Setup:
    """One rank's inputs. xs: of each dispatch"""

    comm: Any
    options: argparse.Namespace
    topk_idx: Any
    xs: dict[str, Any]
    routes: Routes
    carried: dict[str, Carried]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nbep bench internode", description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=positive, default=2)
    parser.add_argument("--num-nvl-peers", type=positive, help="ranks of a node; 2, or under mpirun what there are")
    parser.add_argument(
        "--transport", type=some_of(get_args(TransportName)), default=["direct", "ibgda"], help="direct,ibgda or one"
    )
    parser.add_argument("--tokens", type=positive, default=4096, help="of each rank")
    parser.add_argument("--hidden", type=positive, default=7168)
    parser.add_argument("--topk", type=positive, default=8)
    parser.add_argument("--topk-groups", type=positive, help="nodes that a token goes to; all, or four of more")
    parser.add_argument("--experts", type=positive, default=256, help="of all ranks")
    parser.add_argument("--num-sms", type=numbers, default=[16, 20, 24], help="SMs to try, even numbers")
    parser.add_argument("--nvl-chunks", type=numbers, default=[4, 8, 16, 32], help="tokens a chunk inside a node")
    parser.add_argument("--rdma-chunks", type=numbers, default=[8, 16, 32], help="tokens a chunk between nodes")
    parser.add_argument("--nvl-slots", type=positive, default=512, help="slots of a ring inside a node")
    parser.add_argument("--rdma-slots", type=positive, default=128, help="slots of a ring between nodes")
    parser.add_argument("--threads", type=positive, help="threads a block")
    parser.add_argument("--num-qps", type=positive, help="queue pairs for each peer; one for each channel")
    parser.add_argument("--works", type=some_of(WORKS), default=list(WORKS), help=f"some of: {', '.join(WORKS)}")
    parser.add_argument("--repeat", type=positive, default=30, help="timed calls of each kind")
    parser.add_argument("--handle-type", default="ipc", choices=get_args(HandleType), help="as in nbep.Buffer")
    add_json(parser)
    return parser.parse_args(argv)


def fill_in(options: argparse.Namespace, num_ranks: int | None) -> str | None:
    """Set what depends on the ranks, which are None if they are to be made. Returns what cannot be measured."""
    if options.num_nvl_peers is None:
        options.num_nvl_peers = 2 if num_ranks is None else max(1, num_ranks // options.nodes)
    wanted = options.nodes * options.num_nvl_peers
    options.topk_groups = options.topk_groups or min(options.nodes, 4)
    options.num_qps = options.num_qps or max(options.num_sms) // 2
    if num_ranks is not None and wanted != num_ranks:
        return f"{num_ranks} ranks are not {options.nodes} nodes of {options.num_nvl_peers}"
    if options.nodes < 2 or wanted > MAX_RANKS:
        return f"{wanted} ranks in {options.nodes} nodes; there must be 2 to {MAX_RANKS}, in at least 2 nodes"
    if options.experts % wanted != 0:
        return f"{options.experts} experts are no multiple of {wanted} ranks"
    if options.topk_groups > options.nodes:
        return f"{options.topk_groups} groups of {options.nodes} nodes"
    if options.topk > options.experts // options.nodes * options.topk_groups:
        return f"top-{options.topk} of {options.experts // options.nodes * options.topk_groups} experts"
    if options.hidden % 128 != 0:
        return f"hidden {options.hidden} is no multiple of 128, as FP8 needs"
    if max(options.nvl_chunks) > options.nvl_slots // options.nodes:
        return f"NVL chunk {max(options.nvl_chunks)}; {options.nodes} nodes share {options.nvl_slots} slots in combine"
    try:
        for num_sms in options.num_sms:
            largest_config(options, num_sms).get_nvl_buffer_size_hint(1, wanted, num_nvl_peers=options.num_nvl_peers)
    except ValueError as error:
        return str(error)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if not can_run("internode", with_torch=True):
        return UNUSABLE
    comm = mpi_world()
    problem = fill_in(options, None if comm is None else comm.size)
    if problem is not None:
        print(f"nbep bench internode: {problem}", file=sys.stderr)
        return UNUSABLE
    return 0 if all(on_ranks(comm, options.nodes * options.num_nvl_peers, measure_rank, options)) else WRONG


def config_of(options: argparse.Namespace, num_sms: int, nvl_chunk: int, rdma_chunk: int) -> nbep.Config:
    slots = options.nvl_slots, options.rdma_slots
    return nbep.Config(num_sms, nvl_chunk, slots[0], rdma_chunk, slots[1], num_threads=options.threads)


def largest_config(options: argparse.Namespace, num_sms: int) -> nbep.Config:
    """With the most slots: those between nodes are rounded up to chunks."""
    return max(
        (config_of(options, num_sms, max(options.nvl_chunks), chunk) for chunk in options.rdma_chunks),
        key=lambda config: config.num_max_rdma_chunked_recv_tokens,
    )


def measure_rank(comm: Any, options: argparse.Namespace) -> bool:
    """Measure everything on this rank; rank 0 prints and writes. False if a result was wrong."""
    pushes = measure_push(comm, options)
    setup = prepare(comm, options)
    report = None
    if comm.rank == 0:
        report = begin_report(isinstance(comm, InProcessComm), options, setup.carried, pushes)
    for transport in options.transport:
        rows, faults = measure_transport(setup, transport, pushes)
        if report is not None and faults:
            report.say(*(f"{transport}: {fault}" for fault in faults))
        elif report is not None:
            add_transport(report, rows)
        if faults:
            break
    if report is not None:
        report.close()
    return not faults


def measure_push(comm: Any, options: argparse.Namespace) -> dict[int, Push]:
    """Push bandwidth by number of SMs; every other rank counts as a peer, in any node."""
    memory = nbep.SharedMemory.create(comm, push_bytes(comm.size), handle_type=options.handle_type)
    setup = argparse.Namespace(comm=comm, options=options)
    pushes = {num_sms: push_rates(setup, memory, num_sms) for num_sms in options.num_sms}
    memory.close()
    return pushes


def prepare(comm: Any, options: argparse.Namespace) -> Setup:
    choices = options.topk, options.experts, options.nodes, options.topk_groups
    topk_idx = choose_experts(comm.rank, options.tokens, *choices)
    owners = topk_idx // (options.experts // comm.size)
    in_rank = (owners[:, :, None] == np.arange(comm.size)).any(axis=1)
    routes = Routes(np.stack(comm.allgather(in_rank)), options.num_nvl_peers)
    x = ARRAYS.put(make_tokens(comm.rank, np.arange(options.tokens), options.hidden))
    xs = {DISPATCH_BF16: x, DISPATCH_FP8: nbep.per_token_cast_to_fp8(x, column_major_scales=True)}
    carried = {work: routes.carried(token_bytes(work, options.hidden)) for work in options.works}
    ARRAYS.wait()
    return Setup(comm, options, ARRAYS.put(topk_idx), xs, routes, carried)


def create_buffer(setup: Setup, transport: str) -> nbep.Buffer:
    options, num_ranks = setup.options, setup.comm.size
    config = largest_config(options, max(options.num_sms))
    peers = options.num_nvl_peers
    return nbep.Buffer(
        setup.comm,
        config.get_nvl_buffer_size_hint(2 * options.hidden, num_ranks, num_nvl_peers=peers),
        config.get_rdma_buffer_size_hint(2 * options.hidden, num_ranks, num_nvl_peers=peers),
        num_qps_per_rank=options.num_qps,
        handle_type=options.handle_type,
        transport=transport,  # type: ignore[arg-type]
        num_nvl_peers=peers,
    )


def measure_transport(setup: Setup, transport: str, pushes: dict[int, Push]) -> tuple[list[Row], list[str]]:
    """All rows, and what is wrong on any rank; no rows then."""
    options = setup.options
    buffer = create_buffer(setup, transport)
    layout = routes_of(buffer.get_dispatch_layout(setup.topk_idx, options.experts))
    rows: list[Row] = []
    faults: list[str] = []
    for num_sms in options.num_sms:
        config = config_of(options, num_sms, options.nvl_chunks[0], options.rdma_chunks[0])
        wrong = wrong_results(setup.comm, buffer, ARRAYS, setup.routes, layout, setup.xs, config)
        faults = [fault for of_rank in setup.comm.allgather(wrong) for fault in of_rank]
        if faults:
            break
        recv_x, _, _, _, handle, _ = buffer.dispatch(setup.xs[DISPATCH_BF16], config=config, **layout)
        assert handle is not None
        assert not isinstance(recv_x, tuple)
        for work, nvl_chunk, rdma_chunk in product(options.works, options.nvl_chunks, options.rdma_chunks):
            config = config_of(options, num_sms, nvl_chunk, rdma_chunk)
            call: Callable[[], Any] = partial(buffer.dispatch, setup.xs.get(work), handle=handle, config=config)
            if work == COMBINE_BF16:
                call = partial(buffer.combine, recv_x, handle, config=config)
            us = 1e6 * mean_seconds(setup, call)
            rows.append(
                make_row(setup.carried[work], pushes[num_sms], transport, work, num_sms, nvl_chunk, rdma_chunk, us)
            )
    buffer.destroy()
    return ([] if faults else rows), faults


def make_row(
    carried: Carried, push: Push, transport: str, work: str, num_sms: int, nvl_chunk: int, rdma_chunk: int, us: float
) -> Row:
    rates = (carried.rdma / us / 1e3, carried.nvl / us / 1e3, carried.link / us / 1e3)
    allowed = allowed_us(carried, push)
    return Row(transport, work, num_sms, nvl_chunk, rdma_chunk, us, *rates, allowed, allowed / us)
