"""What the counts of a call grow with: numbers that follow from the routes and the sizes alone.

Each is of the tokens of one rank, wherever they cause it: a token that a peer forwards counts for its source. A name
ends in the link that it is about. `rows` and `values` are bytes: of what is sent, with and without its notes, as the
protocol's own layout says. So are `hidden` and `outputs`; all other features are numbers of things.

 normal modes    pairs      a token and a rank that gets it; on the network a token and a node
                 chunks     what is left of the pairs of one channel and one goal, cut in chunks, rounded up
                 rings      a channel and a peer; on the network a channel and a node
                 nodes      other ones
                 values     rows without their notes; rows.node: to the own node, through the same rings
 low latency     choices    of a token, by where the expert is
                 experts    that are there, chosen or not
                 chosen     experts that some token of this rank has chosen
 both            peers      other ranks
                 parts      of the rows, each as large as a sender's stage; low-latency dispatch has one for a row
                 tokens, hidden: the tokens, and their bytes in bf16
"""

from __future__ import annotations

import numpy as np

from nbep.device.layout.internode import num_meta_words
from nbep.device.layout.intranode import RingShape, header_bytes
from nbep.device.layout.low_latency import header_bytes as low_latency_note_bytes
from nbep.device.layout.low_latency import header_offset as low_latency_note_offset
from nbep.device.layout.low_latency import row_stride, shape_of
from nbep.device.protocols.staging import STAGE_BYTES
from nbep.reference.intranode import channel_task_range
from research.model.traffic import HOME, LINKS, NETWORK, NVLINK
from research.model.work import DISPATCH, INTERNODE, LOW_LATENCY, VERBS, Work

Features = dict[str, float]


def features(work: Work, verb: str, rank: int) -> Features:
    """Of the tokens of one rank."""
    of = _low_latency if work.mode == LOW_LATENCY else _normal
    found = of(work, verb, rank)
    places = link_of_ranks(work, rank)
    for link in LINKS:
        found[f"peers.{link}"] = int((places == link).sum())
    found["tokens"] = work.num_tokens
    found["hidden"] = 2 * work.num_tokens * work.hidden
    return found


def total(work: Work, verb: str) -> Features:
    """Of all ranks together."""
    return _sum([features(work, verb, rank) for rank in range(work.num_ranks)])


def mean(work: Work, verb: str, num_samples: int) -> Features:
    """Of one rank, on average over some ranks that lie apart."""
    ranks = np.unique(np.linspace(0, work.num_ranks - 1, num_samples).astype(int))
    summed = _sum([features(work, verb, int(rank)) for rank in ranks])
    return {name: value / len(ranks) for name, value in summed.items()}


def link_of_ranks(work: Work, rank: int) -> np.ndarray:
    """[num_ranks]: over which link a rank reaches each other one."""
    others = np.arange(work.num_ranks)
    is_in_node = others // work.num_nvl_peers == rank // work.num_nvl_peers
    return np.where(others == rank, HOME, np.where(is_in_node, NVLINK, NETWORK))


def _sum(parts: list[Features]) -> Features:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _low_latency(work: Work, verb: str, rank: int) -> Features:
    shape = shape_of(
        work.num_ranks, work.num_experts, work.num_tokens, work.hidden, work.num_topk, int(work.use_fp8), 0, 0
    )
    message = low_latency_note_offset(shape) + low_latency_note_bytes(shape)
    row = message if verb == DISPATCH else row_stride(shape)
    per_expert = np.bincount(work.topk_idx(rank).reshape(-1), minlength=work.num_experts)
    places = np.repeat(link_of_ranks(work, rank), work.num_experts // work.num_ranks)
    sizes = 1 if verb == DISPATCH and work.use_fp8 else 2
    outputs = sizes * work.hidden * int(per_expert.sum()) if verb == DISPATCH else 0
    found: Features = {"outputs": outputs, "rows": work.num_tokens * row}
    for link in LINKS:
        there = per_expert[places == link]
        found[f"choices.{link}"] = int(there.sum())
        found[f"rows.{link}"] = int(there.sum()) * row
        found[f"parts.{link}"] = int(there.sum()) * (1 if verb == DISPATCH else -(-row // STAGE_BYTES))
        found[f"experts.{link}"] = len(there)
        found[f"chosen.{link}"] = int((there > 0).sum())
    return found


def _normal(work: Work, verb: str, rank: int) -> Features:
    routes = work.routes(rank)
    node, local = divmod(rank, work.num_nvl_peers)
    by_node = routes.reshape(work.num_tokens, work.num_nodes, work.num_nvl_peers)
    other_nodes = np.delete(by_node.any(axis=2), node, axis=1)  # the rank with the same place in the node gets them
    others = np.delete(by_node, local, axis=2)  # and passes them on over NVLink
    chunks = work.nvl_chunks[VERBS.index(verb)], work.rdma_chunks[VERBS.index(verb)]
    row, values = row_bytes(work, verb), value_bytes(work, verb)
    found: Features = {"values": work.num_tokens * values, "rows.node": int(by_node[:, node].any(axis=1).sum()) * row}
    for link, to, chunk in ((NVLINK, others, chunks[0]), (NETWORK, other_nodes, chunks[1])):
        pairs = to.reshape(work.num_tokens, int(np.prod(to.shape[1:])))
        found[f"pairs.{link}"] = int(pairs.sum())
        found[f"rows.{link}"] = int(pairs.sum()) * row
        found[f"parts.{link}"] = int(pairs.sum()) * -(-row // STAGE_BYTES)
        found[f"values.{link}"] = int(pairs.sum()) * values
        found[f"chunks.{link}"] = _num_chunks(pairs, work.num_channels, chunk)
        found[f"rings.{link}"] = pairs.shape[1] * work.num_channels
    found[f"nodes.{NETWORK}"] = work.num_nodes - 1
    found[f"pairs.{HOME}"] = int(by_node[:, :, local].sum())
    found[f"rows.{HOME}"] = found[f"pairs.{HOME}"] * row
    found[f"values.{HOME}"] = found[f"pairs.{HOME}"] * values
    return found


def row_bytes(work: Work, verb: str) -> int:
    """What a token takes on its way: with a handle there is no top-k, and combine sends no notes."""
    num_scales = work.hidden // 128 if verb == DISPATCH and work.use_fp8 else 0
    num_src_idx = num_meta_words(work.num_nodes) if verb == DISPATCH and work.mode == INTERNODE else 0
    values = value_bytes(work, verb)
    return values + header_bytes(RingShape(work.num_ranks, 1, 1, values, 0, num_scales, num_src_idx))


def value_bytes(work: Work, verb: str) -> int:
    return work.hidden if verb == DISPATCH and work.use_fp8 else 2 * work.hidden


def _num_chunks(pairs: np.ndarray, num_channels: int, chunk: int) -> int:
    ranges = [channel_task_range(len(pairs), num_channels, channel) for channel in range(num_channels)]
    return sum(int((-(-pairs[begin:end].sum(axis=0) // chunk)).sum()) for begin, end in ranges)
