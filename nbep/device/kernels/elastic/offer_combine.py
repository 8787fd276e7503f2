"""Offer combine: each rank tells the others where the rows lie that it has for them, and all ranks meet. Before
fetch_combine.

 rank d: offers[d] at rank s = where its x begins in its shared rows; the first of them that came from s

 cell                written by    with               read by          with
 offers[d], at s     rank d (1)    st_weak, barrier   (fetch_combine)  -
 next_token          thread 0      st_weak 0          (fetch_combine)  -

 (1) Rank s has left the fetch_combine before: all ranks have met behind it.

Source: none; DeepEP's combine pushes
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.layout.elastic import NEXT_TOKEN, offer_cell
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32, In


class ElasticOffer(NamedTuple):
    """Of the handle."""

    psum_of_ranks: In  # [num_ranks] s32, inclusive


@device_function
def offer_rows(inputs, begin, peers, peer):
    """Tell a peer where the rows are that came from it; one thread."""
    cell = buffer_of(peers, peer) + offer_cell(peers.rank)
    ptx.st_weak_s32(cell, begin)
    ptx.st_weak_s32(cell + 4, ptx.ld_nc_s32(inputs.psum_of_ranks + 4 * (peer - 1)) if peer > 0 else 0)


@kernel(max_threads=128)
def elastic_offer_combine(inputs: ElasticOffer, begin: I32, peers: Peers, bounds: Bounds, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32. begin: of x in the shared rows, in 16 bytes"""
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(buffer_of(peers, peers.rank) + NEXT_TOKEN, 0)
    if ptx.thread_idx() < peers.num_ranks:
        offer_rows(inputs, begin, peers, ptx.thread_idx())
    meet_block(peers, bounds, call)
