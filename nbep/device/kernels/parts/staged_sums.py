"""Sums of rows that come through shared memory: the copy engine brings a piece of each row, the warp adds them up.

 cell             written by    with                          read by       with
 full[0], full[1] copy engine   complete_tx                   the warp      mbarrier_try_wait_parity
 half 0, half 1   copy engine   tma_load_1d (1)               the warp      ld_shared, after full
 rows[i]          the warp      st_shared                     the warp      ld_shared, after syncwarp
   their bytes    see the kernel                              copy engine   tma_load_1d, after a proxy fence (2)

 (1) A half is loaded again after the proxy fence and the syncwarp behind the warp's loads from it. A warp that has
     sent from its stage before has waited for that (tma_store_wait_all).
 (2) The lanes that start the copies fence after the syncwarp that follows the acquire.

While a warp adds up one half, the engine fills the other. A load by bulk copies takes no registers, so a warp has up to
8 KB on its way; sum_rows, whose lanes load for themselves, has 4.

Source: PTX ISA, cp.async.bulk; DeepEP csrc/kernels/legacy/internode_ll.cu after v1.2.1 (the proxy fence before a
stage is free again)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.parts.sums import Listed, add_bf16x8, sum_rows
from nbep.device.protocols.reduce import to_bf16x8, zero_f32x8
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES

HALF_BYTES = 4096
SUM_STAGE_BYTES = 2 * HALF_BYTES  # of a warp
FULL_BYTES = 16  # its two mbarriers
MAX_STAGED_ROWS = 32  # of one sum
MAX_ROWS = 2 + 32  # the biases, and a row for each choice
LIST_BYTES = 8 * MAX_ROWS


class SumStage(NamedTuple):
    """What one warp adds up with: the shared addresses of its two halves, which lie together, of their mbarriers, and
    of its list of rows. phases: bit h is the parity of the next fill of half h; who waits for one returns it flipped.
    """

    data: int
    full: int
    rows: int
    phases: int


def sums_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: a list for each warp and, where there are bulk copies, a stage."""
    return num_threads // 32 * (LIST_BYTES + (SUM_STAGE_BYTES + FULL_BYTES if has_tma else 0))


@device_function
def open_sum_stage(num_warps, warp, lane):
    """The stage of a warp, in dynamic shared memory. Its whole warp calls this once, before any copy."""
    stages = ptx.smem_base()
    data = stages + SUM_STAGE_BYTES * warp
    full = stages + SUM_STAGE_BYTES * num_warps + FULL_BYTES * warp
    lists = stages + ((SUM_STAGE_BYTES + FULL_BYTES) * num_warps if ptx.has_tma() else 0)
    if ptx.has_tma():
        if lane == 0:
            ptx.mbarrier_init(full, 1)
            ptx.mbarrier_init(full + 8, 1)
            ptx.fence_mbarrier_init()
            ptx.fence_proxy_async_shared()  # the engine sees the initialised mbarriers
        ptx.syncwarp(ptx.FULL_MASK)
    return SumStage(data, full, lists + LIST_BYTES * warp, 0)


@device_function
def flipped(stage, fills):
    """The stage behind fills of some halves, a bit each."""
    return SumStage(stage.data, stage.full, stage.rows, stage.phases ^ fills)


@device_function
def wait_half(stage, half):
    """Wait until a half is full; a warp. Returns the stage, behind this fill."""
    while not ptx.mbarrier_try_wait_parity(stage.full + 8 * half, (stage.phases >> half) & 1):
        pass
    return flipped(stage, 1 << half)


@device_function
def load_piece(stage, half, number, piece, stride, lane):
    """Start to load the same bytes of each listed row, [begin, end), into a half: lane i those of row i."""
    begin, end = piece
    num_bytes = end - begin
    if lane < number:
        src = ptx.ld_shared_s64(stage.rows + 8 * lane) + begin
        ptx.tma_load_1d(stage.data + HALF_BYTES * half + stride * lane, src, num_bytes, stage.full + 8 * half)
    if lane == 0:
        ptx.mbarrier_arrive_expect_tx(stage.full + 8 * half, num_bytes * number)


@device_function
def add_pair(total, data, stride):
    """Add 16 bytes of two rows, both loaded before the first is added."""
    first = ptx.ld_shared_v4(data)
    second = ptx.ld_shared_v4(data + stride)
    return add_bf16x8(add_bf16x8(total, first), second)


@device_function
def add_quad(total, data, stride):
    """Add 16 bytes of four rows, all loaded before the first is added."""
    first = ptx.ld_shared_v4(data)
    second = ptx.ld_shared_v4(data + stride)
    third = ptx.ld_shared_v4(data + 2 * stride)
    fourth = ptx.ld_shared_v4(data + 3 * stride)
    return add_bf16x8(add_bf16x8(add_bf16x8(add_bf16x8(total, first), second), third), fourth)


@device_function
def sum_of_four(data, _, stride):
    return add_quad(zero_f32x8(), data, stride)


@device_function
def sum_of_two(data, _, stride):
    return add_pair(zero_f32x8(), data, stride)


@device_function
def sum_of_any(data, num_rows, stride):
    """The sum of 16 bytes of each row, in order. The loads of four rows go together; in a loop each would wait."""
    total = zero_f32x8()
    left = num_rows
    while left > 3:
        total = add_quad(total, data, stride)
        data += 4 * stride
        left -= 4
    if left > 1:
        total = add_pair(total, data, stride)
        data += 2 * stride
    if left & 1 != 0:
        total = add_bf16x8(total, ptx.ld_shared_v4(data))
    return total


@device_function
def store_sums(sum_of, dst, data, num_rows, left, stride):
    """Store the sums of what a lane has of a half: every 512th byte of 16, as long as there are some left."""
    while left > 0:
        ptx.st_na_v4(dst, to_bf16x8(sum_of(data, num_rows, stride)))
        dst += WARP_BYTES
        data += WARP_BYTES
        left -= WARP_BYTES


@device_function
def add_piece(dst, data, num_rows, num_bytes, stride, lane):
    """Add up what a half holds, in the order of the rows, round once and store it; a warp.

    The numbers of rows that most tokens have get code of their own.
    """
    dst += lane * VEC_BYTES
    data += lane * VEC_BYTES
    left = num_bytes - lane * VEC_BYTES
    if num_rows == 4:
        store_sums(sum_of_four, dst, data, num_rows, left, stride)
    elif num_rows == 2:
        store_sums(sum_of_two, dst, data, num_rows, left, stride)
    else:
        store_sums(sum_of_any, dst, data, num_rows, left, stride)


@device_function
def sum_rows_staged(dst, number, num_bytes, stage, lane):
    """Add up the listed rows in float32, round once and store the sum at dst; a warp. At most 32 rows.

    Returns the stage, behind these fills. The result has the bits of `sums.sum_rows`.
    """
    if number == 0:
        for offset in range(lane * VEC_BYTES, num_bytes, WARP_BYTES):
            ptx.st_na_v4(dst + offset, (0, 0, 0, 0))
        return stage
    room = ptx.u32_div(HALF_BYTES, number)  # of a row in a half: whole accesses of a warp, if they fit
    stride = room // WARP_BYTES * WARP_BYTES if room >= WARP_BYTES else room // VEC_BYTES * VEC_BYTES
    half = 0
    load_piece(stage, half, number, (0, min(stride, num_bytes)), stride, lane)
    offset = 0
    while offset < num_bytes:
        ahead = offset + stride
        if ahead < num_bytes:
            load_piece(stage, 1 - half, number, (ahead, min(ahead + stride, num_bytes)), stride, lane)
        stage = wait_half(stage, half)
        data = stage.data + HALF_BYTES * half
        add_piece(dst + offset, data, number, min(stride, num_bytes - offset), stride, lane)
        ptx.fence_proxy_async_shared()
        ptx.syncwarp(ptx.FULL_MASK)  # all lanes have read the half: it may be loaded again
        offset = ahead
        half = 1 - half
    return stage


# Whole sums


@device_function
def list_row(stage, number, lane, address, is_one):
    """Write down the rows of some lanes, in their order, behind a number of others; a warp. Returns how many there are
    now.
    """
    chosen = ptx.vote_ballot(ptx.FULL_MASK, is_one)
    if is_one:
        ptx.st_shared_s64(stage.rows + 8 * (number + ptx.popc_u32(chosen & ((1 << lane) - 1))), address)
    ptx.syncwarp(ptx.FULL_MASK)
    return number + ptx.popc_u32(chosen)


@device_function
def add_up(ctx, dst, number, stage):
    """Add up the listed rows in float32, round once and store the sum; a warp. Returns the stage, behind its fills."""
    num_bytes, lane = ctx.shape.hidden_bytes, ctx.team.lane
    if ptx.has_tma() and number <= MAX_STAGED_ROWS:
        stage = sum_rows_staged(dst, number, num_bytes, stage, lane)
    else:
        sum_rows(ptx.st_na_v4, dst, Listed(stage.rows, number), 0, num_bytes, lane)
    ptx.syncwarp(ptx.FULL_MASK)
    return stage


@device_function
def take_token(cell, lane):
    """The next token that no warp has taken, in lane 0; it arrives while other work goes on. cell: next_token"""
    token = ptx.atom_add_relaxed_gpu_s32(cell, 1) if lane == 0 else 0
    return token  # noqa: RET504 - compiled for `delayed`, a function must use it: see compilers.cpu.use_of_result
