"""Network push: every rank sends messages to the next one, through its network, and waits for those of the one before.

 rank r: stage --keep_message, put_nbi_warp--> message[w, i] of rank r + 1      each warp w its own, i = 0, 1, ...
               --amo_add, when they are quiet-> arrived[q] of rank r + 1        each warp, on its queue q
         acknowledged of rank r - 1 <--amo_add-- when all has arrived here

 cell           written by            with           read by            with
 stage          its warp              st_shared_v4   the network        after a proxy fence and syncwarp
 message        warps of rank r - 1   put_nbi_warp   (never: only the time counts)
 arrived[q]     warps of rank r - 1   amo_add        block 0, a lane    ld_acquire_sys
 acknowledged   block 0 of rank r + 1 amo_add        block 0, lane 0    ld_acquire_sys

A message that is longer than a stage goes in parts, each with a put of its own. A launch ends when what this rank has
sent is there, and what it waits for has come. So nothing is on its way in between, and places are written again. The
cells only count up; `round` is how often they have been used, this launch included.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.network.seam import Network, Place, amo_add, further, keep_message, own_ptr, put_nbi_warp, quiet
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES
from nbep.device.protocols.waits import Bounds, Waiter, site, wait_or_report
from nbep.device.types import I32, I64

NETWORK_PUSH = site(19, "network_push", "arrived", "the neighbour's messages, or its word that all have arrived")

STAGE_BYTES = 32 << 10  # of a warp
MAX_WARPS = 4  # of a block
MAX_QUEUES = 32
CELL_BYTES = 128  # each in a line of its own
CELLS_BYTES = CELL_BYTES * (MAX_QUEUES + 1)


class PushSizes(NamedTuple):
    """The buffer: messages as they come, messages as they leave, each [warps, num_messages, num_bytes]; cells."""

    num_bytes: I64  # of a message, a multiple of 16
    num_messages: I32  # of each warp
    num_queues: I32
    round: I32


def messages_bytes(num_warps, sizes):
    """Of all the messages of a rank."""
    return num_warps * sizes.num_messages * sizes.num_bytes


def buffer_bytes(num_warps, sizes):
    """What a rank's buffer has to have."""
    return 2 * messages_bytes(num_warps, sizes) + CELLS_BYTES


def smem_bytes(num_threads, num_bytes):
    """Dynamic shared memory of a block."""
    return num_threads // 32 * min(num_bytes, STAGE_BYTES)


@device_function
def cell_of(sizes, number):
    """Where a cell is: that of a queue, or `acknowledged` behind them."""
    num_warps = ptx.grid_dim() * (ptx.block_dim() // 32)
    return 2 * num_warps * sizes.num_messages * sizes.num_bytes + CELL_BYTES * number


@device_function
def fill_stage(stage, num_bytes, rank, warp, lane):
    """Every 16 bytes say whose they are, and where in a stage; one warp."""
    offset = lane * VEC_BYTES
    while offset < num_bytes:
        ptx.st_shared_v4(stage + offset, (rank, warp, offset, 0x5EED))
        offset += WARP_BYTES
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def push_message(network, sizes, place, stage, lane):
    """Put one message, in parts that fit into a stage; one warp."""
    done = 0
    while done < sizes.num_bytes:
        num_bytes = min(sizes.num_bytes - done, STAGE_BYTES)
        part = further(place, done)
        keep_message(network, part.src, stage, num_bytes, lane)
        put_nbi_warp(network, part, stage, num_bytes, lane)
        done += num_bytes


@device_function
def wait_neighbours(network, bounds, sizes, before, after, lane):
    """Wait until all has come here, say so, and wait until the next rank says it; one warp."""
    num_warps = ptx.grid_dim() * (ptx.block_dim() // 32)
    if lane < sizes.num_queues:
        of_queue = ptx.u32_div(num_warps + sizes.num_queues - 1 - lane, sizes.num_queues)
        wait_pushed(own_ptr(network, cell_of(sizes, lane)), sizes.round * of_queue, bounds, before, lane)
    ptx.syncwarp(ptx.FULL_MASK)
    if lane == 0:
        cell = cell_of(sizes, MAX_QUEUES)
        amo_add(network, cell, 1, before, 0, True)
        wait_pushed(own_ptr(network, cell), sizes.round, bounds, after, MAX_QUEUES)


@kernel(max_threads=32 * MAX_WARPS)
def network_push(sizes: PushSizes, network: Network, bounds: Bounds):
    """Grid: any. Block: a multiple of 32. num_queues: no more than there are warps. Shared memory: `smem_bytes`."""
    lane = ptx.thread_idx() % 32
    warp_in_block = ptx.thread_idx() // 32
    num_warps = ptx.grid_dim() * (ptx.block_dim() // 32)
    warp = ptx.block_idx() * (ptx.block_dim() // 32) + warp_in_block
    after = ptx.u32_mod(network.rank + 1, network.num_ranks)
    before = ptx.u32_mod(network.rank + network.num_ranks - 1, network.num_ranks)
    queue = ptx.u32_mod(warp, sizes.num_queues)
    stage_bytes = min(sizes.num_bytes, STAGE_BYTES)
    stage = ptx.smem_base() + warp_in_block * stage_bytes
    fill_stage(stage, stage_bytes, network.rank, warp, lane)
    dst = warp * sizes.num_messages * sizes.num_bytes
    src = dst + num_warps * sizes.num_messages * sizes.num_bytes
    for _ in range(sizes.num_messages):
        push_message(network, sizes, Place(dst, src, after, queue), stage, lane)
        dst += sizes.num_bytes
        src += sizes.num_bytes
    quiet(network, lane)
    if lane == 0:
        amo_add(network, cell_of(sizes, queue), 1, after, queue, True)
    if warp == 0:
        wait_neighbours(network, bounds, sizes, before, after, lane)


@device_function
def has_passed(seen, wanted):
    """Whether a counter that wraps is at a number or behind it."""
    return ptx.s32(seen - wanted) >= 0


@device_function
def wait_pushed(cell, wanted, bounds, peer, queue):
    """Wait until a peer has added to a cell so often: what it had put before is there."""
    waiter = Waiter(NETWORK_PUSH, peer, queue)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, has_passed, wanted, bounds, waiter)  # PAIR network-amo
