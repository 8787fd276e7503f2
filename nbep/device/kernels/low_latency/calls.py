"""What all ranks must pass alike to a low-latency call: each rank tells every peer, in two words.

 cell                 written by         with                              read by    with
 calls[h, s, word]    tellers of s (1)   amo_add (-word - 1)               teller (2) ld_relaxed_sys
                      next keeper        st_relaxed_sys (0)                sources    behind the credit
   of a masked rank   next keeper        atom_exch_acq_rel_sys (ABSENT): that rank gets no credit, and may still add

 (1) Whoever looks at a peer's credit anyway: in dispatch the counter of its first expert, or with deduplicate of its
     experts; in combine with deduplicate who announces parts. In combine without, a warp of the last block.
 (2) And whoever notes how long combine waits for a rank that has no rows for it: see recv_cost.py.

Where these cells are does not depend on the call. So every rank hears of every other one's call, whatever that makes of
the messages, and also where none goes between the two. A word publishes nothing: nobody waits for what is on its way.

The teller, a warp of the last block beside the keeper, compares when it has received. That code stands behind all other
code, so that no warp goes around it: what few tokens wait for is code that is fetched anew. If nothing comes, since the
other call sends it elsewhere, the host compares; see nbep.host.low_latency.calls, which makes the words, too.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.journal import may_send
from nbep.device.layout.low_latency import WORDS_OF_CALL, call_offset
from nbep.device.network.seam import amo_add, own_ptr
from nbep.device.protocols.arrivals import completion, number_of, wait_number
from nbep.device.protocols.waits import LOW_LATENCY_CALL, LOW_LATENCY_CALLS_DIFFER, Waiter, report_fault

QUEUE = 0


@device_function
def is_teller():
    """Whether this is the teller's warp, in the last block."""
    return ptx.thread_idx() // 32 == ptx.block_dim() // 32 - 2


@device_function
def tell_call(network, call, peer):
    """Tell a peer what this rank calls; one thread, which may send to it."""
    cell = call_offset(call.num_rdma_bytes, call.half, network.rank, 0)
    amo_add(network, cell, completion(0) - call.word_0, peer, QUEUE, False)
    amo_add(network, cell + 4, completion(0) - call.word_1, peer, QUEUE, False)


@device_function
def tell_all(network, work, bounds, call, lane):
    """Teller: tell all peers, a lane each."""
    if lane < network.num_ranks and may_send(network, work, bounds, call, lane):
        tell_call(network, call, lane)


@device_function
def compare_calls(network, work, bounds, call, lane):
    """Teller: wait for what all peers call, and report what differs from this rank's own call."""
    peer = lane // WORDS_OF_CALL
    if peer < network.num_ranks:
        index = lane % WORDS_OF_CALL
        cell = own_ptr(network, call_offset(call.num_rdma_bytes, call.half, peer, index))
        value = wait_number(cell, bounds, work.mask, Waiter(LOW_LATENCY_CALL, peer, index))
        word = call.word_0 if index == 0 else call.word_1
        if value < 0 and number_of(value) != word:
            report_fault(bounds, LOW_LATENCY_CALLS_DIFFER, peer, index, word, number_of(value))
