"""The header of a token, which goes along with its row: its index, its experts and their weights, its scales.

A sender writes them in front of the row, in its stage or else in the slot; a copier writes them to the outputs. The
receiver reads them from the slot.

Source: DeepEP csrc/kernels/intranode.cu, dispatch ("Copy source index", "Copy `topk_idx` and `topk_weights`", "Copy
`x_scales`")
"""

from collections.abc import Callable
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.layout.intranode import ALIGNMENT_BYTES, header_bytes


class Stores(NamedTuple):
    """What headers are written with, as they stand in a stage or in global memory."""

    s32: Callable
    s64: Callable
    f32: Callable


class Experts(NamedTuple):
    """A range of experts: those of one rank, or all."""

    first: int
    number: int


class Token(NamedTuple):
    """A token of the caller, and the experts whose choice its header is to say."""

    inputs: NamedTuple
    sizes: NamedTuple
    row: int
    experts: Experts


class Scales(NamedTuple):
    """The scales of one token, 4 opaque bytes each."""

    address: int
    stride: int
    number: int


@device_function
def to_stage():
    """Stores for a header that stands in front of the row in a stage."""
    return Stores(ptx.st_shared_s32, ptx.st_shared_s64, ptx.st_shared_f32)


@device_function
def to_memory():
    """Stores for the header of a slot, or of an output."""
    return Stores(ptx.st_na_s32, ptx.st_na_s64, ptx.st_na_f32)


@device_function
def copy_scales(load, store, dst, src, lane):
    """Copy the scales of one token; one warp."""
    for index in range(lane, src.number, 64):
        scale = load(src.address + 4 * index * src.stride)
        next_scale = load(src.address + 4 * (index + 32) * src.stride) if index + 32 < src.number else 0
        store(dst + 4 * index, scale)
        if index + 32 < src.number:
            store(dst + 4 * (index + 32), next_scale)


@device_function
def clear_padding(row, shape, lane):
    """Write what may be padding between the header and the row of a stage, once: it leaves with every token."""
    if header_bytes(shape) != 0:
        ptx.st_shared_s32(row - ALIGNMENT_BYTES + 4 * lane, 0)


@device_function
def keep_in_range(expert, weight, experts):
    """A choice of one of these experts, counted from the first; -1 and 0 if it is another one."""
    expert -= experts.first
    if 0 <= expert < experts.number:
        return expert, weight
    return -1, ptx.f32(0)


@device_function
def clean_choices(topk_idx, topk_weights, begin, end):
    """Mark choices [begin, end) of an output as absent: expert -1, weight 0. All threads of the grid."""
    for i in range(begin + ptx.block_idx() * ptx.block_dim() + ptx.thread_idx(), end, ptx.grid_dim() * ptx.block_dim()):
        ptx.st_weak_s64(topk_idx + 8 * i, -1)
        ptx.st_weak_s32(topk_weights + 4 * i, 0)


@device_function
def write_header(store, header, token, word, shape, lane):
    """Write the header of an input token; one warp. Experts that it is not about become -1, their weights 0.

    store: see `Stores`; word: in lane i word i of src_idx
    """
    inputs, num_topk = token.inputs, shape.num_topk
    if lane < shape.num_src_idx:
        store.s32(header.src_idx + 4 * lane, word)
    if lane < num_topk:
        expert = ptx.ld_na_s64(inputs.topk_idx + 8 * (token.row * num_topk + lane))
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, token.row, lane, num_topk))
        expert, weight = keep_in_range(expert, weight, token.experts)
        store.s64(header.topk_idx + 8 * lane, expert)
        store.f32(header.topk_weights + 4 * lane, weight)
    scales = inputs.x_scales + 4 * token.row * token.sizes.scale_token_stride
    scales = Scales(scales, token.sizes.scale_hidden_stride, shape.num_scales)
    # Column-major scales of neighbouring tokens share sectors, so L1 keeps them.
    copy_scales(ptx.ld_nc_keep_s32, store.s32, header.scales, scales, lane)


@device_function
def read_header(to, header, shape, lane):
    """Copy the header of a slot to those of an output row; one warp."""
    if lane < shape.num_src_idx:
        ptx.st_weak_s32(to.src_idx + 4 * lane, ptx.ld_na_s32(header.src_idx + 4 * lane))
    if lane < shape.num_topk:
        ptx.st_weak_s64(to.topk_idx + 8 * lane, ptx.ld_na_s64(header.topk_idx + 8 * lane))
        ptx.st_weak_f32(to.topk_weights + 4 * lane, ptx.ld_na_f32(header.topk_weights + 4 * lane))
    copy_scales(ptx.ld_na_s32, ptx.st_na_s32, to.scales, Scales(header.scales, 1, shape.num_scales), lane)


@device_function
def read_header_for(to, header, experts, keeps_source, shape, lane):
    """The same for a slot that says all experts of the token: other experts become -1, their weights 0.

    keeps_source: whether the output has src_idx
    """
    if lane < shape.num_src_idx and keeps_source:
        ptx.st_weak_s32(to.src_idx + 4 * lane, ptx.ld_na_s32(header.src_idx + 4 * lane))
    if lane < shape.num_topk:
        expert = ptx.ld_na_s64(header.topk_idx + 8 * lane)
        weight = ptx.ld_na_f32(header.topk_weights + 4 * lane)
        expert, weight = keep_in_range(expert, weight, experts)
        ptx.st_weak_s64(to.topk_idx + 8 * lane, expert)
        ptx.st_weak_f32(to.topk_weights + 4 * lane, weight)
    copy_scales(ptx.ld_na_s32, ptx.st_na_s32, to.scales, Scales(header.scales, 1, shape.num_scales), lane)
