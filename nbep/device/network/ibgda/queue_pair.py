"""Queue pairs: many GPU threads write into one send queue, each its own entries, and the NIC gets them in order.

 reserve     an atomic on RESERVED: these slots are mine, and their number is my ticket
 wait_room   the entry that was in the slot before is done: a completion says so
 write       `entry`
 submit      wait until READY is my ticket: all entries before mine are written; record and doorbell, unless a later
             one rings; READY moves on, which is the next one's turn

 word        written by            with                    read by            with
 RESERVED    who reserves          atom_add_relaxed_gpu    -                  -
 READY       whose turn it is      st_release_gpu          who is next        ld_acquire_gpu
 the others  the host              before the launch       all                ld_nc

 slots   0     1     2     3     4     5     6     7      num_entries is a power of two; slot = number % num_entries
              done  done  NIC   rung  ready  written ...
                          |     |     |
                          served to   |READY
                                doorbell                  RESERVED beyond

Only one thread at a time is between its turn and the next one's, so record and doorbell never go back. DeepEP takes a
lock for that, besides the turn.

Several entries a doorbell: a ring costs a write over PCIe and a wake-up. An entry that need not leave at once rings
only when it completes a batch, 2**log2_batch entries of the queue; what follows rings for it.

Source: DeepEP csrc/kernels/ibgda_device.cuh (ibgda_reserve_wqe_slots, ibgda_submit_requests, ibgda_post_send);
NVSHMEM ibgda_device.cuh (its check of the completion when a queue wraps)

The doorbell: how a GPU thread tells the NIC that a send queue has more entries.

 cell        written by                 with               read by    with
 record      whose turn it is           st_release_sys     the NIC    ld_acquire_sys
 doorbell    whose turn it is           st_release_sys     the NIC    ld_acquire_sys

 entry, entry, entry --> record: how many there are --> doorbell: look
     weak stores    release                        release

The record is 4 bytes in memory: 16 bits of the number of entries so far, big-endian. The doorbell is a register of the
NIC: 8 bytes, as the first of a control segment. The NIC may lose a ring when many come at once; then it reads the
record. It may also read the record before any ring: so the record is released behind its entries, and the doorbell
behind the record.

Source: rdma-core providers/mlx5/qp.c (post_send_db: barrier, record, barrier, doorbell); DeepEP
csrc/kernels/ibgda_device.cuh (ibgda_update_dbr and ibgda_ring_db, a release each)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network.ibgda.completion import wait_done
from nbep.device.network.ibgda.entry import ENTRY_BYTES
from nbep.device.protocols.waits import Waiter, site, wait_or_report

RECORD_BYTES = 4
DOORBELL_BYTES = 8


@device_function
def write_record(record, num_entries):
    """Say how many entries the queue has had so far. From now on the NIC may read them."""
    ptx.st_release_sys_s32(record, ptx.s32(ptx.byteswap_u32(num_entries & 0xFFFF)))  # PAIR ibgda-record


@device_function
def ring(doorbell, num_entries, qpn):
    """Have the NIC look. What this thread has written, and what it knows of, is published with it."""
    low = ptx.byteswap_u32((num_entries & 0xFFFF) << 8)
    ptx.st_release_sys_s64(doorbell, ptx.byteswap_u32(qpn << 8) << 32 | low)  # PAIR ibgda-doorbell


IBGDA_TURN = site(16, "sender on a queue pair", "READY", "the entries before its own to be written")

# Words of a queue pair's description, s64 each
ENTRIES = 0  # address of the send queue
RECORD = 1  # of the doorbell record
DOORBELL = 2  # of the doorbell
COMPLETION = 3  # of the completion
RESULT = 4  # of 8 bytes for the old values of atomics
NUM_ENTRIES = 5  # of the send queue
QPN = 6  # the queue pair's number
RESULT_KEY = 7
RESERVED = 8  # s32: entries that have been reserved so far
READY = 9  # s32: entries that are written, as have all before
NUM_WORDS = 16
QUEUE_PAIR_BYTES = 8 * NUM_WORDS

MIN_ENTRIES = 64
MAX_ENTRIES = 1 << 14  # so that 16 bits of a number tell which entries are done
DEFAULT_BATCH = 4  # entries a doorbell, where they need not leave at once


@device_function
def queue_pair_of(network, peer, queue):
    """The description of the queue pair that a queue to a peer uses."""
    return network.queue_pairs + QUEUE_PAIR_BYTES * (peer * network.num_qps + ptx.u32_mod(queue, network.num_qps))


@device_function
def field(qp, word):
    """A word of the description that never changes."""
    return ptx.ld_nc_s64(qp + 8 * word)


@device_function
def entry_at(qp, index):
    """The slot of an entry."""
    return field(qp, ENTRIES) + ENTRY_BYTES * (index & (field(qp, NUM_ENTRIES) - 1))


@device_function
def reserve(qp, num_entries):
    """Take the next slots; one thread. Returns the number of the first. They must be submitted."""
    first = ptx.atom_add_relaxed_gpu_s32(qp + 8 * RESERVED, num_entries)
    return first  # noqa: RET504 - compiled for `delayed`, a function must use it: see compilers.cpu.use_of_result


@device_function
def wait_room(network, qp, peer, queue, index):
    """Wait until the slot of an entry, and those before it, may be written; one thread. Returns whether it may."""
    return wait_done(network, field(qp, COMPLETION), peer, queue, index - field(qp, NUM_ENTRIES))


@device_function
def is_equal(seen, wanted):
    return seen == wanted


@device_function
def wait_turn(network, qp, peer, queue, index):
    """Wait until all entries before this one are written; one thread. Returns whether they are."""
    ready, waiter = qp + 8 * READY, Waiter(IBGDA_TURN, peer, queue)
    return wait_or_report(ptx.ld_acquire_gpu_s32, ready, is_equal, index, network, waiter)[1]  # PAIR ibgda-turn


@device_function
def submit(network, qp, peer, queue, entries, leaves_now):
    """Hand entries to the NIC that this thread has written, or others that it has synchronised with; one thread.

    entries: the number of the first, and how many there are
    """
    index, num_entries = entries
    if wait_turn(network, qp, peer, queue, index):
        after = index + num_entries
        if leaves_now or index >> network.log2_batch != after >> network.log2_batch:
            write_record(field(qp, RECORD), after)
            ring(field(qp, DOORBELL), after, field(qp, QPN))
        ptx.st_release_gpu_s32(qp + 8 * READY, ptx.s32(after))  # PAIR ibgda-turn
