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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, get_args

import ml_dtypes
import numpy as np

import nbep
from nbep.bench.harness import normal_calls
from nbep.bench.harness.clocks import Clock, mean_us
from nbep.bench.harness.command import Parser, numbers, positive, run, some_of
from nbep.bench.harness.normal_calls import (
    COMBINE_BF16,
    DISPATCH_BF16,
    DISPATCH_FP8,
    WORKS,
    Inputs,
    call_of,
    choose_experts,
    put_inputs,
    token_bytes,
)
from nbep.bench.harness.report import (
    Case,
    Push,
    Pushes,
    Report,
    Row,
    carrier,
    push_bytes,
    push_gbps,
    push_rates,
    say_push,
)
from nbep.device.layout.intranode import MAX_NVL_PEERS
from nbep.host.transport.base import TransportName
from nbep.specimens.workloads.cases import routes_of

# Which bytes the calls carry over the two hops, their tokens, and whether they come right
#
#  dispatch: rank (n, l) --hop 1, between nodes--> rank (d, l) --hop 2, inside node d--> ranks (d, k)
#  combine:  rank (n, l) <--hop 1, between nodes-- rank (d, l) <--hop 2, inside node d-- ranks (d, k)


NUM_DIGITS = 6  # columns that say which token it is, in base 16, behind the one for its rank


class Carried(NamedTuple):
    """Bytes of tokens that one call carries, the mean over ranks; scales count, top-k and other notes do not.

    rdma     hop 1: a token once for each node that it goes to, its own too; DeepEP's count
    nvl      hop 2: a token once for each rank that it goes to; DeepEP's count
    stored   both hops: what SMs store on the way, whether it leaves the GPU or not; rdma and nvl together
    link     both hops: what goes to another rank, so that it crosses a link where each rank has a GPU
    """

    rdma: float
    nvl: float
    stored: float
    link: float


class Routes(NamedTuple):
    """Where tokens of all ranks go: is_token_in_rank [num_ranks (source), num_tokens, num_ranks] bool."""

    is_token_in_rank: np.ndarray
    num_nvl_peers: int

    @property
    def num_ranks(self) -> int:
        return self.is_token_in_rank.shape[2]

    def carried(self, token_bytes: int) -> Carried:
        """Bytes of a call; a combine takes the same ways back."""
        num_ranks, size = self.num_ranks, self.num_nvl_peers
        to_rank = self.is_token_in_rank.sum(axis=1)  # [source, destination]
        in_node = self.is_token_in_rank.reshape(num_ranks, -1, num_ranks // size, size).any(axis=3)
        to_node = in_node.sum(axis=1)  # [source, node]
        sources, destinations = np.indices(to_rank.shape)
        own_node = np.arange(num_ranks)[:, None] // size == np.arange(num_ranks // size)
        rdma, nvl = int(to_node.sum()), int(to_rank.sum())
        # A forwarder has the local rank of the source, so it forwards to itself what comes from its own local rank.
        link = int(to_node[~own_node].sum() + to_rank[sources % size != destinations % size].sum())
        of_rank = token_bytes / num_ranks
        return Carried(rdma * of_rank, nvl * of_rank, (rdma + nvl) * of_rank, link * of_rank)


def allowed_us(carried: Carried, push: Push) -> float:
    """The time in which `push` carries as much: over the links, or out of the SMs if that takes longer."""
    return max(carried.link / push.to_peers, carried.stored / push.at_home) / 1e3


def make_tokens(rank: int, tokens: np.ndarray, hidden: int) -> np.ndarray:
    """Rows of a rank [len(tokens), hidden] bf16: its number, the token's digits, then a pattern of both.

    All are integers up to 15, so that sums of up to 16 rows are exact in bf16.
    """
    pattern = ((13 * rank + 7 * tokens) % 31).astype(np.int16)[:, None] + (np.arange(hidden) % 31).astype(np.int16)
    values = pattern % 31 - 15
    values[:, 0] = rank % 16
    values[:, 1 : 1 + NUM_DIGITS] = tokens[:, None] >> 4 * np.arange(NUM_DIGITS) & 15
    return values.astype(np.int8).astype(ml_dtypes.bfloat16)


# What comes


def expected_rows(routes: Routes, rank: int, hidden: int) -> np.ndarray:
    """What a rank receives: by source rank, then token."""
    return np.concatenate(
        [
            make_tokens(source, np.flatnonzero(routes.is_token_in_rank[source, :, rank]), hidden)
            for source in range(routes.num_ranks)
        ]
    )


def expected_sums(routes: Routes, rank: int, hidden: int) -> np.ndarray:
    """What combine makes of unchanged rows: each token as often as it went to a rank."""
    destinations = routes.is_token_in_rank[rank].sum(axis=1)
    rows = make_tokens(rank, np.arange(len(destinations)), hidden)
    return (rows.astype(np.float32) * destinations[:, None]).astype(ml_dtypes.bfloat16)


def num_wrong_rows(got: Any, wanted: Any) -> int:
    """Rows of arrays on the GPU that differ in a bit; of arrays with scales those of either."""
    if isinstance(wanted, tuple):
        return max(num_wrong_rows(*pair) for pair in zip(got, wanted, strict=True))
    left, right = normal_calls.arrays.get_bytes(got), normal_calls.arrays.get_bytes(wanted)
    if left.shape != right.shape:
        return max(len(left), len(right), 1)
    return int((left != right).any(axis=1).sum())


def wrong_results(
    comm: Any, buffer: nbep.Buffer, routes: Routes, layout: dict[str, Any], inputs: Inputs, config: nbep.Config
) -> list[str]:
    """What is wrong with one call of each work on this rank."""
    rank, arrays = comm.rank, normal_calls.arrays
    hidden = inputs.xs[DISPATCH_BF16].shape[1]
    x = arrays.put(expected_rows(routes, rank, hidden))
    sums = arrays.put(expected_sums(routes, rank, hidden))
    wanted = {DISPATCH_BF16: x, DISPATCH_FP8: nbep.per_token_cast_to_fp8(x), COMBINE_BF16: sums}
    arrays.wait()
    comm.barrier()  # on one card an allocation may wait for the kernels of other ranks, which wait for this one
    recv_x, _, _, _, handle, _ = buffer.dispatch(inputs.xs[DISPATCH_BF16], config=config, **layout)
    got = {DISPATCH_BF16: recv_x}
    for work in (DISPATCH_FP8, COMBINE_BF16):
        got[work] = call_of(work, buffer, inputs, recv_x, handle, config=config)()[0]
    arrays.wait()
    counts = {work: num_wrong_rows(got[work], wanted[work]) for work in WORKS}
    return [f"rank {rank}: {work}: {count} wrong rows" for work, count in counts.items() if count]


MAX_RANKS = MAX_NVL_PEERS  # which push reaches all at once
COLUMNS = {
    "work": "work",
    "SMs": "num_sms",
    "NVL chunk": "nvl_chunk",
    "RDMA chunk": "rdma_chunk",
    "us": "us:.1f",
    "RDMA GB/s": "rdma_gbps:.1f",
    "NVL GB/s": "nvl_gbps:.1f",
    "link GB/s": "link_gbps:.1f",
    "allowed us": "allowed_us:.1f",
    "of push": "of_push:.2f",
}
MOVED = {"work": "work", "RDMA": "rdma:.2f", "NVL": "nvl:.2f", "stored": "stored:.2f", "link": "link:.2f"}
COUNTED = (
    "us: from a call with a cached handle to its end, the notify kernel too.",
    "RDMA and NVL, DeepEP's units: a token counts once for each node that it goes to, its own too; once for each rank.",
    "link: of both hops, what goes to another rank. stored: all of both hops, whether it leaves the GPU or not.",
    "Receivers' copies to the user's arrays do not count, nor does what a software NIC copies.",
    "allowed: link bytes by push to peers, or stored bytes by push at home, whichever takes longer, at as many SMs.",
)


@dataclass
class Setup:
    """One rank's."""

    comm: Any
    options: argparse.Namespace
    inputs: Inputs
    routes: Routes
    carried: dict[str, Carried]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("internode", __doc__)
    parser.add_argument("--nodes", type=positive, default=2)
    parser.add_argument("--num-nvl-peers", type=positive, help="ranks of a node; 2, or under mpirun what there are")
    parser.add_argument(
        "--transport", type=some_of(get_args(TransportName)), default=["direct", "ibgda"], help="direct,ibgda or one"
    )
    parser.add("tokens", help="of each rank")
    parser.add("hidden", "topk")
    parser.add_argument("--topk-groups", type=positive, help="nodes that a token goes to; all, or four of more")
    parser.add("experts", help="of all ranks")
    parser.add_argument("--num-sms", type=numbers, default=[16, 20, 24], help="SMs to try, even numbers")
    parser.add_argument("--nvl-chunks", type=numbers, default=[4, 8, 16, 32], help="tokens a chunk inside a node")
    parser.add_argument("--rdma-chunks", type=numbers, default=[8, 16, 32], help="tokens a chunk between nodes")
    parser.add_argument("--nvl-slots", type=positive, default=512, help="slots of a ring inside a node")
    parser.add_argument("--rdma-slots", type=positive, default=128, help="slots of a ring between nodes")
    parser.add("threads")
    parser.add_argument("--num-qps", type=positive, help="queue pairs for each peer; one for each channel")
    parser.add_works(WORKS)
    parser.add("repeat", "handle-type", "json")
    return parser.parse_args(argv)


def fill_in(options: argparse.Namespace, comm: Any) -> str | None:
    """Set what depends on the ranks. Returns what cannot be measured."""
    if options.num_nvl_peers is None:
        options.num_nvl_peers = 2 if comm is None else max(1, comm.size // options.nodes)
    wanted = options.ranks = options.nodes * options.num_nvl_peers
    options.topk_groups = options.topk_groups or min(options.nodes, 4)
    options.num_qps = options.num_qps or max(options.num_sms) // 2
    if comm is not None and wanted != comm.size:
        return f"{comm.size} ranks are not {options.nodes} nodes of {options.num_nvl_peers}"
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
    return run("internode", parse(argv), measure_rank, fill_in)


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
    clock = Clock(comm, options.repeat, sleeps=False)
    pushes = measure_push(clock, options)
    setup = prepare(comm, options)
    report = begin_report(setup, pushes) if comm.rank == 0 else None
    for transport in options.transport:
        rows, faults = measure_transport(setup, transport, clock, pushes)
        if report is not None and faults:
            report.say(*(f"{transport}: {fault}" for fault in faults))
        elif report is not None:
            add_transport(report, rows)
        if faults:
            break
    if report is not None:
        report.close()
    return not faults


def measure_push(clock: Clock, options: argparse.Namespace) -> Pushes:
    """Every other rank counts as a peer, in any node."""
    memory = nbep.SharedMemory.create(clock.comm, push_bytes(clock.comm.size), handle_type=options.handle_type)
    pushes = push_rates(clock, memory, options.num_sms)
    memory.close()
    return pushes


def prepare(comm: Any, options: argparse.Namespace) -> Setup:
    choices = options.topk, options.experts, options.nodes, options.topk_groups
    topk_idx = choose_experts(comm.rank, options.tokens, *choices)
    owners = topk_idx // (options.experts // comm.size)
    in_rank = (owners[:, :, None] == np.arange(comm.size)).any(axis=1)
    routes = Routes(np.stack(comm.allgather(in_rank)), options.num_nvl_peers)
    inputs = put_inputs(make_tokens(comm.rank, np.arange(options.tokens), options.hidden), topk_idx)
    carried = {work: routes.carried(token_bytes(work, options.hidden)) for work in options.works}
    return Setup(comm, options, inputs, routes, carried)


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


def measure_transport(setup: Setup, transport: str, clock: Clock, pushes: Pushes) -> tuple[list[Row], list[str]]:
    """All rows, and what is wrong on any rank; no rows then."""
    options = setup.options
    buffer = create_buffer(setup, transport)
    layout = routes_of(buffer.get_dispatch_layout(setup.inputs.topk_idx, options.experts))
    rows: list[Row] = []
    faults: list[str] = []
    for num_sms, push in pushes.items():
        config = config_of(options, num_sms, options.nvl_chunks[0], options.rdma_chunks[0])
        wrong = wrong_results(setup.comm, buffer, setup.routes, layout, setup.inputs, config)
        faults = [fault for of_rank in setup.comm.allgather(wrong) for fault in of_rank]
        if faults:
            break
        recv_x, _, _, _, handle, _ = buffer.dispatch(setup.inputs.xs[DISPATCH_BF16], config=config, **layout)
        for case in cases(setup, buffer, recv_x, handle, num_sms, push):
            rows.append(case.row(mean_us(clock, case.call), transport=transport))
    buffer.destroy()
    return ([] if faults else rows), faults


def cases(setup: Setup, buffer: nbep.Buffer, recv_x: Any, handle: Any, num_sms: int, push: Push) -> Iterator[Case]:
    """All works and chunk sizes at one number of SMs."""
    options = setup.options
    for work, nvl_chunk, rdma_chunk in product(options.works, options.nvl_chunks, options.rdma_chunks):
        config = config_of(options, num_sms, nvl_chunk, rdma_chunk)
        carried = setup.carried[work]
        settings = {"work": work, "num_sms": num_sms, "nvl_chunk": nvl_chunk, "rdma_chunk": rdma_chunk}
        allowed = allowed_us(carried, push)
        yield Case(
            {**settings, "allowed_us": allowed},
            call_of(work, buffer, setup.inputs, recv_x, handle, config=config),
            {"rdma_gbps": carried.rdma, "nvl_gbps": carried.nvl, "link_gbps": carried.link},
            {"of_push": allowed},
        )


# What is said


def begin_report(setup: Setup, pushes: Pushes) -> Report:
    """What rank 0 says: what is measured, and the ceiling; the rows come later."""
    options, carries = setup.options, carrier('the "network"', setup.comm)
    carried = {work: of_work._asdict() for work, of_work in setup.carried.items()}
    sizes = {"num_nodes": options.nodes, "num_nvl_peers": options.num_nvl_peers}
    heads = {"network": carries, "counted": COUNTED, "carried_bytes": carried, "push_gbps": push_gbps(pushes)}
    report = Report(options, **sizes, **heads)
    report.say(
        f"{options.nodes} virtual nodes of {options.num_nvl_peers} ranks; {carries}",
        f"{options.tokens} tokens a rank, hidden {options.hidden}, top-{options.topk} of {options.experts} experts "
        f"on {options.topk_groups} nodes",
    )
    say_push(report, pushes)
    megabytes = [
        {"work": work, **{unit: num_bytes / 1e6 for unit, num_bytes in of_work.items()}}
        for work, of_work in carried.items()
    ]
    report.table(megabytes, MOVED, "MB of a rank in one call")
    report.say(*COUNTED)
    return report


def add_transport(report: Report, rows: list[Row]) -> None:
    """The rows of one transport."""
    report.table(rows, COLUMNS, rows[0]["transport"])
    for work in dict.fromkeys(row["work"] for row in rows):
        best = min((row for row in rows if row["work"] == work), key=lambda row: row["us"])
        report.say(
            "best {work}: {us:.1f} us, {rdma_gbps:.1f} GB/s RDMA, {nvl_gbps:.1f} GB/s NVL, {of_push:.2f} of push "
            "({num_sms} SMs, NVL chunk {nvl_chunk}, RDMA chunk {rdma_chunk})".format(**best)
        )
    report.add(rows=rows)
