"""What the arrays of a handle say, against each other; where the host can read them.

A handle's arrays are the caller's to overwrite, and a tuple may come from anywhere. Kernels take counts and row numbers
out of them, and would read and write where those lead.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from nbep.device.layout.internode import bits_shift, bits_word
from nbep.device.protocols.channels import channel_task_range
from nbep.host.arguments import refuse
from nbep.host.elastic.handle import ARRAYS, EPHandle
from nbep.host.handles import DispatchHandle, InternodeHandle
from nbep.host.target.base import Array


def membership(name: str, is_token_in_rank: np.ndarray) -> None:
    """Raises: ValueError if a byte is neither 0 nor 1: kernels add them up, and NumPy takes any other for True"""
    wrong = is_token_in_rank.view(np.uint8) > 1
    if wrong.any():
        token, rank = (int(i[0]) for i in wrong.nonzero())
        got = f"a bool of the byte {is_token_in_rank.view(np.uint8)[token, rank]}"
        refuse(f"{name}[{token}, {rank}]", got, "0 or 1: copy it with `!= 0`")


def intranode(handle: DispatchHandle, rank: int) -> None:
    """Raises: ValueError if arrays contradict each other"""
    is_token_in_rank, prefix = handle.is_token_in_rank, handle.rank_prefix_matrix
    membership("handle.is_token_in_rank", is_token_in_rank)
    num_channels = handle.channel_prefix_matrix.shape[1]
    _same(
        "handle.channel_prefix_matrix",
        handle.channel_prefix_matrix,
        _channel_prefixes(is_token_in_rank, num_channels),
        "as handle.is_token_in_rank says",
    )
    _heads("handle.send_head", handle.send_head, is_token_in_rank, _channels(len(is_token_in_rank), num_channels))
    _ascending("handle.rank_prefix_matrix", prefix, axis=0)
    counts = np.diff(prefix, axis=0, prepend=0)
    _same(
        "handle.rank_prefix_matrix",
        counts[rank],
        is_token_in_rank.sum(axis=0),
        f"in row {rank} what handle.is_token_in_rank says, added to the row before",
    )
    received = handle.recv_channel_prefix_matrix
    _ascending("handle.recv_channel_prefix_matrix", received, axis=1)
    _at_most("handle.recv_channel_prefix_matrix", received, counts[:, rank][:, None], "tokens of a rank")
    num_rows = int(prefix[-1, rank])
    if num_rows > len(handle.recv_src_idx):
        allowed = f"at least {num_rows}, the tokens that handle.rank_prefix_matrix brings to rank {rank}"
        refuse("handle.recv_src_idx", f"{len(handle.recv_src_idx)} rows", allowed)


def internode(handle: InternodeHandle, rank: int, num_nvl_peers: int) -> None:
    """Raises: ValueError if arrays contradict each other"""
    is_token_in_rank, num_channels = handle.is_token_in_rank, handle.num_channels
    membership("handle.is_token_in_rank", is_token_in_rank)
    num_tokens, num_ranks = is_token_in_rank.shape
    in_node = is_token_in_rank.reshape(num_tokens, num_ranks // num_nvl_peers, num_nvl_peers).any(axis=2)
    for name, goes in (("rdma_channel_prefix_matrix", in_node), ("gbl_channel_prefix_matrix", is_token_in_rank)):
        wanted = _channel_prefixes(goes, num_channels)
        _same(f"handle.{name}", getattr(handle, name), wanted, "as handle.is_token_in_rank says")
    _heads("handle.send_rdma_head", handle.send_rdma_head, in_node, _channels(num_tokens, num_channels))
    for what, rows in (("rdma", handle.send_nvl_head), ("gbl", handle.recv_src_meta)):
        sums = getattr(handle, f"recv_{what}_rank_prefix_sum")
        _ascending(f"handle.recv_{what}_rank_prefix_sum", sums, axis=0)
        _at_most(f"handle.recv_{what}_rank_prefix_sum", sums, len(rows), "rows")
    counts = np.diff(handle.recv_rdma_rank_prefix_sum, prepend=0)
    name, received = "handle.recv_rdma_channel_prefix_matrix", handle.recv_rdma_channel_prefix_matrix
    _ascending(name, received, axis=1)
    _same(name, received[:, -1], counts, "in its last column what handle.recv_rdma_rank_prefix_sum says")
    _ascending("handle.recv_gbl_channel_prefix_matrix", handle.recv_gbl_channel_prefix_matrix, axis=1)
    ends = handle.recv_gbl_rank_prefix_sum[:, None]
    _at_most("handle.recv_gbl_channel_prefix_matrix", handle.recv_gbl_channel_prefix_matrix, ends, "rows up to a rank")
    _source_meta(handle, rank, num_nvl_peers)
    # What passed through this rank: those of each node, by channel, and where to. The rows behind are of no token.
    num_rows = int(handle.recv_rdma_rank_prefix_sum[-1])
    heads = handle.send_nvl_head[:num_rows]
    firsts = np.concatenate([[0], handle.recv_rdma_rank_prefix_sum[:-1]])
    bounds = np.unique(np.concatenate([[0], (firsts[:, None] + received).ravel()]))
    _heads("handle.send_nvl_head", heads, heads >= 0, list(pairwise(bounds.tolist())))
    _passed_on(handle, rank, num_nvl_peers, firsts)


def elastic(handle: EPHandle, contents: Callable[[Array], np.ndarray], rows_may_differ: bool) -> int:
    """How many rows of x a combine takes. rows_may_differ: the rows of choices in recv_src_metadata may be rewritten

    Raises: ValueError if an array is not as dispatch has made it, where that is known
    """
    found = {name: contents(array) for name, array in zip(ARRAYS, handle.arrays, strict=True)}
    for name, made in handle.made.items():
        now = found[name]
        if name == "recv_src_metadata" and rows_may_differ:
            now, made = now[:, :2], made[:, :2]
        if now.shape != made.shape:
            refuse(f"handle.{name}", f"{list(now.shape)}", f"{list(made.shape)}, as dispatch made it")
        for at in zip(*(now != made).nonzero(), strict=True):
            where = ", ".join(map(str, at))
            refuse(f"handle.{name}[{where}]", now[at], f"{made[at]}, as dispatch made it")
    if handle.do_expand:
        return int(found["recv_src_metadata"][:, 2:].max(initial=-1)) + 1
    return int(found["psum_of_ranks"][-1])


def _passed_on(handle: InternodeHandle, rank: int, num_nvl_peers: int, firsts: np.ndarray) -> None:
    """What the rest of a handle says of the tokens that passed through its rank: each has gone to a place; those of the
    rank itself where is_token_in_rank says; those that it got where recv_src_meta says, as many of each channel.

    Where tokens of another node went that came to other places alone, nothing here says.
    """
    name, (node, place) = "handle.send_nvl_head", divmod(rank, num_nvl_peers)
    ends, starts = handle.recv_rdma_rank_prefix_sum, handle.recv_gbl_channel_prefix_matrix
    goes = handle.send_nvl_head[: ends[-1]] >= 0
    astray = ~goes.any(axis=1)
    if astray.any():
        refuse(
            f"{name}[{int(astray.nonzero()[0][0])}]", "a token for no place", "for one at least, as dispatch made it"
        )
    first = node * num_nvl_peers
    own = handle.is_token_in_rank[:, first : first + num_nvl_peers]
    _same(name, goes[firsts[node] : ends[node]], own[own.any(axis=1)], f"for tokens of rank {rank} itself")
    last_rows = np.concatenate([[0], handle.recv_gbl_rank_prefix_sum])
    for source in range(len(ends)):
        of_source = goes[firsts[source] : ends[source]]
        here = of_source[:, place]
        from_rank = source * num_nvl_peers + place
        meta = handle.recv_src_meta[last_rows[from_rank] : last_rows[from_rank + 1]]
        bits = meta[:, bits_word(node)] >> bits_shift(node)
        destinations = bits[:, None] >> np.arange(num_nvl_peers) & 1 != 0
        _same(name, of_source[here], destinations, f"for what came from rank {from_rank}, as handle.recv_src_meta says")
        before = np.concatenate([[0], handle.recv_rdma_channel_prefix_matrix[source, :-1]])
        counts = np.concatenate([[0], np.cumsum(here)])[before]
        wanted = starts[from_rank] - last_rows[from_rank]
        _same(name, counts, wanted, f"the tokens of rank {from_rank} before each channel")


def _source_meta(handle: InternodeHandle, rank: int, num_nvl_peers: int) -> None:
    """Rows come by source, and of a source in the order of its tokens; each one names its node, and this rank's bit."""
    meta, ends = handle.recv_src_meta, handle.recv_gbl_rank_prefix_sum
    sources = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    tokens, nodes = meta[: len(sources), 0], meta[: len(sources), 1]
    node, place = divmod(rank, num_nvl_peers)
    bits = meta[: len(sources), bits_word(node)] >> (bits_shift(node) + place)
    before = np.where(sources == np.roll(sources, 1), np.roll(tokens, 1), -1)
    before[:1] = -1
    wrong = (tokens <= before) | (nodes != sources // num_nvl_peers) | (bits & 1 == 0)
    if wrong.any():
        row = int(wrong.nonzero()[0][0])
        allowed = f"as dispatch made it: a later token of rank {sources[row]} than the row before, and for rank {rank}"
        refuse(f"handle.recv_src_meta[{row}]", meta[row].tolist(), allowed)


def _channels(num_tokens: int, num_channels: int) -> list[tuple[int, int]]:
    """The tokens [begin, end) of each channel."""
    return [channel_task_range(num_tokens, num_channels, channel) for channel in range(num_channels)]


def _channel_prefixes(goes: np.ndarray, num_channels: int) -> np.ndarray:
    """[destinations, num_channels]: tokens of channels 0 to c that go to each; goes [num_tokens, destinations]"""
    counts = [goes[begin:end].sum(axis=0) for begin, end in _channels(len(goes), num_channels)]
    return np.cumsum(counts, axis=0).T


def _heads(name: str, heads: np.ndarray, goes: np.ndarray, ranges: list[tuple[int, int]]) -> None:
    """Those of tokens that go somewhere count up from 0 in each range; the others are negative, see combine."""
    for begin, end in ranges:
        here = goes[begin:end]
        wrong = np.where(here, heads[begin:end] != np.cumsum(here, axis=0) - 1, heads[begin:end] >= 0)
        if wrong.any():
            token, dst = (int(i[0]) for i in wrong.nonzero())
            got = heads[begin + token, dst]
            refuse(f"{name}[{begin + token}, {dst}]", got, "as dispatch made it: its token's place in the ring, or -1")


def _same(name: str, got: np.ndarray, wanted: np.ndarray, why: str) -> None:
    if got.shape != wanted.shape or (got != wanted).any():
        refuse(name, got.tolist(), f"{wanted.tolist()}, {why}")


def _ascending(name: str, values: np.ndarray, axis: int) -> None:
    if (np.diff(values, axis=axis, prepend=0) < 0).any():
        refuse(name, values.tolist(), "sums, from 0 on, that never get less")


def _at_most(name: str, values: np.ndarray, most: np.ndarray | int, what: str) -> None:
    if (values > most).any():
        refuse(
            name, values.tolist(), f"at most {most.ravel().tolist() if isinstance(most, np.ndarray) else most} {what}"
        )
