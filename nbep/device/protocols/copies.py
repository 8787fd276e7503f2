"""Copies of rows from global to global memory by one warp: through its stage, or by its lanes in 16-byte vectors.

 cell    written by                with             read by       with
 stage   copy engine               tma_load_1d      copy engine   tma_store_1d, after its mbarrier
         the lanes: its front      st_shared        copy engine   tma_store_1d, after a proxy fence and syncwarp

Where there is no engine the lanes copy. Each has up to UNROLL loads in flight before its first store: 24 warps of a
block then keep 86 KB on the way, enough to cover the latency of memory at the rate of a GPU's share of the links. A row
of 7168 values is four such groups in bf16, two in FP8.

Source: DeepEP csrc/kernels/utils.cuh, UNROLLED_WARP_COPY
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES, load_stage, wait_filled

UNROLL = 7  # vectors that a lane has in flight; the code below spells them out
REST_UNROLL = 4  # and those at the end of a row


class Row(NamedTuple):
    """A row that is to be copied; front: bytes to leave free before it in the stage, a multiple of 16."""

    src: int
    num_bytes: int
    front: int


@device_function
def copy_row(load, dst, src, num_bytes, lane):
    """Copy a row. Addresses and num_bytes are multiples of 16.

    load is ld_nc_v4 if the row is not written while the kernel runs, ld_na_v4 if the block has acquired it.

    The vectors of a whole group need no conditions: with them ptxas puts the first stores before the last loads. The
    addresses move: with an offset added to those of the row, LLVM keeps one sum for each vector, in two registers.
    """
    src += lane * VEC_BYTES
    dst += lane * VEC_BYTES
    left = num_bytes - lane * VEC_BYTES
    while left > (UNROLL - 1) * WARP_BYTES:
        a = load(src)
        b = load(src + WARP_BYTES)
        c = load(src + 2 * WARP_BYTES)
        d = load(src + 3 * WARP_BYTES)
        e = load(src + 4 * WARP_BYTES)
        f = load(src + 5 * WARP_BYTES)
        g = load(src + 6 * WARP_BYTES)
        ptx.st_na_v4(dst, a)
        ptx.st_na_v4(dst + WARP_BYTES, b)
        ptx.st_na_v4(dst + 2 * WARP_BYTES, c)
        ptx.st_na_v4(dst + 3 * WARP_BYTES, d)
        ptx.st_na_v4(dst + 4 * WARP_BYTES, e)
        ptx.st_na_v4(dst + 5 * WARP_BYTES, f)
        ptx.st_na_v4(dst + 6 * WARP_BYTES, g)
        src += UNROLL * WARP_BYTES
        dst += UNROLL * WARP_BYTES
        left -= UNROLL * WARP_BYTES
    while left > 0:
        # A vector that is not loaded must not wait for one that is, as a copy of `a` would.
        nothing = (0, 0, 0, 0)
        a = load(src)
        b = load(src + WARP_BYTES) if left > WARP_BYTES else nothing
        c = load(src + 2 * WARP_BYTES) if left > 2 * WARP_BYTES else nothing
        d = load(src + 3 * WARP_BYTES) if left > 3 * WARP_BYTES else nothing
        ptx.st_na_v4(dst, a)
        if left > WARP_BYTES:
            ptx.st_na_v4(dst + WARP_BYTES, b)
        if left > 2 * WARP_BYTES:
            ptx.st_na_v4(dst + 2 * WARP_BYTES, c)
        if left > 3 * WARP_BYTES:
            ptx.st_na_v4(dst + 3 * WARP_BYTES, d)
        src += REST_UNROLL * WARP_BYTES
        dst += REST_UNROLL * WARP_BYTES
        left -= REST_UNROLL * WARP_BYTES


@device_function
def store_stage(dst, num_bytes, stage, parity):
    """Wait until the stage is full and start to empty it. Returns the parity of the next fill."""
    while not ptx.mbarrier_try_wait_parity(stage.full, parity):
        pass
    ptx.tma_store_1d(dst, stage.data, num_bytes)
    ptx.tma_store_commit()
    return parity ^ 1


@device_function
def begin_copy(row, stage, lane):
    """Start to copy a row from global to global memory; a warp. Other work may follow before `end_copy`.

    The lanes may fill its front after a syncwarp; then they need a proxy fence and another syncwarp before `end_copy`.
    """
    if ptx.has_tma():
        if lane == 0:
            load_stage(stage.data + row.front, row.src, min(row.num_bytes, stage.room - row.front), stage)


@device_function
def end_fill(load, row, stage, parity, lane):
    """Wait until what begin_copy has started to load is in the stage, where every lane may read it; a warp.

    Without a copy engine the warp loads it here. Returns the parity of the next fill.
    """
    if ptx.has_tma():
        parity = wait_filled(stage, parity)
    else:
        for at in range(lane * VEC_BYTES, min(row.num_bytes, stage.room - row.front), WARP_BYTES):
            ptx.st_shared_v4(stage.data + row.front + at, load(row.src + at))
    ptx.syncwarp(ptx.FULL_MASK)
    return parity


@device_function
def end_copy(load, dst, row, stage, parity, lane):
    """Go on with the copy that begin_copy started; the same warp. Returns the parity for the next copy.

    What stands in front of the row in the stage comes to stand in front of dst. The last store may still be reading the
    stage on return; `tma_store_wait_all` ends all stores. Without a copy engine `copy_row` copies the row with `load`,
    and there is no front.
    """
    if ptx.has_tma():
        if lane == 0:
            offset = min(row.num_bytes, stage.room - row.front)
            parity = store_stage(dst - row.front, row.front + offset, stage, parity)
            while offset < row.num_bytes:
                part = min(row.num_bytes - offset, stage.room)
                load_stage(stage.data, row.src + offset, part, stage)
                parity = store_stage(dst + offset, part, stage, parity)
                offset += part
        ptx.syncwarp(ptx.FULL_MASK)
    else:
        copy_row(load, dst, row.src, row.num_bytes, lane)
    return parity
