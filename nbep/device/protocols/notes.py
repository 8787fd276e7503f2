"""What a token takes along besides its row: its index, its experts and their weights, its scales.

A sender writes them in front of the row, in its stage or else in the slot; a copier writes them to the outputs. The
receiver reads them from the slot.

Source: DeepEP csrc/kernels/intranode.cu, dispatch ("Copy source index", "Copy `topk_idx` and `topk_weights`", "Copy
`x_scales`")
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.intranode import ALIGNMENT_BYTES, note_bytes


@device_function
def copy_scales(load, store, dst, src, src_stride, num_scales, lane):
    """Copy the scales of one token, 4 opaque bytes each, src_stride apart; one warp."""
    for index in range(lane, num_scales, 64):
        scale = load(src + 4 * index * src_stride)
        next_scale = load(src + 4 * (index + 32) * src_stride) if index + 32 < num_scales else 0
        store(dst + 4 * index, scale)
        if index + 32 < num_scales:
            store(dst + 4 * (index + 32), next_scale)


@device_function
def clear_padding(row, shape, lane):
    """Write what may be padding between the notes and the row of a stage, once: it leaves with every token."""
    if note_bytes(shape) != 0:
        ptx.st_shared_s32(row - ALIGNMENT_BYTES + 4 * lane, 0)


@device_function
def keep_in_range(expert, weight, num_experts):
    """A choice of experts [0, num_experts); -1 and 0 if it is another one."""
    if 0 <= expert < num_experts:
        return expert, weight
    return -1, ptx.f32(0)


@device_function
def clean_choices(topk_idx, topk_weights, begin, end):
    """Mark choices [begin, end) of an output as absent: expert -1, weight 0. All threads of the grid."""
    for i in range(begin + ptx.block_idx() * ptx.block_dim() + ptx.thread_idx(), end, ptx.grid_dim() * ptx.block_dim()):
        ptx.st_weak_s64(topk_idx + 8 * i, -1)
        ptx.st_weak_s32(topk_weights + 4 * i, 0)


@device_function
def write_notes(
    store_s32, store_s64, store_f32, notes, inputs, token, word, first_expert, num_experts, shape, sizes, lane
):
    """Write the notes of an input token; one warp. Experts outside of a range become -1, their weights 0.

    word: in lane i word i of src_idx; first_expert: the one of the range that becomes 0
    """
    num_topk = shape.num_topk
    if lane < shape.num_src_idx:
        store_s32(notes.src_idx + 4 * lane, word)
    if lane < num_topk:
        expert = ptx.ld_na_s64(inputs.topk_idx + 8 * (token * num_topk + lane)) - first_expert
        weight = ptx.ld_na_f32(inputs.topk_weights + 4 * (token * num_topk + lane))
        expert, weight = keep_in_range(expert, weight, num_experts)
        store_s64(notes.topk_idx + 8 * lane, expert)
        store_f32(notes.topk_weights + 4 * lane, weight)
    scales = inputs.x_scales + 4 * token * sizes.scale_token_stride
    # Column-major scales of neighbouring tokens share sectors, so L1 keeps them.
    copy_scales(ptx.ld_nc_keep_s32, store_s32, notes.scales, scales, sizes.scale_hidden_stride, shape.num_scales, lane)


@device_function
def read_notes(to, notes, shape, lane):
    """Copy the notes of a slot to those of an output row; one warp."""
    if lane < shape.num_src_idx:
        ptx.st_weak_s32(to.src_idx + 4 * lane, ptx.ld_na_s32(notes.src_idx + 4 * lane))
    if lane < shape.num_topk:
        ptx.st_weak_s64(to.topk_idx + 8 * lane, ptx.ld_na_s64(notes.topk_idx + 8 * lane))
        ptx.st_weak_f32(to.topk_weights + 4 * lane, ptx.ld_na_f32(notes.topk_weights + 4 * lane))
    copy_scales(ptx.ld_na_s32, ptx.st_na_s32, to.scales, notes.scales, 1, shape.num_scales, lane)


@device_function
def read_notes_for(to, notes, keeps_source, first_expert, num_experts, shape, lane):
    """The same for a slot that says all experts of the token: those outside of a range become -1, their weights 0.

    keeps_source: whether the output has src_idx
    """
    if lane < shape.num_src_idx and keeps_source:
        ptx.st_weak_s32(to.src_idx + 4 * lane, ptx.ld_na_s32(notes.src_idx + 4 * lane))
    if lane < shape.num_topk:
        expert = ptx.ld_na_s64(notes.topk_idx + 8 * lane) - first_expert
        weight = ptx.ld_na_f32(notes.topk_weights + 4 * lane)
        expert, weight = keep_in_range(expert, weight, num_experts)
        ptx.st_weak_s64(to.topk_idx + 8 * lane, expert)
        ptx.st_weak_f32(to.topk_weights + 4 * lane, weight)
    copy_scales(ptx.ld_na_s32, ptx.st_na_s32, to.scales, notes.scales, 1, shape.num_scales, lane)
