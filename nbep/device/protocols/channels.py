"""How tokens are split over channels, the same on both sides, and how many of each go where.

 cell             written by            with      read by    with
 channel_prefix   a warp, its channels  st_weak   thread 0   ld_weak, after syncthreads
                  then thread 0         st_weak   see the kernel

Source: DeepEP csrc/kernels/utils.cuh, get_channel_task_range; csrc/kernels/intranode.cu, notify_dispatch
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.reduce import warp_sum_s32


@device_function
def channel_task_range(num_tokens, num_channels, channel):
    """Tokens [begin, end) of one channel: equal shares, the last ones shorter or empty.

    Both as u32: known to fit one register, `end` takes no second one in the loops that it bounds.
    """
    share = ptx.u32_div(num_tokens + num_channels - 1, num_channels)
    begin = min(share * channel, num_tokens)
    return ptx.u32(begin), ptx.u32(min(begin + share, num_tokens))


@device_function
def goes_to_any(row, num_ranks):
    """Whether a token goes to one of the ranks from a place in its row of is_token_in_rank on: 1 or 0."""
    found = 0
    for k in range(num_ranks):
        found |= ptx.ld_nc_u8(row + k)
    return found


@device_function
def count_channel_tokens(channel_prefix, is_token_in_rank, num_ranks, first_rank, num_dst_ranks, sizes):
    """Prefix sums over channels of the tokens that go to one of some ranks; one warp counts one channel at a time."""
    lane = ptx.thread_idx() % 32
    for channel in range(ptx.thread_idx() // 32, sizes.num_channels, ptx.block_dim() // 32):
        begin, end = channel_task_range(sizes.num_tokens, sizes.num_channels, channel)
        count = 0
        for token in range(begin + lane, end, 32):
            count += goes_to_any(is_token_in_rank + token * num_ranks + first_rank, num_dst_ranks)
        count = warp_sum_s32(ptx.FULL_MASK, count)
        if lane == 0:
            ptx.st_weak_s32(channel_prefix + 4 * channel, count)
    ptx.syncthreads()
    if ptx.thread_idx() == 0:
        total = 0
        for channel in range(sizes.num_channels):
            total += ptx.ld_weak_s32(channel_prefix + 4 * channel)
            ptx.st_weak_s32(channel_prefix + 4 * channel, total)
