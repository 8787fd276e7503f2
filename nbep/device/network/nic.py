"""The software NIC: a kernel that serves the send queues of one rank, where there is no card to do it.

 the rank's GPU                 the NIC of the rank                                        the peer
 entries, record, doorbell ---> look: doorbell or record
                                decode an entry, check it, its keys and its bounds
                                write: bytes from this rank's memory ---------------------> bytes in its buffer
                                fetch-and-add: ------------------------------------------> a cell, behind the bytes
                                ---> the old value
 completion <------------------ done, or an error; then what is behind it is flushed

 cell          written by      with                      read by          with
 doorbell      GPU             st_release_sys            lane 0           ld_acquire_sys
 record        GPU             st_release_sys            lane 0           ld_acquire_sys; ld_relaxed_sys after doorbell
 entry, bytes  GPU             st_na, before those       all lanes        ld_na, after a syncwarp
 bytes there   all lanes       st_na, st_weak            the peer         after an atomic or a completion
 old value     lane 0          st_weak                   GPU              ld_weak, after the completion
   syndrome    lane 0          st_relaxed_sys            GPU              ld_relaxed_sys, after the completion
 cell there    lane 0          atom_add_acq_rel_sys      the peer         ld_acquire_sys
 received      lane 0          st_relaxed_sys            the peer's host  when a wait has timed out
 refused       lane 0          st_relaxed_sys            the host         when a wait has met an error
 completion    lane 0          st_release_sys            GPU              ld_acquire_sys
 served, state lane 0          st_weak                   lane 0           ld_weak; one lane serves a queue pair
 queue pairs, regions   the host, before the launch      all lanes        ld_nc
 stop          the host                                  lane 0           ld_relaxed_sys, then fence_acq_rel_sys

A warp serves each queue pair, so nothing orders two of them. What RDMA promises is all that a reader gets: the bytes of
a write come in any order, and only an atomic or a completion of the same queue pair says that they are there. The lanes
begin in the middle of a write, where `Troubles` say so, and wait before each entry.

Addresses and keys are checked as a card does: an entry carries a key, the key names a region of somebody's memory, its
bounds and what may be done there. The NIC has its own address of each region. What a card does and this one does not is
refused, as an entry that a card does not know: other opcodes and flags, bits that are reserved, and adds of several
fields in one number. So is a doorbell that names another queue pair, and more entries than the queue has slots.
Completions never run out of room: there is one, which may be overrun.

How many entries there are, a card learns from the doorbell or, if it has lost the ring, from the record, maybe before
the ring. `Troubles` say which; rings that come while it serves are merged.

Source: the mlx5 programmer's manual, "Work Queue Elements"; rdma-core providers/mlx5/mlx5dv.h (MLX5_CQE_SYNDROME_*);
the InfiniBand specification, "Reliable Connection", ordering of messages, and "Error Handling", flushed requests;
NVSHMEM ibgda.cpp (completion queues that are collapsed, `cc`, and may be overrun, `oi`)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.network.ibgda.completion import FLUSHED, REQ, REQ_ERR, STATUS_WORD, SYNDROME_WORD
from nbep.device.network.ibgda.entry import (
    ATOMIC,
    ATOMIC_RESULT,
    CQ_UPDATE,
    DATA,
    ENTRY_BYTES,
    INLINE,
    MASKED_FETCH_ADD,
    OPMOD_32_BITS,
    OPMOD_64_BITS,
    RDMA_WRITE,
    REMOTE_ADDRESS,
    SEGMENT_BYTES,
    Slot,
)
from nbep.device.types import I32, I64, Sym

# Words of a queue pair as the NIC has it, s64 each
ENTRIES = 0
RECORD = 1
DOORBELL = 2
COMPLETION = 3
NUM_ENTRIES = 4
QPN = 5
PEER = 6
RECEIVED = 7  # address of an s32 at the peer: entries that it has got on this queue pair
SERVED = 8  # entries that are done
STATE = 9
REFUSED = 10  # the first entry that was refused, and its syndrome in the low byte; 0 if none was
NUM_WORDS = 16
QUEUE_PAIR_BYTES = 8 * NUM_WORDS

RUNS = 0  # states
STOPPED = 1
FLUSHES = 2  # an entry has been refused

# Words of a region, s64 each
KEY = 0
BEGIN = 1  # as its owner sees it
END = 2
HERE = 3  # where the NIC sees its first byte
RIGHTS = 4
REGION_BYTES = 8 * 8

REMOTE_WRITE = 1  # rights
REMOTE_ATOMIC = 2

LOCAL_LENGTH_ERR = 0x01  # syndromes
LOCAL_QP_OP_ERR = 0x02
LOCAL_PROT_ERR = 0x04
REMOTE_INVAL_REQ_ERR = 0x12
REMOTE_ACCESS_ERR = 0x13
NO_ERROR = 0

NOWHERE = -1
WRONG = -1  # number of entries
NEVER = 1 << 62
SLAB_BYTES = 512  # that a warp moves at once


class Nic(NamedTuple):
    """What a NIC serves, and what it reaches."""

    queue_pairs: Sym  # [num_queue_pairs] as described above
    regions: Sym  # [num_ranks, num_regions], of every rank
    num_queue_pairs: I32
    num_regions: I32
    rank: I32
    stop: Sym  # s32: not 0 when it is to end, once all is served that has been rung for
    limit_ns: I64  # longest time that it runs; 0 for no limit


NO_ENTRY = 1 << 62
NO_QUEUE_PAIR = 0
FROM_DOORBELL, FROM_RECORD, FROM_BOTH = 0, 1, 2  # from where a NIC learns how many entries there are


class Troubles(NamedTuple):
    """What a NIC does badly, for tests. Entries by their numbers, which do not wrap here."""

    seed: I64
    max_delay_ns: I32  # before each entry: 0 to so long
    source: I32  # FROM_DOORBELL, FROM_RECORD, or FROM_BOTH, as it comes
    lost_queue_pair: I32  # its number, or NO_QUEUE_PAIR: lost_entry and all behind it are never served
    lost_entry: I64
    last_entry: I64  # after which every queue pair stops, or NO_ENTRY


@device_function
def noise(troubles, qpn, index):
    """A number below 2**31 that depends on the seed, the queue pair and the entry."""
    x = (troubles.seed * 40503 + qpn * 30011 + index * 50021 + 12345) & 0x7FFFFFFF
    for _ in range(3):
        x = ((x ^ (x >> 15)) * 1103515245 + 12345) & 0x7FFFFFFF
    return x ^ (x >> 15)


@device_function
def be64(high, low):
    """The number whose 8 big-endian bytes are two words."""
    return ptx.s64(ptx.byteswap_u32(high) << 32 | ptx.byteswap_u32(low))


@device_function
def find(nic, rank, key, address, num_bytes, rights):
    """Where the NIC sees num_bytes at an address of a rank's, if the key is that of a region that holds them all."""
    key = ptx.byteswap_u32(key)
    index = key >> 8
    here = ptx.s64(NOWHERE)
    if index < nic.num_regions:
        region = nic.regions + REGION_BYTES * (rank * nic.num_regions + index)
        begin = ptx.ld_nc_s64(region + 8 * BEGIN)
        is_inside = address >= begin and address + num_bytes <= ptx.ld_nc_s64(region + 8 * END)
        may = ptx.ld_nc_s64(region + 8 * RIGHTS) & rights == rights
        if ptx.ld_nc_s64(region + 8 * KEY) == key and is_inside and may:
            here = ptx.ld_nc_s64(region + 8 * HERE) + address - begin
    return here


@device_function
def move(dst, src, num_bytes, start, lane):
    """Copy bytes, beginning with any slab; one warp."""
    if (dst | src | num_bytes) & 15 == 0:
        num_slabs = (num_bytes + SLAB_BYTES - 1) // SLAB_BYTES
        for i in range(num_slabs):
            offset = SLAB_BYTES * ptx.u32_mod(i + start, num_slabs) + 16 * lane
            if offset < num_bytes:
                ptx.st_na_v4(dst + offset, ptx.ld_na_v4(src + offset))
    else:
        for i in range(lane, num_bytes, 32):
            ptx.st_weak_u8(dst + i, ptx.ld_na_u8(src + i))


@device_function
def write_data(nic, segment, most_inline, remote, start, lane):
    """Move what one data segment names to where it goes. Returns an error, and how many bytes it were."""
    words = ptx.ld_na_v4(segment)
    num_bytes = ptx.byteswap_u32(words[0])
    if num_bytes & INLINE != 0:
        num_bytes &= INLINE - 1
        if num_bytes > most_inline:
            return LOCAL_LENGTH_ERR, 0
        for i in range(lane, num_bytes, 32):
            ptx.st_weak_u8(remote + i, ptx.ld_na_u8(segment + 4 + i))
        return NO_ERROR, num_bytes
    src = find(nic, nic.rank, words[1], be64(words[2], words[3]), num_bytes, 0)
    if src == NOWHERE:
        return LOCAL_PROT_ERR, 0
    move(remote, src, num_bytes, start, lane)
    return NO_ERROR, num_bytes


@device_function
def bytes_of(segment):
    """How many bytes a data segment names."""
    return ptx.byteswap_u32(ptx.ld_na_v4(segment)[0]) & (INLINE - 1)


@device_function
def execute_write(nic, entry, num_segments, peer, start, lane):
    """An RDMA write. Returns an error."""
    where = ptx.ld_na_v4(entry + REMOTE_ADDRESS)
    if where[3] != 0:
        return LOCAL_QP_OP_ERR  # reserved
    is_inline = ptx.byteswap_u32(ptx.ld_na_v4(entry + DATA)[0]) & INLINE != 0
    last = entry + SEGMENT_BYTES * (3 if is_inline else num_segments)
    total = 0
    segment = entry + DATA
    while segment < last:
        total += bytes_of(segment)
        segment += SEGMENT_BYTES
    remote = find(nic, peer, where[2], be64(where[0], where[1]), total, REMOTE_WRITE)
    if remote == NOWHERE:
        return REMOTE_ACCESS_ERR
    segment = entry + DATA
    most_inline = SEGMENT_BYTES * (num_segments - 2) - 4
    error = NO_ERROR
    while segment < last and error == NO_ERROR:
        error, moved = write_data(nic, segment, most_inline, remote, start, lane)
        remote += moved
        segment += SEGMENT_BYTES
    return error


@device_function
def execute_add(nic, entry, is_64_bits, peer, lane):
    """A fetch-and-add, behind all that this queue pair has written. Returns an error."""
    words = ptx.ld_na_v4(entry + ATOMIC)
    where = ptx.ld_na_v4(entry + REMOTE_ADDRESS)
    boundary = words[2] | words[3] if is_64_bits else words[1] | words[2] | words[3]  # of 32 bits, two are reserved
    if boundary | where[3] != 0:
        return LOCAL_QP_OP_ERR
    size = 8 if is_64_bits else 4
    address = be64(where[0], where[1])
    if address & (size - 1) != 0:
        return REMOTE_INVAL_REQ_ERR
    cell = find(nic, peer, where[2], address, size, REMOTE_ATOMIC)
    if cell == NOWHERE:
        return REMOTE_ACCESS_ERR
    to = ptx.ld_na_v4(entry + ATOMIC_RESULT)
    result = find(nic, nic.rank, to[1], be64(to[2], to[3]), size, 0)
    if result == NOWHERE or ptx.byteswap_u32(to[0]) != size:
        return LOCAL_PROT_ERR
    if lane == 0:
        if is_64_bits:
            ptx.st_weak_s64(result, ptx.atom_add_acq_rel_sys_s64(cell, be64(words[0], words[1])))  # PAIR network-amo
        else:
            old = ptx.atom_add_acq_rel_sys_s32(cell, ptx.s32(ptx.byteswap_u32(words[0])))  # PAIR network-amo
            ptx.st_weak_s32(result, ptx.s32(ptx.byteswap_u32(old)))
    return NO_ERROR


@device_function
def execute(nic, slot, peer, start, lane):
    """Check an entry and do what it says; all lanes. Returns an error."""
    entry = slot.address
    control = ptx.ld_na_v4(entry)
    what, who, flags = ptx.byteswap_u32(control[0]), ptx.byteswap_u32(control[1]), ptx.byteswap_u32(control[2])
    opcode, opmod, num_segments = what & 0xFF, what >> 24, who & 0xFF
    if what >> 8 & 0xFFFF != slot.number & 0xFFFF or who >> 8 != slot.qpn:
        return LOCAL_QP_OP_ERR  # another entry's, or one of another queue
    if flags & ~CQ_UPDATE != 0 or control[3] != 0:
        return LOCAL_QP_OP_ERR  # a signature, other flags, an immediate, reserved bits
    if opcode == RDMA_WRITE and opmod == 0 and 3 <= num_segments <= 4:
        return execute_write(nic, entry, num_segments, peer, start, lane)
    if opcode == MASKED_FETCH_ADD and num_segments == 4 and opmod in (OPMOD_32_BITS, OPMOD_64_BITS):
        return execute_add(nic, entry, opmod == OPMOD_64_BITS, peer, lane)
    return LOCAL_QP_OP_ERR


@device_function
def complete(qp, index, error):
    """Write the completion of an entry; one thread, which has synchronised with the lanes that wrote."""
    completion = ptx.ld_nc_s64(qp + 8 * COMPLETION)
    opcode = REQ
    if error != NO_ERROR:
        opcode = REQ_ERR
        ptx.st_relaxed_sys_s32(completion + SYNDROME_WORD, ptx.s32(error << 24))
        if error != FLUSHED:
            ptx.st_relaxed_sys_s64(qp + 8 * REFUSED, index << 8 | error)
    counter = index >> 8 & 0xFF | (index & 0xFF) << 8
    ptx.st_release_sys_s32(completion + STATUS_WORD, ptx.s32(opcode << 28 | counter))  # PAIR ibgda-completion


@device_function
def is_lost(troubles, qpn, index):
    return (qpn == troubles.lost_queue_pair and index == troubles.lost_entry) or index > troubles.last_entry


@device_function
def dawdle(troubles, qpn, index, lane):
    """Wait before an entry, and let all lanes see what the doorbell has published; one warp."""
    if lane == 0 and troubles.max_delay_ns > 0:
        until = ptx.globaltimer() + ptx.u32_mod(noise(troubles, qpn, index), troubles.max_delay_ns + 1)
        while ptx.globaltimer() < until:
            pass
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def serve_entry(nic, troubles, qp, index, lane):
    """Serve one entry. Returns the state of the queue pair after it; all lanes the same."""
    qpn, peer = ptx.ld_nc_s64(qp + 8 * QPN), ptx.ld_nc_s64(qp + 8 * PEER)
    if is_lost(troubles, qpn, index):
        return STOPPED
    dawdle(troubles, qpn, index, lane)
    ptx.serving(qpn, index)
    entry = ptx.ld_nc_s64(qp + 8 * ENTRIES) + ENTRY_BYTES * (index & (ptx.ld_nc_s64(qp + 8 * NUM_ENTRIES) - 1))
    wants_completion = (ptx.ld_na_v4(entry)[2] >> 24) & CQ_UPDATE != 0
    start = noise(troubles, qpn, index) if troubles.seed != 0 else 0
    error = execute(nic, Slot(entry, index, qpn), peer, start, lane)
    ptx.syncwarp(ptx.FULL_MASK)
    if lane == 0:
        if error == NO_ERROR:
            ptx.st_relaxed_sys_s32(ptx.ld_nc_s64(qp + 8 * RECEIVED), ptx.s32(index + 1))
        if error != NO_ERROR or wants_completion:
            complete(qp, index, error)
    return RUNS if error == NO_ERROR else FLUSHES


@device_function
def signed_16(difference):
    """What two counters differ by of which 16 bits are known: -2**15 to 2**15 - 1."""
    return (difference + 0x8000 & 0xFFFF) - 0x8000


@device_function
def rung(qp, served):
    """How many entries behind `served` the doorbell names; WRONG if it is another queue's, or the record lags."""
    doorbell = ptx.ld_acquire_sys_s64(ptx.ld_nc_s64(qp + 8 * DOORBELL))  # PAIR ibgda-doorbell
    num_entries = ptx.byteswap_u32(doorbell & 0xFFFFFFFF) >> 8 & 0xFFFF
    record = ptx.byteswap_u32(ptx.ld_relaxed_sys_s32(ptx.ld_nc_s64(qp + 8 * RECORD)))
    is_own = ptx.byteswap_u32(doorbell >> 32 & 0xFFFFFFFF) >> 8 == ptx.ld_nc_s64(qp + 8 * QPN)
    if not is_own or signed_16(record - num_entries) < 0:
        return WRONG
    return max(signed_16(num_entries - served), 0)  # less if they have been served from the record


@device_function
def recorded(qp, served):
    """How many entries behind `served` the record names; WRONG if it has more bits than it may."""
    record = ptx.byteswap_u32(ptx.ld_acquire_sys_s32(ptx.ld_nc_s64(qp + 8 * RECORD)))  # PAIR ibgda-record
    return signed_16(record - served) if record <= 0xFFFF else WRONG


@device_function
def hears_rings(troubles, qpn, served):
    """Whether the NIC hears the doorbell now. If not, it has lost the ring, and reads the record by itself."""
    if troubles.source == FROM_BOTH:
        return noise(troubles, qpn, served) & 1 == 0
    return troubles.source == FROM_DOORBELL


@device_function
def look(troubles, qp):
    """How many entries of a queue pair wait to be served; WRONG if that cannot be so; one thread."""
    num_waiting = ptx.s64(0)
    state, served = ptx.ld_weak_s64(qp + 8 * STATE), ptx.ld_weak_s64(qp + 8 * SERVED)
    if state == RUNS:
        hears = hears_rings(troubles, ptx.ld_nc_s64(qp + 8 * QPN), served)
        num_waiting = rung(qp, served) if hears else recorded(qp, served)
        if num_waiting < 0 or num_waiting > ptx.ld_nc_s64(qp + 8 * NUM_ENTRIES):
            num_waiting = ptx.s64(WRONG)
    elif state == FLUSHES:
        flush(qp, served)
    return num_waiting


@device_function
def flush(qp, served):
    """Complete with an error what comes behind an entry that was refused; one thread."""
    num_entries = max(recorded(qp, served), 0)
    for i in range(num_entries):
        complete(qp, served + i, FLUSHED)
    ptx.st_weak_s64(qp + 8 * SERVED, served + num_entries)


@device_function
def serve(nic, troubles, qp, lane):
    """Serve what has come on a queue pair; one warp. Only lane 0 knows how far it is."""
    num_waiting = ptx.shfl_idx_s32(ptx.FULL_MASK, look(troubles, qp) if lane == 0 else 0, 0)
    if num_waiting != 0:
        index = ptx.shfl_idx_s64(ptx.FULL_MASK, ptx.ld_weak_s64(qp + 8 * SERVED) if lane == 0 else 0, 0)
        last = index + num_waiting
        state = RUNS
        if num_waiting == WRONG:
            state = FLUSHES
            if lane == 0:
                complete(qp, index, LOCAL_QP_OP_ERR)
            index += 1
        while state == RUNS and index < last:
            state = serve_entry(nic, troubles, qp, index, lane)
            index += 1
        if lane == 0:
            ptx.st_weak_s64(qp + 8 * STATE, state)
            ptx.st_weak_s64(qp + 8 * SERVED, index)
            if state == FLUSHES:
                flush(qp, index)


@kernel(max_threads=512)
def software_nic(nic: Nic, troubles: Troubles):
    """Grid and block: any, in multiples of 32 threads. It ends a turn after nic.stop is not 0."""
    lane = ptx.thread_idx() % 32
    num_warps = ptx.grid_dim() * (ptx.block_dim() // 32)
    warp = ptx.block_idx() * (ptx.block_dim() // 32) + ptx.thread_idx() // 32
    deadline = ptx.globaltimer() + nic.limit_ns if nic.limit_ns != 0 else ptx.s64(NEVER)
    must_end = False
    is_over = False
    while not is_over:
        is_over = must_end
        for i in range(warp, nic.num_queue_pairs, num_warps):
            serve(nic, troubles, nic.queue_pairs + QUEUE_PAIR_BYTES * i, lane)
        must_end = ptx.vote_any(ptx.FULL_MASK, lane == 0 and must_stop(nic, deadline))


@device_function
def must_stop(nic, deadline):
    """Whether the NIC is to end; one thread, at the end of a turn. What was rung before then is seen after it."""
    if ptx.ld_relaxed_sys_s32(nic.stop) != 0:
        ptx.fence_acq_rel_sys()
        return True
    return ptx.wait_expired(deadline)  # a GPU goes on at once; the emulator waits here until something has changed
