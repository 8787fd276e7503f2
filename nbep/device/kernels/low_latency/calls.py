"""What all ranks must pass alike to a low-latency call: each rank notifies every peer, in two words.

 cell                 written by         with                              read by    with
 calls[h, s, word]    notify of s (1)    amo_add (-word - 1)               notify (2) ld_relaxed_sys
                      next coordinator   st_relaxed_sys (0)                sources    behind the credit
   of a masked rank   next coordinator   atom_exch_acq_rel_sys (ABSENT): that rank gets no credit, and may still add

 (1) Whoever looks at a peer's credit anyway: in dispatch the counter of its first expert, or with deduplicate of its
     experts; in combine with deduplicate who announces parts. In combine without, a warp of the last block.
 (2) And whoever notes how long combine waits for a rank that has no rows for it: see `arrivals.note_wait`.

These are the versions for a ComparedCall. With a plain Call, the usual one on GPUs, calls are not compared.

Where these cells are does not depend on the call. So every rank hears of every other one's call, whatever that makes of
the messages, and also where none goes between the two. A word publishes nothing: its writer does not wait for
what is on its way.

A warp of the last block beside the coordinator compares when it has received. That code stands behind all other code,
so that no warp goes around it: what few tokens wait for is code that is fetched anew. If nothing comes, since the other
call sends it elsewhere, the host compares; see nbep.host.low_latency.calls, which makes the words, too.
"""

from typing import NamedTuple

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import QUEUE
from nbep.device.kernels.low_latency.coordinator import may_send
from nbep.device.kernels.parts.arrivals import ABSENT, LOW_LATENCY_CALL, completion, number_of, wait_number
from nbep.device.network.seam import amo_add, own_ptr
from nbep.device.protocols.waits import Waiter, report_fault, site
from nbep.device.types import I32, I64

LOW_LATENCY_CALLS_DIFFER = site(38, "low-latency notify", "calls", "the same call on all ranks")


class ComparedCall(NamedTuple):
    """A call that is compared with those of the other ranks: what they must pass alike, in two words."""

    num_rdma_bytes: I64
    share_bytes: I64
    recv_begin: I64
    half: I32
    phases: I32
    word_0: I32
    word_1: I32


@device_function
def own_word(ctx, index):
    """A word of this rank's own call."""
    return ctx.call.word_0 if index == 0 else ctx.call.word_1


@device_function
def notify_call(ctx, peer):
    num_bytes, half = ctx.call.num_rdma_bytes, ctx.call.half
    for index in range(layout.WORDS_OF_CALL):
        cell = layout.call_offset(num_bytes, ctx.network.num_ranks, half, ctx.network.rank, index)
        amo_add(ctx.network, cell, completion(0) - own_word(ctx, index), peer, QUEUE, False)


@device_function
def notify_peers(ctx):
    for peer in range(ctx.lane, ctx.network.num_ranks, 32):
        if may_send(ctx, peer):
            notify_call(ctx, peer)


@device_function
def word_cell(ctx, half, peer, index):
    """Where a peer writes a word of its call."""
    return own_ptr(ctx.network, layout.call_offset(ctx.call.num_rdma_bytes, ctx.network.num_ranks, half, peer, index))


@device_function
def compare_calls(ctx):
    for peer in range(ctx.lane, ctx.network.num_ranks, 32):
        for index in range(layout.WORDS_OF_CALL):  # in turn: where both differ, the first is reported
            cell = word_cell(ctx, ctx.call.half, peer, index)
            value = wait_number(cell, ctx.bounds, ctx.work.mask, Waiter(LOW_LATENCY_CALL, peer, index))
            word = own_word(ctx, index)
            if value < 0 and number_of(value) != word:
                report_fault(ctx.bounds, LOW_LATENCY_CALLS_DIFFER, peer, index, word, number_of(value))


@device_function
def empty_word(cell, is_absent):
    """As `arrivals.empty_cell`, for a cell that is added to once, relaxed, and read so."""
    if is_absent:
        ptx.atom_exch_acq_rel_sys_s32(cell, ABSENT)
    else:
        ptx.st_relaxed_sys_s32(cell, 0)


@device_function
def empty_call(ctx, half, peer, is_absent):
    for index in range(layout.WORDS_OF_CALL):
        empty_word(word_cell(ctx, half, peer, index), is_absent)


@device_function
def call_cell(ctx, peer):
    return word_cell(ctx, ctx.call.half, peer, 0)
