"""Offer rows: each rank says where the rows lie that it has for the others, and all ranks meet. Before a combine that
fetches.

 rank d: offers[d] at rank s = where its x and topk_weights begin, in 16 bytes; the first row that came from s

 cell                written by    with               read by            with
 offers[d], at s     rank d (1)    st_weak, barrier   (fetched_sums)     -
 next_token          thread 0      st_weak 0          (fetched_sums)     -

 (1) Rank s has left the combine before: all ranks have met behind it.

Source: none; DeepEP's combine pushes
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.kernels.parts.fetched_sums import OfferCells, first_row, offer_cell
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, SUM_ROWS
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import report_fault
from nbep.device.types import I32, In


class Offered(NamedTuple):
    """Of the handle."""

    prefix: In  # [...] s32: see OfferCells


class Begins(NamedTuple):
    """Where x and topk_weights begin in the memory that peers map, in 16 bytes; how many rows x has."""

    x: I32
    topk_weights: I32
    num_rows: I32


@device_function
def offer_rows_to(inputs, begins, peers, cells, peer):
    """Tell a peer where the rows are that came from it; one thread."""
    cell = buffer_of(peers, peer) + offer_cell(cells, peers.rank)
    ptx.st_weak_s32(cell, begins.x)
    ptx.st_weak_s32(cell + 4, begins.topk_weights)
    ptx.st_weak_s32(cell + 8, first_row(inputs.prefix, cells, peer))


@kernel(max_threads=128)
def offer_rows(inputs: Offered, begins: Begins, peers: Peers, bounds: Bounds, cells: OfferCells, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32."""
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(buffer_of(peers, peers.rank) + cells.next_token, 0)
    num_needed = first_row(inputs.prefix, cells, peers.num_ranks)
    if num_needed > begins.num_rows:
        if ptx.thread_idx() == 0:
            report_fault(bounds, DISPATCH_RECEIVER_ROWS, peers.rank, SUM_ROWS, num_needed, begins.num_rows)
        return  # the others must not read behind x
    if ptx.thread_idx() < peers.num_ranks:
        offer_rows_to(inputs, begins, peers, cells, ptx.thread_idx())
    meet_block(peers, bounds, call)
