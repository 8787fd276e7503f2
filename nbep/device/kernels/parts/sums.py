"""Sums of the rows of one token, wherever they lie: a warp writes down their addresses, then adds them up in order.

 cell         written by     with            read by         with
 rows[i]      lanes          st_shared_s64   the same warp   ld_shared_s64, after syncwarp
 weights[i]   lanes          st_shared_s64   the same warp   ld_shared_s64, after syncwarp
 a row        see the kernel                 the warp        ld_na

Source: DeepEP csrc/kernels/intranode.cu, combine ("Reduce data"); csrc/kernels/internode.cu, combine_token
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.intranode import locate_header, slot_bytes
from nbep.device.protocols.reduce import to_bf16x8, unpack_bf16x8, zero_f32x8
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES

MAX_IN_FLIGHT = 8  # loads of a lane; the code below spells them out
HALF = MAX_IN_FLIGHT // 2
ENDLESS = (1 << 31) - 1  # slots of what is no ring and never begins again


class Source(NamedTuple):
    """Rows that come back from one rank: a ring or, from this rank itself, part of x. Strides are bytes."""

    x: int
    x_stride: int
    topk_weights: int
    topk_weights_stride: int
    num_slots: int  # of a ring; ENDLESS if the rows do not begin again


class Listed(NamedTuple):
    """The rows of one token that are to be added up: how many addresses a warp has written down, and where."""

    rows: int
    number: int


@device_function
def add_bf16x8(total, row):
    """Add eight bf16 values, packed in four words, to eight float32 sums."""
    a0, a1, a2, a3, a4, a5, a6, a7 = unpack_bf16x8(row)
    return (
        total[0] + a0,
        total[1] + a1,
        total[2] + a2,
        total[3] + a3,
        total[4] + a4,
        total[5] + a5,
        total[6] + a6,
        total[7] + a7,
    )


@device_function
def rows_of_ring(slots, shape):
    """The rows in the slots of a ring."""
    stride = slot_bytes(shape)
    return Source(slots, stride, locate_header(slots, shape).topk_weights, stride, shape.num_slots)


@device_function
def rows_or_ring(inputs, shape, is_own, first, slots):
    """What this rank has made of its own tokens, the rows of x from the first on, or else the rows of a ring."""
    x, topk_weights, num_slots = slots, locate_header(slots, shape).topk_weights, shape.num_slots
    x_stride = topk_weights_stride = slot_bytes(shape)
    if is_own:
        x_stride, topk_weights_stride = shape.hidden_bytes, 4 * shape.num_topk
        x = inputs.x + first * x_stride
        topk_weights = inputs.topk_weights + first * topk_weights_stride
        num_slots = ENDLESS
    return Source(x, x_stride, topk_weights, topk_weights_stride, num_slots)


@device_function
def list_biases(rows, biases, token, hidden_bytes, lane):
    """Write down where the biases of a token are, of two that may be absent (0). Returns how many there are."""
    if lane == 0:
        row = token * hidden_bytes
        if biases[0] != 0:
            ptx.st_shared_s64(rows, biases[0] + row)
        if biases[1] != 0:
            ptx.st_shared_s64(rows + (8 if biases[0] != 0 else 0), biases[1] + row)
    return (1 if biases[0] != 0 else 0) + (1 if biases[1] != 0 else 0)


@device_function
def list_rows(rows, weights, lane, expected, source):
    """Write down where the rows of a sum are that come from other places, in the order of the lanes. The whole warp.

    Returns how many there are. expected: in lane s, the row's index among those of source s, or negative
    """
    present = ptx.vote_ballot(ptx.FULL_MASK, expected >= 0)
    if expected >= 0:
        index = ptx.popc_u32(present & ((1 << lane) - 1))
        slot = ptx.u32_mod(expected, source.num_slots)
        ptx.st_shared_s64(rows + 8 * index, source.x + slot * source.x_stride)
        ptx.st_shared_s64(weights + 8 * index, source.topk_weights + slot * source.topk_weights_stride)
    ptx.syncwarp(ptx.FULL_MASK)
    return ptx.popc_u32(present)


@device_function
def load_rows(rows, num_rows, offset):
    """16 bytes at the same offset of each listed row, at most HALF of them."""
    nothing = (0, 0, 0, 0)
    a = ptx.ld_na_v4(ptx.ld_shared_s64(rows) + offset) if num_rows > 0 else nothing
    b = ptx.ld_na_v4(ptx.ld_shared_s64(rows + 8) + offset) if num_rows > 1 else nothing
    c = ptx.ld_na_v4(ptx.ld_shared_s64(rows + 16) + offset) if num_rows > 2 else nothing
    d = ptx.ld_na_v4(ptx.ld_shared_s64(rows + 24) + offset) if num_rows > 3 else nothing
    return a, b, c, d


@device_function
def add_rows(total, loaded, num_rows):
    """Add what `load_rows` has brought, in order."""
    total = add_bf16x8(total, loaded[0])  # zeros if there are no rows
    if num_rows > 1:
        total = add_bf16x8(total, loaded[1])
    if num_rows > 2:
        total = add_bf16x8(total, loaded[2])
    if num_rows > 3:
        total = add_bf16x8(total, loaded[3])
    return total


@device_function
def load_two(rows, num_rows, offset, end):
    """16 bytes at the same offset of one listed row, or of two; nothing past the end."""
    nothing = (0, 0, 0, 0)
    is_inside = offset < end
    a = ptx.ld_na_v4(ptx.ld_shared_s64(rows) + offset) if is_inside else nothing
    b = ptx.ld_na_v4(ptx.ld_shared_s64(rows + 8) + offset) if is_inside and num_rows > 1 else nothing
    return a, b


@device_function
def store_two(store, dst, loaded, num_rows, offset, end):
    """Store the sum of what `load_two` has brought."""
    if offset < end:
        total = add_bf16x8(zero_f32x8(), loaded[0])
        if num_rows > 1:
            total = add_bf16x8(total, loaded[1])
        store(dst + offset, to_bf16x8(total))


@device_function
def sum_rows(store, dst, rows, begin, end, lane):
    """Add bytes [begin, end) of the listed rows in float32, round once and store them from dst + begin on; a warp.

    A lane has up to MAX_IN_FLIGHT loads in flight before its first addition: of that many rows, or of two places in
    HALF as many.
    """
    listed, num_rows = rows
    offset = begin + lane * VEC_BYTES
    while offset < end:
        next_offset = offset + WARP_BYTES
        if num_rows > HALF:
            others = load_rows(listed + 8 * HALF, num_rows - HALF, offset)
            first = load_rows(listed, HALF, offset)
            total = add_rows(add_rows(zero_f32x8(), first, HALF), others, num_rows - HALF)
            for i in range(MAX_IN_FLIGHT, num_rows):
                total = add_bf16x8(total, ptx.ld_na_v4(ptx.ld_shared_s64(listed + 8 * i) + offset))
            store(dst + offset, to_bf16x8(total))
        else:
            first = load_rows(listed, num_rows, offset)
            num_next = num_rows if next_offset < end else 0
            second = load_rows(listed, num_next, next_offset)
            store(dst + offset, to_bf16x8(add_rows(zero_f32x8(), first, num_rows)))
            if next_offset < end:
                store(dst + next_offset, to_bf16x8(add_rows(zero_f32x8(), second, num_next)))
            next_offset += WARP_BYTES
        offset = next_offset


@device_function
def sum_rows_or_two(store, dst, rows, begin, end, lane):
    """The same, with four places in flight where there are one or two rows. It takes registers."""
    listed, num_rows = rows
    if num_rows > 2 or num_rows == 0:
        sum_rows(store, dst, rows, begin, end, lane)
        return
    offset = begin + lane * VEC_BYTES
    while offset < end:
        a = load_two(listed, num_rows, offset, end)
        b = load_two(listed, num_rows, offset + WARP_BYTES, end)
        c = load_two(listed, num_rows, offset + 2 * WARP_BYTES, end)
        d = load_two(listed, num_rows, offset + 3 * WARP_BYTES, end)
        store_two(store, dst, a, num_rows, offset, end)
        store_two(store, dst, b, num_rows, offset + WARP_BYTES, end)
        store_two(store, dst, c, num_rows, offset + 2 * WARP_BYTES, end)
        store_two(store, dst, d, num_rows, offset + 3 * WARP_BYTES, end)
        offset += 4 * WARP_BYTES


@device_function
def sum_weights(weights, num_rows, lane):
    """The sum of the listed top-k weights of choice `lane`."""
    total = ptx.f32(0)
    for i in range(num_rows):
        total += ptx.ld_na_f32(ptx.ld_shared_s64(weights + 8 * i) + 4 * lane)
    return total
