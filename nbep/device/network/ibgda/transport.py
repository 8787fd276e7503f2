"""The network's functions over queue pairs; see `seam`. Peers whose memory is mapped are reached as by `direct`.

 keep_message    stage --st_na--> the message's place in this rank's buffer, from where the NIC reads it
 put_nbi_warp    an entry for each registered chunk of the peer's buffer that the message touches: a write
 amo_add         an entry: a fetch-and-add, whose old value is not read
 quiet           nothing to do: a NIC takes the entries of a queue in their order, its atomics come behind its writes

 cell            written by          with        read by    with
 message         a warp              st_na       the NIC    after the doorbell
                 the NIC             writes      rank r     after the cell that its atomic has changed
 cell            the NIC of a peer   its atomic  rank r     ld_acquire_sys, by who waits for it
 old value       this rank's NIC     a write     who added  ld_weak, after the completion
 keys, addresses the host            before the launch      ld_nc

Source: DeepEP csrc/kernels/ibgda_device.cuh (nvshmemi_ibgda_put_nbi_warp, nvshmemi_ibgda_amo_nonfetch_add,
nvshmemi_ibgda_rma_p, ibgda_get_lkey_and_rkey)
"""

import sys
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network import direct, provide
from nbep.device.network.ibgda.completion import wait_done
from nbep.device.network.ibgda.entry import (
    Registered,
    Slot,
    write_fetch_add_32,
    write_fetch_add_64,
    write_rdma_write,
    write_rdma_write_inline,
)
from nbep.device.network.ibgda.queue_pair import (
    COMPLETION,
    QPN,
    RESULT,
    RESULT_KEY,
    entry_at,
    field,
    queue_pair_of,
    reserve,
    submit,
    wait_room,
)
from nbep.device.network.seam import further, own_ptr, peer_ptr
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES
from nbep.device.types import I32, I64, Sym

MOST_PIECES = 32  # whose entries a warp writes at once; with those that wait for a ring, less than MIN_ENTRIES


class IbgdaNetwork(NamedTuple):
    """The ranks that a kernel can reach, and how. It has the fields of Bounds: its waits are bounded, too.

    The buffers are registered in chunks of 2**log2_chunk bytes, counted from heap_offset bytes before the buffer.
    """

    buffer_ptrs: Sym  # where this rank sees the buffer of each; 0 if only the NIC reaches it
    rank: I32
    num_ranks: I32
    own_buffer: Sym  # where this rank sees its own
    num_qps: I32  # queue pairs for each peer
    log2_batch: I32  # of the entries a doorbell, where they need not leave at once
    queue_pairs: Sym  # [num_ranks, num_qps] descriptions, see `queue_pair`
    remote_bases: Sym  # [num_ranks] s64: where each rank itself sees its buffer
    local_keys: Sym  # [num_chunks] s32, of this rank's chunks
    remote_keys: Sym  # [num_ranks, num_chunks] s32
    num_chunks: I32
    log2_chunk: I32
    heap_offset: I64
    timeout_ns: I64
    claim: Sym
    report: Sym


@device_function
def is_mapped(network, peer):
    return peer_ptr(network, 0, peer) != 0


@device_function
def remote_address(network, offset, peer):
    return ptx.ld_nc_s64(network.remote_bases + 8 * peer) + offset


@device_function
def chunk_of(network, offset):
    return (network.heap_offset + offset) >> network.log2_chunk


@device_function
def left_in_chunk(network, offset):
    """Bytes from a place to the end of its chunk."""
    return ((chunk_of(network, offset) + 1) << network.log2_chunk) - network.heap_offset - offset


@device_function
def local_key(network, offset):
    return ptx.ld_nc_s32(network.local_keys + 4 * chunk_of(network, offset))


@device_function
def remote_key(network, offset, peer):
    return ptx.ld_nc_s32(network.remote_keys + 4 * (peer * network.num_chunks + chunk_of(network, offset)))


@device_function
def slot_of(qp, index):
    """Where an entry goes, and what its control segment says of it."""
    return Slot(entry_at(qp, index), index, field(qp, QPN))


@device_function
def remote_place(network, offset, peer):
    """A place of a peer's buffer, as the NIC finds it."""
    return Registered(remote_address(network, offset, peer), remote_key(network, offset, peer))


@device_function
def write_piece(network, qp, index, place, num_bytes):
    """The entry for bytes that lie in one chunk of the peer's buffer, so in one or two of this rank's; one thread."""
    slot = slot_of(qp, index)
    remote = remote_place(network, place.dst, place.peer)
    here = min(left_in_chunk(network, place.src), num_bytes)
    more = num_bytes - here
    first = Registered(own_ptr(network, place.src), local_key(network, place.src))
    next_key = local_key(network, place.src + here) if more != 0 else 0
    write_rdma_write(slot, remote, first, here, next_key, more)


@device_function
def post_few(network, place, num_bytes, leaves_now, lane):
    """As post_write, for bytes that touch at most MOST_PIECES chunks of the peer's buffer. All lanes of a warp."""
    qp = queue_pair_of(network, place.peer, place.queue)
    head = left_in_chunk(network, place.dst)
    num_pieces = chunk_of(network, place.dst + num_bytes - 1) - chunk_of(network, place.dst) + 1
    first = 0
    has_room = False
    if lane == 0:
        first = reserve(qp, num_pieces)
        has_room = wait_room(network, qp, place.peer, place.queue, first + num_pieces - 1)
    first = ptx.shfl_idx_s32(ptx.FULL_MASK, first, 0)
    if ptx.vote_any(ptx.FULL_MASK, has_room):
        ptx.syncwarp(ptx.FULL_MASK)  # all lanes may write the slots that lane 0 has found free
        if lane < num_pieces:
            begin = 0 if lane == 0 else head + ((lane - 1) << network.log2_chunk)
            size = min(left_in_chunk(network, place.dst + begin), num_bytes - begin)
            write_piece(network, qp, first + lane, further(place, begin), size)
        ptx.syncwarp(ptx.FULL_MASK)
        if lane == 0:
            submit(network, qp, place.peer, place.queue, (first, num_pieces), leaves_now)
    return first + num_pieces - 1


@device_function
def post_write(network, place, num_bytes, leaves_now, lane):
    """Write num_bytes of this rank's buffer into a peer's: an entry for each of its chunks. All lanes of a warp.

    The bytes are written by this warp, or by others that it has synchronised with. Returns the number of the last
    entry, for `wait_written`.
    """
    last = 0
    done = 0
    # A few at once: who waited for room for more than the queue has would wait for entries without a doorbell.
    while done < num_bytes:
        most = left_in_chunk(network, place.dst + done) + ((MOST_PIECES - 1) << network.log2_chunk)
        part = min(num_bytes - done, most)
        last = post_few(network, further(place, done), part, leaves_now, lane)
        done += part
    return last


@device_function
def post_value(network, offset, value, num_bytes, peer, queue):
    """Write a number of 1 to 8 bytes, which lie in the entry, into a peer's buffer; one thread. Returns its number.

    The place lies in one chunk.
    """
    qp = queue_pair_of(network, peer, queue)
    index = reserve(qp, 1)
    if wait_room(network, qp, peer, queue, index):
        write_rdma_write_inline(slot_of(qp, index), remote_place(network, offset, peer), value, num_bytes)
        submit(network, qp, peer, queue, (index, 1), True)
    return index


@device_function
def post_add(network, offset, value, is_64_bits, peer, queue):
    """Add to an s32 or s64 in a peer's buffer; one thread. Returns the entry's number."""
    qp = queue_pair_of(network, peer, queue)
    index = reserve(qp, 1)
    if wait_room(network, qp, peer, queue, index):
        slot, remote = slot_of(qp, index), remote_place(network, offset, peer)
        result = Registered(field(qp, RESULT), field(qp, RESULT_KEY))
        if is_64_bits:
            write_fetch_add_64(slot, remote, value, result)
        else:
            write_fetch_add_32(slot, remote, value, result)
        submit(network, qp, peer, queue, (index, 1), True)
    return index


@device_function
def wait_written(network, peer, queue, index):
    """Wait until an entry that has left is done, and all before it on its queue; one thread. Returns whether it is."""
    return wait_done(network, field(queue_pair_of(network, peer, queue), COMPLETION), peer, queue, index)


@device_function
def fetched_32(network, peer, queue):
    """What the s32 was before the last fetch-and-add on a queue that is done; one thread, the only one on the queue."""
    return ptx.s32(ptx.byteswap_u32(ptx.ld_weak_s32(field(queue_pair_of(network, peer, queue), RESULT))))


@device_function
def fetched_64(network, peer, queue):
    """The same of an s64."""
    return ptx.ld_weak_s64(field(queue_pair_of(network, peer, queue), RESULT))


# The seam's functions


@device_function
def keep_message(network, src_offset, stage, num_bytes, lane):
    """Copy it to where the NIC reads it."""
    dst = own_ptr(network, src_offset)
    offset = lane * VEC_BYTES
    while offset < num_bytes:  # the number of turns of a range would take registers, from far outside of the loop
        ptx.st_na_v4(dst + offset, ptx.ld_shared_v4(stage + offset))
        offset += WARP_BYTES


@device_function
def put_nbi_warp(network, place, stage, num_bytes, lane):
    if is_mapped(network, place.peer):
        direct.put_nbi_warp(network, place, stage, num_bytes, lane)
    else:
        post_few(network, place, num_bytes, False, lane)


@device_function
def quiet(network, lane):
    direct.quiet(network, lane)


@device_function
def amo_add(network, offset, value, peer, queue, is_behind):
    if is_mapped(network, peer):
        direct.amo_add(network, offset, value, peer, queue, is_behind)
    else:
        post_add(network, offset, value, False, peer, queue)


@device_function
def sends_from_buffer(network):
    return True


@device_function
def is_message(network, peer):
    return not is_mapped(network, peer)


provide(IbgdaNetwork, sys.modules[__name__])
