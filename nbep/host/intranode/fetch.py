"""What combines share whose ranks fetch: rows are laid out, unless they lie where peers can read them, and offered.

lay_out_rows, if x or topk_weights lie elsewhere --> offer_rows: meet the others --> fetch --> meet the others
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.intranode.offer_rows import (
    Begins,
    LayPlaces,
    LaySizes,
    lay_out_rows,
    lay_out_smem_bytes,
    offer_rows,
)
from nbep.device.kernels.parts.calls import Call
from nbep.device.kernels.parts.fetched_sums import FetchShape, OfferCells
from nbep.device.kernels.parts.staged_sums import sums_smem_bytes
from nbep.device.protocols.peers import Peers
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.block_sizes import block_sizes
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node
from nbep.host.target.base import LATER, Kernel, PreparedLaunch


class Where(NamedTuple):
    """Where a combine finds what it fetches.

    peers: of the buffers, which have the cells; of_rows: of the memories of rows, if those are others; places: of rows
    that are laid out
    """

    peers: Peers
    of_rows: tuple[Peers, ...]
    cells: OfferCells
    places: LayPlaces


class Rows(NamedTuple):
    """Where x and topk_weights begin in the memory that peers map, in bytes; negative if they lie elsewhere.

    topk_weights: 0 if there are none
    """

    x: int
    topk_weights: int
    num_rows: int


class Fetch(NamedTuple):
    """The launches. places: of rows that are laid out"""

    lay_out: PreparedLaunch
    offer: PreparedLaunch
    fetch: PreparedLaunch
    leave: PreparedLaunch
    places: LayPlaces

    def launch(self, memory: Node, prefix: Any, rows: Rows, outputs: Any, inputs: Any, keep: tuple[Any, ...]) -> None:
        """outputs, inputs: arguments of `fetch`, in which x and topk_weights come first"""
        x, topk_weights = inputs[:2]
        if rows.x < 0 or rows.topk_weights < 0:
            away = x if rows.x < 0 else 0, topk_weights if rows.topk_weights < 0 else 0
            self.lay_out.launch(memory.stream, (*away, prefix), keep, (rows.num_rows,))
        of_x = rows.x if rows.x >= 0 else self.places.x
        of_weights = rows.topk_weights if rows.topk_weights >= 0 else self.places.topk_weights
        self.offer.launch(memory.stream, (prefix,), keep, (of_x // VEC_BYTES, of_weights // VEC_BYTES, rows.num_rows))
        self.fetch.launch(memory.stream, (*outputs, *inputs), keep)
        self.leave.launch(memory.stream)


def prepare_fetch(
    memory: Node, kernel: Kernel, grid: tuple[int, int], where: Where, shape: FetchShape, sizes: NamedTuple, call: Call
) -> Fetch:
    """grid: blocks of the kernels that move rows, and threads of a block"""
    runtime, bounds, (peers, of_rows, cells, places) = memory.runtime, memory.bounds, where
    has_tma, threads = runtime.has_tma, grid[1]
    laid = places, (*of_rows, peers)[0], cells, LaySizes(shape.hidden_bytes, shape.num_topk, LATER)
    meeting = Begins(LATER, LATER, LATER), peers, bounds, cells, call
    last = peers, *of_rows, bounds, cells, shape, sizes
    return Fetch(
        runtime.prepare(lay_out_rows, *grid, lay_out_smem_bytes(threads, has_tma), *laid),
        runtime.prepare(memory.kernel(offer_rows), 1, block_sizes(runtime).notify, 0, *meeting),
        runtime.prepare(kernel, *grid, sums_smem_bytes(threads, has_tma), *last),
        prepare_reset(memory, peers, 0, call),
        places,
    )
