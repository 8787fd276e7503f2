"""The software NIC: a kernel that serves the send queues of one rank, where there is no card to do it.

 the rank's GPU                 the NIC of the rank                                        the peer
 entries, record, doorbell ---> look: doorbell, record
                                decode an entry, check it, its keys and its bounds
                                write: bytes from this rank's memory ---------------------> bytes in its buffer
                                fetch-and-add: ------------------------------------------> a cell, behind the bytes
                                ---> the old value
 completion <------------------ done, or an error, and then nothing more on this queue

 cell          written by      with                      read by          with
 doorbell      GPU             st_release_sys            lane 0           ld_acquire_sys
 record        GPU             st_relaxed_sys            lane 0           ld_relaxed_sys
 entry, bytes  GPU             st_na, then the doorbell  all lanes        ld_na, after a syncwarp
 bytes there   all lanes       st_na, st_weak            the peer         after an atomic or a completion
 old value     lane 0          st_weak                   GPU              ld_weak, after the completion
   syndrome    lane 0          st_weak                   GPU              the same
 cell there    lane 0          atom_add_acq_rel_sys      the peer         ld_acquire_sys
 received      lane 0          st_relaxed_sys            the peer's host  when a wait was over time
 completion    lane 0          st_release_sys            GPU              ld_acquire_sys
 served, state lane 0          st_weak                   lane 0           ld_weak; one lane serves a queue pair
 queue pairs, regions   the host, before the launch      all lanes        ld_nc
 stop          the host                                  lane 0           ld_relaxed_sys, then fence_acq_rel_sys

A warp serves each queue pair, so nothing orders two of them. What RDMA promises is all that a reader gets: the bytes of
a write come in any order, and only an atomic or a completion of the same queue pair says that they are there. The lanes
begin in the middle of a write, where `Troubles` say so, and wait before each entry.

Addresses and keys are checked as a card does: an entry carries a key, the key names a region of somebody's memory, its
bounds and what may be done there. The NIC has its own address of each region. What a card does and this one does not is
refused, as an entry that a card does not know: other opcodes, and adds of several fields in one number.

Source: the mlx5 programmer's manual, "Work Queue Elements"; rdma-core providers/mlx5/mlx5dv.h (MLX5_CQE_SYNDROME_*);
the InfiniBand specification, "Reliable Connection", ordering of messages
"""

from typing import NamedTuple

from nbep.device.jit import device_function, kernel
from nbep.device.network.ibgda.completion import REQ, REQ_ERR, STATUS_WORD, SYNDROME_WORD
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
)
from nbep.device.primitives import (
    FULL_MASK,
    atom_add_acq_rel_sys_s32,
    atom_add_acq_rel_sys_s64,
    block_dim,
    block_idx,
    byteswap_u32,
    fence_acq_rel_sys,
    globaltimer,
    grid_dim,
    ld_acquire_sys_s64,
    ld_na_u8,
    ld_na_v4,
    ld_nc_s64,
    ld_relaxed_sys_s32,
    ld_weak_s64,
    s32,
    s64,
    serving,
    shfl_idx_s32,
    shfl_idx_s64,
    st_na_v4,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    st_weak_s32,
    st_weak_s64,
    st_weak_u8,
    syncwarp,
    thread_idx,
    u32_mod,
    vote_any,
    wait_expired,
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
NUM_WORDS = 16
QUEUE_PAIR_BYTES = 8 * NUM_WORDS

RUNS = 0  # states
STOPPED = 1

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


NO_ENTRY = (1 << 31) - 1


class Troubles(NamedTuple):
    """What a NIC is told to do badly. Entries are counted from 0 on their queue pair; NO_ENTRY for none."""

    seed: I64
    max_delay_ns: I32  # before each entry: 0 to so long
    lost_queue_pair: I32  # whose number: the entry and all behind it are never served
    lost_entry: I32
    last_entry: I32  # after which every queue pair stops


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
    return s64(byteswap_u32(high) << 32 | byteswap_u32(low))


@device_function
def find(nic, rank, key, address, num_bytes, rights):
    """Where the NIC sees num_bytes at an address of a rank's, if the key is that of a region that holds them all."""
    key = byteswap_u32(key)
    index = key >> 8
    here = s64(NOWHERE)
    if index < nic.num_regions:
        region = nic.regions + REGION_BYTES * (rank * nic.num_regions + index)
        begin = ld_nc_s64(region + 8 * BEGIN)
        is_inside = address >= begin and address + num_bytes <= ld_nc_s64(region + 8 * END)
        may = ld_nc_s64(region + 8 * RIGHTS) & rights == rights
        if ld_nc_s64(region + 8 * KEY) == key and is_inside and may:
            here = ld_nc_s64(region + 8 * HERE) + address - begin
    return here


@device_function
def move(dst, src, num_bytes, start, lane):
    """Copy bytes, beginning with any slab; one warp."""
    if (dst | src | num_bytes) & 15 == 0:
        num_slabs = (num_bytes + SLAB_BYTES - 1) // SLAB_BYTES
        for i in range(num_slabs):
            offset = SLAB_BYTES * u32_mod(i + start, num_slabs) + 16 * lane
            if offset < num_bytes:
                st_na_v4(dst + offset, ld_na_v4(src + offset))
    else:
        for i in range(lane, num_bytes, 32):
            st_weak_u8(dst + i, ld_na_u8(src + i))


@device_function
def write_data(nic, segment, remote, start, lane):
    """Move what one data segment names to where it goes. Returns an error, and how many bytes it were."""
    words = ld_na_v4(segment)
    num_bytes = byteswap_u32(words[0])
    if num_bytes & INLINE != 0:
        num_bytes &= INLINE - 1
        if num_bytes > ENTRY_BYTES - DATA - 4:
            return LOCAL_LENGTH_ERR, 0
        for i in range(lane, num_bytes, 32):
            st_weak_u8(remote + i, ld_na_u8(segment + 4 + i))
        return NO_ERROR, num_bytes
    src = find(nic, nic.rank, words[1], be64(words[2], words[3]), num_bytes, 0)
    if src == NOWHERE:
        return LOCAL_PROT_ERR, 0
    move(remote, src, num_bytes, start, lane)
    return NO_ERROR, num_bytes


@device_function
def bytes_of(segment):
    """How many bytes a data segment names."""
    return byteswap_u32(ld_na_v4(segment)[0]) & (INLINE - 1)


@device_function
def execute_write(nic, entry, num_segments, peer, start, lane):
    """An RDMA write. Returns an error."""
    where = ld_na_v4(entry + REMOTE_ADDRESS)
    is_inline = byteswap_u32(ld_na_v4(entry + DATA)[0]) & INLINE != 0
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
    error = NO_ERROR
    while segment < last and error == NO_ERROR:
        error, moved = write_data(nic, segment, remote, start, lane)
        remote += moved
        segment += SEGMENT_BYTES
    return error


@device_function
def execute_add(nic, entry, is_64_bits, peer, lane):
    """A fetch-and-add, behind all that this queue pair has written. Returns an error."""
    words = ld_na_v4(entry + ATOMIC)
    boundary = words[2] | words[3] if is_64_bits else words[1]
    if boundary != 0:
        return LOCAL_QP_OP_ERR
    size = 8 if is_64_bits else 4
    where = ld_na_v4(entry + REMOTE_ADDRESS)
    address = be64(where[0], where[1])
    if address & (size - 1) != 0:
        return REMOTE_INVAL_REQ_ERR
    cell = find(nic, peer, where[2], address, size, REMOTE_ATOMIC)
    if cell == NOWHERE:
        return REMOTE_ACCESS_ERR
    to = ld_na_v4(entry + ATOMIC_RESULT)
    result = find(nic, nic.rank, to[1], be64(to[2], to[3]), size, 0)
    if result == NOWHERE or byteswap_u32(to[0]) != size:
        return LOCAL_PROT_ERR
    if lane == 0:
        if is_64_bits:
            st_weak_s64(result, atom_add_acq_rel_sys_s64(cell, be64(words[0], words[1])))  # PAIR network-amo
        else:
            old = atom_add_acq_rel_sys_s32(cell, s32(byteswap_u32(words[0])))  # PAIR network-amo
            st_weak_s32(result, s32(byteswap_u32(old)))
    return NO_ERROR


@device_function
def execute(nic, entry, index, qpn, peer, start, lane):
    """Check an entry and do what it says; all lanes. Returns an error."""
    control = ld_na_v4(entry)
    what, who = byteswap_u32(control[0]), byteswap_u32(control[1])
    opcode, opmod, num_segments = what & 0xFF, what >> 24, who & 0x3F
    if what >> 8 & 0xFFFF != index & 0xFFFF or who >> 8 != qpn:
        return LOCAL_QP_OP_ERR  # another entry's, or one of another queue
    if opcode == RDMA_WRITE and 3 <= num_segments <= 4:
        return execute_write(nic, entry, num_segments, peer, start, lane)
    if opcode == MASKED_FETCH_ADD and num_segments == 4 and opmod in (OPMOD_32_BITS, OPMOD_64_BITS):
        return execute_add(nic, entry, opmod == OPMOD_64_BITS, peer, lane)
    return LOCAL_QP_OP_ERR


@device_function
def complete(qp, index, error):
    """Write the completion of an entry; one thread, which has synchronised with the lanes that wrote."""
    completion = ld_nc_s64(qp + 8 * COMPLETION)
    opcode = REQ
    if error != NO_ERROR:
        opcode = REQ_ERR
        st_weak_s32(completion + SYNDROME_WORD, s32(error << 24))
    counter = index >> 8 & 0xFF | (index & 0xFF) << 8
    st_release_sys_s32(completion + STATUS_WORD, s32(opcode << 28 | counter))  # PAIR ibgda-completion


@device_function
def is_lost(troubles, qpn, index):
    return (qpn == troubles.lost_queue_pair and index == troubles.lost_entry) or index > troubles.last_entry


@device_function
def dawdle(troubles, qpn, index, lane):
    """Wait before an entry, and let all lanes see what the doorbell has published; one warp."""
    if lane == 0 and troubles.max_delay_ns > 0:
        until = globaltimer() + u32_mod(noise(troubles, qpn, index), troubles.max_delay_ns + 1)
        while globaltimer() < until:
            pass
    syncwarp(FULL_MASK)


@device_function
def serve_entry(nic, troubles, qp, index, lane):
    """Serve one entry. Returns whether the queue pair goes on; all lanes do alike."""
    qpn, peer = ld_nc_s64(qp + 8 * QPN), ld_nc_s64(qp + 8 * PEER)
    if is_lost(troubles, qpn, index):
        return False
    dawdle(troubles, qpn, index, lane)
    serving(qpn, index)
    entry = ld_nc_s64(qp + 8 * ENTRIES) + ENTRY_BYTES * (index & (ld_nc_s64(qp + 8 * NUM_ENTRIES) - 1))
    wants_completion = (ld_na_v4(entry)[2] >> 24) & CQ_UPDATE != 0
    start = noise(troubles, qpn, index) if troubles.seed != 0 else 0
    error = execute(nic, entry, index, qpn, peer, start, lane)
    syncwarp(FULL_MASK)
    if lane == 0:
        if error == NO_ERROR:
            st_relaxed_sys_s32(ld_nc_s64(qp + 8 * RECEIVED), s32(index + 1))
        if error != NO_ERROR or wants_completion:
            complete(qp, index, error)
    return error == NO_ERROR


@device_function
def rung(qp):
    """How many entries the queue has, modulo 2**16, as doorbell and record say; -1 if the record lags; one thread."""
    doorbell = ld_acquire_sys_s64(ld_nc_s64(qp + 8 * DOORBELL))  # PAIR ibgda-doorbell
    num_entries = byteswap_u32(doorbell & 0xFFFFFFFF) >> 8 & 0xFFFF
    record = byteswap_u32(ld_relaxed_sys_s32(ld_nc_s64(qp + 8 * RECORD))) & 0xFFFF
    return num_entries if (record - num_entries) & 0xFFFF < 0x8000 else -1


@device_function
def look(qp):
    """How many entries of a queue pair wait to be served, -1 if the record lags; one thread."""
    if ld_weak_s64(qp + 8 * STATE) != RUNS:
        return 0
    num_entries = rung(qp)
    return (num_entries - ld_weak_s64(qp + 8 * SERVED)) & 0xFFFF if num_entries >= 0 else -1


@device_function
def serve(nic, troubles, qp, lane):
    """Serve what has come on a queue pair; one warp. Only lane 0 knows how far it is."""
    num_waiting = shfl_idx_s32(FULL_MASK, look(qp) if lane == 0 else 0, 0)
    if num_waiting != 0:
        index = shfl_idx_s64(FULL_MASK, ld_weak_s64(qp + 8 * SERVED) if lane == 0 else 0, 0)
        goes_on = num_waiting > 0
        if lane == 0 and not goes_on:
            complete(qp, index, LOCAL_QP_OP_ERR)
        last = index + num_waiting
        while goes_on and index < last:
            goes_on = serve_entry(nic, troubles, qp, index, lane)
            index += 1
        if lane == 0:
            st_weak_s64(qp + 8 * SERVED, index)
            st_weak_s64(qp + 8 * STATE, RUNS if goes_on else STOPPED)


@kernel(max_threads=512)
def software_nic(nic: Nic, troubles: Troubles):
    """Grid and block: any, in multiples of 32 threads. It ends a turn after nic.stop is not 0."""
    lane = thread_idx() % 32
    num_warps = grid_dim() * (block_dim() // 32)
    warp = block_idx() * (block_dim() // 32) + thread_idx() // 32
    deadline = globaltimer() + nic.limit_ns if nic.limit_ns != 0 else s64(NEVER)
    must_end = False
    is_over = False
    while not is_over:
        is_over = must_end
        for i in range(warp, nic.num_queue_pairs, num_warps):
            serve(nic, troubles, nic.queue_pairs + QUEUE_PAIR_BYTES * i, lane)
        must_end = vote_any(FULL_MASK, lane == 0 and must_stop(nic, deadline))


@device_function
def must_stop(nic, deadline):
    """Whether the NIC is to end; one thread, at the end of a turn. What was rung before then is seen after it."""
    if ld_relaxed_sys_s32(nic.stop) != 0:
        fence_acq_rel_sys()
        return True
    return wait_expired(deadline)  # a GPU goes on at once; the emulator waits here until something has changed
