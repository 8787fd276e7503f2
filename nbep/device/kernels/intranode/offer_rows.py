"""Before a combine that fetches: lay out the rows where peers map them, if they lie elsewhere, and offer them.

 lay_out_rows   x[i], topk_weights[i] --warp--> the same row there, unless it came from this rank, which reads its own
 offer_rows     rank d: offers[d] at rank s = where its x and topk_weights begin, in 16 bytes; the first row from s

 cell                     written by     with                   read by           with
 x there (1)              a warp         bulk copy, or st_na    (fetched_sums)    -
 topk_weights there (1)   a warp         st_na                  (fetched_sums)    -
 stage of a warp          copy engine    bulk copy              copy engine       after full
 offers[d], at s          rank d (1)     st_weak, barrier       (fetched_sums)    -
 next_token               thread 0       st_weak 0              (fetched_sums)    -

 (1) All ranks have met behind the last combine that has read them.

Source: none; DeepEP's combine pushes
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.kernels.parts.fetched_sums import OfferCells, first_row, offer_cell
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, SUM_ROWS
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.protocols.waits import report_fault
from nbep.device.types import I32, I64, In


class Laid(NamedTuple):
    """x and topk_weights are absent (0) if they lie there already, topk_weights also if there are none."""

    x: In  # [num_rows, hidden_bytes]
    topk_weights: In  # [num_rows, num_topk] f32
    prefix: In  # [...] s32: see OfferCells


class LayPlaces(NamedTuple):
    """Where the rows and their weights go, in bytes from where the memory begins that peers map."""

    x: I64
    topk_weights: I64


class LaySizes(NamedTuple):
    hidden_bytes: I32
    num_topk: I32
    num_rows: I32


def lay_out_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: where there are bulk copies, a stage for each warp."""
    return STAGE_STRIDE * (num_threads // 32) if has_tma else 0


@device_function
def lay_out_row(inputs, places, sizes, row, stage, parity, lane):
    """One row; a warp. Returns the parity of the next copy."""
    if inputs.topk_weights != 0 and lane < sizes.num_topk:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, ptx.s64(row), lane, sizes.num_topk))
        ptx.st_na_f32(matrix_cell(places.topk_weights, ptx.s64(row), lane, sizes.num_topk), weight)
    if inputs.x != 0:
        offset = ptx.s64(row) * sizes.hidden_bytes
        copied = Row(inputs.x + offset, sizes.hidden_bytes, 0)
        begin_copy(copied, stage, lane)
        parity = end_copy(ptx.ld_nc_v4, places.x + offset, copied, stage, parity, lane)
    return parity


@kernel(max_threads=768)
def lay_out_rows(inputs: Laid, places: LayPlaces, of_rows: Peers, cells: OfferCells, sizes: LaySizes):
    """Grid: any. Block: a multiple of 32. Shared memory: `lay_out_smem_bytes`. of_rows: the memories"""
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    stage = open_stage(ptx.smem_base(), warp, lane)
    memory = buffer_of(of_rows, of_rows.rank)
    there = LayPlaces(memory + places.x, memory + places.topk_weights)
    own_begin = first_row(inputs.prefix, cells, of_rows.rank)
    own_end = first_row(inputs.prefix, cells, of_rows.rank + 1)
    num_rows = min(sizes.num_rows, first_row(inputs.prefix, cells, of_rows.num_ranks))
    parity = 0
    row = ptx.block_idx() + ptx.grid_dim() * warp
    while row < num_rows:
        if not own_begin <= row < own_end:
            parity = lay_out_row(inputs, there, sizes, row, stage, parity, lane)
        row += ptx.grid_dim() * (ptx.block_dim() // 32)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


class Offered(NamedTuple):
    """Of the handle."""

    prefix: In  # [...] s32: see OfferCells


class Begins(NamedTuple):
    """Where x and topk_weights begin in the memory that peers map, in 16 bytes; how many rows x has."""

    x: I32
    topk_weights: I32
    num_rows: I32


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
    peer = ptx.thread_idx()
    if peer < peers.num_ranks:
        cell = buffer_of(peers, peer) + offer_cell(cells, peers.rank)
        ptx.st_weak_s32(cell, begins.x)
        ptx.st_weak_s32(cell + 4, begins.topk_weights)
        ptx.st_weak_s32(cell + 8, first_row(inputs.prefix, cells, peer))
    meet_block(peers, bounds, call)
