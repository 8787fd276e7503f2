"""A board: how far each warp of a block has come, in shared memory, for the one that tells it on.

 cell          written by   with                    read by       with
 board[w, i]   warp w       atom_exch_release_cta   coordinator   ld_acquire_cta (PAIR board)
               all          st_shared 0             all           after syncthreads

A warp writes down its next item before it waits for it: all items of this warp before that one are done. If it wrote
its last item instead, what others have done between the two would be held back while it waits; and who waits to see
those would never free what this warp waits for.
"""

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.protocols.waits import has_timed_out, report_fault

RETIRED = 1 << 30  # the warp has no more items
NOT_THERE = -RETIRED - 1  # what stands for an entry of heads behind the last item


@device_function
def load_expected(heads, item, is_item, num_places, lane):
    """The entry for an item and place `lane` of heads [items, num_places], as a combine has them."""
    if is_item and lane < num_places:
        return ptx.ld_nc_s32(matrix_cell(heads, item, lane, num_places))
    return NOT_THERE


@device_function
def first_needed(expected):
    """The first row of a ring that a warp still needs: that of its item or, if it has none there, the next one's."""
    return expected if expected >= 0 else -expected - 1


@device_function
def reset_board(board, num_words, thread, num_threads):
    """Set all progress back to the start. A block barrier follows."""
    for i in range(thread, num_words, num_threads):
        ptx.st_shared_s32(board + 4 * i, 0)


@device_function
def note_progress(cell, item):
    """All items of this warp before this one are done."""
    ptx.atom_exch_release_cta_shared_s32(cell, item)  # PAIR board


@device_function
def least_progress(column, row_bytes, num_warps):
    """How far all warps have come: column is the cell of the first one."""
    least = RETIRED
    for warp in range(num_warps):
        least = min(least, ptx.ld_acquire_cta_shared_s32(column + row_bytes * warp))  # PAIR board
    return least


@device_function
def has_stalled(deadline, bounds, waiter, expected, seen):
    """A coordinator's turn in which nothing has moved: whether it is over. deadline: of the stall, by `start_wait`

    Those it coordinates bound their own waits, and may stop where one times out: then nothing moves any more. So the
    coordinator ends without a report. If none has timed out, it waits as long again before it reports that they do not
    come on: it may have begun to wait before the one it stands behind.
    """
    if ptx.wait_expired(deadline):
        if has_timed_out(bounds):
            return True
        if ptx.wait_expired(deadline + bounds.timeout_ns):
            report_fault(bounds, waiter.site, waiter.peer, waiter.channel, expected, seen)
            return True
    return False
