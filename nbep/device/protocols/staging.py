"""The stage of a warp: its room in shared memory, which the copy engine (TMA) fills and empties.

 cell            written by    with                        read by   with
 full (mbarrier) copy engine   complete_tx                 lane 0    mbarrier_try_wait_parity
 stage           copy engine   tma_load_1d                 engine    tma_store_1d, after full
                                                           lanes     ld_shared, after full
 a stage is loaded again after tma_store_wait_read_all: the store has read it by then

A warp has one stage and one mbarrier. Lane 0 drives the engine; the other lanes wait for it at a syncwarp. Copies of
whole rows are in copies.py.

Source: DeepEP csrc/kernels/intranode.cu, dispatch ("TMA stuffs"); PTX ISA, cp.async.bulk, fence.proxy.async
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

VEC_BYTES = 16
WARP_BYTES = 32 * VEC_BYTES
STAGE_BYTES = 8064  # what one bulk copy moves; with its mbarrier a stage takes STAGE_STRIDE bytes
MBARRIER_BYTES = 128
STAGE_STRIDE = STAGE_BYTES + MBARRIER_BYTES


class Stage(NamedTuple):
    """The shared addresses of one warp's stage, and how many bytes it holds."""

    data: int
    full: int
    room: int


@device_function
def open_stage(stages, warp, lane, width=1):
    """The stage of a warp; stages is the address of warp 0's. Its whole warp calls this once, before any copy.

    width: how many warps' places it takes: one, or more where some warps need none
    Behind the syncwarp any lane may wait for the mbarrier. The two fences are for cards and versions of PTX that do not
    say how the engine accesses it: see records/shared_cells.md.
    """
    data = stages + STAGE_STRIDE * width * warp
    room = STAGE_STRIDE * width - MBARRIER_BYTES
    full = data + room
    if ptx.has_tma():
        if lane == 0:
            ptx.mbarrier_init(full, 1)
            ptx.fence_mbarrier_init()
            ptx.fence_proxy_async_shared()
        ptx.syncwarp(ptx.FULL_MASK)
    return Stage(data, full, room)


@device_function
def load_stage(data, src, num_bytes, stage):
    """Start to fill the stage from address data on, as soon as the last store has read it."""
    ptx.tma_store_wait_read_all()
    ptx.tma_load_1d(data, src, num_bytes, stage.full)
    ptx.mbarrier_arrive_expect_tx(stage.full, num_bytes)


@device_function
def begin_fill(src, num_bytes, stage, lane):
    """Start to copy what fits from global memory into the stage, when its last stores have read it; a warp."""
    if lane == 0:
        load_stage(stage.data, src, min(num_bytes, stage.room), stage)


@device_function
def wait_filled(stage, parity):
    """Wait until the stage is full; a warp. Every lane may read it then. Returns the parity of the next fill."""
    while not ptx.mbarrier_try_wait_parity(stage.full, parity):
        pass
    return parity ^ 1


@device_function
def empty_stage(dst, num_bytes, stage, lane):
    """Start to copy the stage, up to num_bytes of it, to global memory; it may go to several places. A warp."""
    if lane == 0:
        ptx.tma_store_1d(dst, stage.data, min(num_bytes, stage.room))


@device_function
def drain_stage(lane):
    """Close the copies that empty_stage has started; load_stage waits until they have read the stage. A warp."""
    if lane == 0:
        ptx.tma_store_commit()
    ptx.syncwarp(ptx.FULL_MASK)
