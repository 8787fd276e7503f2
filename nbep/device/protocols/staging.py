"""Copies of rows through shared memory by the copy engine (TMA), one stage and one mbarrier per warp.

 cell            written by    with                        read by   with
 full (mbarrier) copy engine   complete_tx                 lane 0    mbarrier_try_wait_parity
 stage           copy engine   tma_load_1d                 engine    tma_store_1d, after full
 a stage is loaded again after tma_store_wait_read_all: the store has read it by then

Lane 0 drives the engine; the other lanes wait at a syncwarp of the caller.

Source: DeepEP csrc/kernels/intranode.cu, dispatch ("TMA stuffs"); PTX ISA, cp.async.bulk, fence.proxy.async
"""

from typing import NamedTuple

from nbep.device.jit import device_function
from nbep.device.primitives import (
    FULL_MASK,
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    smem_base,
    syncwarp,
    tma_load_1d,
    tma_store_1d,
    tma_store_commit,
    tma_store_wait_read_all,
)

STAGE_BYTES = 8064  # what one bulk copy moves; with its mbarrier a stage takes STAGE_STRIDE bytes
STAGE_STRIDE = STAGE_BYTES + 128


class Stage(NamedTuple):
    """The shared addresses of one warp's stage."""

    data: int
    full: int


@device_function
def stage_of(warp):
    """The stage of a warp, at the start of the block's dynamic shared memory."""
    data = smem_base() + STAGE_STRIDE * warp
    return Stage(data, data + STAGE_BYTES)


@device_function
def open_stage(stage, lane):
    """Set up a stage. Its whole warp calls this once, before any copy."""
    if lane == 0:
        mbarrier_init(stage.full, 1)
        fence_mbarrier_init()
        fence_proxy_async_shared()  # the engine sees the initialised mbarrier
    syncwarp(FULL_MASK)


@device_function
def copy_through_stage(dst, src, num_bytes, stage, parity):
    """Lane 0: copy a row from global to global memory. Returns the parity for the next copy.

    The last store may still be reading the stage on return; `tma_store_wait_all` ends all stores.
    """
    offset = 0
    while offset < num_bytes:
        part = min(num_bytes - offset, STAGE_BYTES)
        tma_store_wait_read_all()
        tma_load_1d(stage.data, src + offset, part, stage.full)
        mbarrier_arrive_expect_tx(stage.full, part)
        while not mbarrier_try_wait_parity(stage.full, parity):
            pass
        parity ^= 1
        tma_store_1d(dst + offset, stage.data, part)
        tma_store_commit()
        offset += part
    return parity
