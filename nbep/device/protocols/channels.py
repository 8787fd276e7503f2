"""How tokens are split over channels, the same on both sides.

Source: DeepEP csrc/kernels/utils.cuh, get_channel_task_range
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function


@device_function
def channel_task_range(num_tokens, num_channels, channel):
    """Tokens [begin, end) of one channel: equal shares, the last ones shorter or empty.

    Both as u32: known to fit one register, `end` takes no second one in the loops that it bounds.
    """
    share = ptx.u32_div(num_tokens + num_channels - 1, num_channels)
    begin = min(share * channel, num_tokens)
    return ptx.u32(begin), ptx.u32(min(begin + share, num_tokens))
