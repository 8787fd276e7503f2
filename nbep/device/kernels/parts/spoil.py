"""What a kernel leaves behind after a wait that timed out: NaN, or -1, and no number that could be right.

 cell      written by                          with      read by   with
 outputs: recv_ and combined_ arrays
           each warp that knows of a failure   st_weak   -         the next kernel

On a GPU the caller's stream goes on before the host knows of a failure. So each warp looks for one when it has done all
else, and if there is one it fills the outputs with ones: NaN in every float, -1 in every integer. A warp that has found
no failure has written its own rows right, since it would have reported a failed wait of its own. Whichever of the two
writes a row last, the row is right or NaN.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.waits import NO_WAIT, has_fault, site

DISPATCH_RECEIVER_ROWS = site(8, "dispatch receiver", "recv_x", "rows for all tokens")
assert DISPATCH_RECEIVER_ROWS == NO_WAIT  # it is found without a wait
SUM_ROWS = -3  # a report's channel: x of a combine has too few rows


@device_function
def has_failed(bounds):
    """Whether this rank has reported something; a whole warp, which has done all else."""
    return ptx.vote_any(ptx.FULL_MASK, has_fault(bounds))


@device_function
def spoil(address, num_bytes, lane):
    """Fill an output with ones, if there is one; a whole warp."""
    if address != 0:
        for i in range(lane, num_bytes // 4, 32):
            ptx.st_weak_s32(address + 4 * i, -1)


@device_function
def spoil_s64(address, num_bytes, lane):
    """The same for numbers of 8 bytes that somebody may still write: each one is theirs or -1, and no mixture."""
    if address != 0:
        for i in range(lane, num_bytes // 8, 32):
            ptx.st_weak_s64(address + 8 * i, -1)


@device_function
def spoil_rows(out, shape, num_rows, lane):
    """What a dispatch has received; a whole warp."""
    spoil(out.recv_x, num_rows * shape.hidden_bytes, lane)
    spoil(out.recv_x_scales, 4 * num_rows * shape.num_scales, lane)
    spoil(out.recv_topk_idx, 8 * num_rows * shape.num_topk, lane)
    spoil(out.recv_topk_weights, 4 * num_rows * shape.num_topk, lane)


@device_function
def spoil_sums(out, shape, num_tokens, lane):
    """What a combine has added up; a whole warp."""
    spoil(out.combined_x, num_tokens * shape.hidden_bytes, lane)
    spoil(out.combined_topk_weights, 4 * num_tokens * shape.num_topk, lane)
