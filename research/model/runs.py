"""Runs of a call on the emulator, with a tracer that counts.

Each run makes the call twice through `nbep.Buffer`, and the second time counts: then all credits are given and taken
that a call in a long row of calls gives and takes. The normal modes are called as DeepEP's tests time them: with the
handle of an earlier dispatch, so without counting and without top-k.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

import nbep
from nbep.device.layout.intranode import num_nvl_bytes_needed
from nbep.device.layout.low_latency import NUM_HALVES, shape_of
from nbep.host.config import combine_rings, dispatch_rings
from nbep.host.low_latency.memory import quarter_bytes_needed
from nbep.reference import BF16, per_token_cast_to_fp8
from nbep.specimens.workloads.cases import routes_of
from research.model.traffic import HOME, LINKS, Traffic
from research.model.work import COMBINE, DISPATCH, INTRANODE, LOW_LATENCY, VERBS, Work

Counts = dict[str, dict[str, int]]  # link -> what -> how much


def count(work: Work, seed: int = 0) -> dict[str, Counts]:
    """What all ranks together do in one dispatch and in one combine.

    Args: seed in which order the emulator runs threads
    """
    traffic = Traffic(work.num_nvl_peers)
    body = _low_latency if work.mode == LOW_LATENCY else _normal
    nbep.spawn(lambda comm: body(comm, work, traffic), work.num_ranks, "emulator", seed=seed, tracer=traffic)
    counts: defaultdict[str, Counts] = defaultdict(dict)
    for verb in VERBS:
        for link in LINKS:
            numbers = traffic.tallies[verb, link].numbers()
            # What a rank tells itself crosses no link.
            counts[verb][link] = {
                what: value for what, value in numbers.items() if link != HOME or what in ("payload", "loads")
            }
    return dict(counts)


def _low_latency(comm: Any, work: Work, traffic: Traffic) -> None:
    num_experts, most = work.num_experts, max(work.num_tokens, 1)
    shape = shape_of(work.num_ranks, num_experts, most, work.hidden, work.num_topk, 0, 0, 0)
    buffer = nbep.Buffer(
        comm,
        num_rdma_bytes=2 * NUM_HALVES * quarter_bytes_needed(shape),
        low_latency_mode=True,
        num_qps_per_rank=num_experts // work.num_ranks,
        transport=work.transport,
        num_nvl_peers=work.num_nvl_peers,
    )
    x, topk_idx = tokens_of(work, comm.rank), work.topk_idx(comm.rank)
    weights = np.ones(topk_idx.shape, np.float32)
    rows = np.zeros((num_experts // work.num_ranks, work.num_ranks * most, work.hidden), BF16)
    for prefix in ("first ", ""):
        traffic.enter(comm.rank, prefix + DISPATCH)
        handle = buffer.low_latency_dispatch(x, topk_idx, most, num_experts, use_fp8=work.use_fp8)[2]
        traffic.enter(comm.rank, prefix + COMBINE)
        buffer.low_latency_combine(rows, topk_idx, weights, handle)
    traffic.enter(comm.rank, "")
    buffer.destroy()


def _normal(comm: Any, work: Work, traffic: Traffic) -> None:
    configs = [config_of(work, verb) for verb in VERBS]
    buffer = nbep.Buffer(comm, **_buffer_sizes(work, configs))
    rank = comm.rank
    x = tokens_of(work, rank)
    routes = routes_of(buffer.get_dispatch_layout(work.topk_idx(rank), work.num_experts))
    received, *_, handle, _ = buffer.dispatch(x, **routes, config=configs[0])
    assert handle is not None
    send: Callable[[], Any] = lambda: buffer.dispatch(  # noqa: E731
        per_token_cast_to_fp8(x) if work.use_fp8 else x, handle=handle, config=configs[0]
    )
    for prefix in ("first ", ""):
        traffic.enter(rank, prefix + DISPATCH)
        send()
        traffic.enter(rank, prefix + COMBINE)
        buffer.combine(received, handle, config=configs[1])
    traffic.enter(rank, "")
    buffer.destroy()


def config_of(work: Work, verb: str) -> nbep.Config:
    """Rings that hold all that is sent to them: how often a sender waits for room depends on who is first."""
    index = VERBS.index(verb)
    nvl, rdma = work.nvl_chunks[index], work.rdma_chunks[index]
    most = (work.num_tokens + 1) * work.num_nodes  # in combine, nodes share an NVLink ring's slots
    return nbep.Config(2 * work.num_channels, nvl, nvl * (most // nvl + 2), rdma, rdma * (most // rdma + 2))


def _buffer_sizes(work: Work, configs: list[nbep.Config]) -> dict[str, Any]:
    """With room for the rings of both verbs, in bf16 with scales: more than either takes."""
    if work.mode == INTRANODE:
        shapes = [config.ring_shape(work.num_ranks, 2 * work.hidden, 0, work.hidden // 128, 1) for config in configs]
        return {"num_nvl_bytes": max(map(num_nvl_bytes_needed, shapes))}
    sizes = work.num_nodes, work.num_nvl_peers, 2 * work.hidden, 0
    rings = dispatch_rings(configs[0], *sizes, work.hidden // 128), combine_rings(configs[1], *sizes)
    return {
        "num_nvl_bytes": max(ring.num_nvl_bytes for ring in rings),
        "num_rdma_bytes": max(ring.num_rdma_bytes for ring in rings),
        "num_nvl_peers": work.num_nvl_peers,
        "transport": work.transport,
    }


def tokens_of(work: Work, rank: int) -> np.ndarray:
    rng = np.random.default_rng(rank)
    return rng.standard_normal((work.num_tokens, work.hidden), np.float32).astype(BF16)
