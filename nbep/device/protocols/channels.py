"""How tokens are split over channels, the same on both sides.

Source: DeepEP csrc/kernels/utils.cuh, get_channel_task_range
"""

from nbep.device.jit import device_function
from nbep.device.primitives import u32, u32_div


@device_function
def channel_task_range(num_tokens, num_channels, channel):
    """Tokens [begin, end) of one channel: equal shares, the last ones shorter or empty.

    Both as u32: known to fit one register, `end` takes no second one in the loops that it bounds.
    """
    share = u32_div(num_tokens + num_channels - 1, num_channels)
    begin = min(share * channel, num_tokens)
    return u32(begin), u32(min(begin + share, num_tokens))
