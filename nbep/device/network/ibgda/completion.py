"""Completions: how a GPU thread learns which entries of a send queue the NIC is done with.

 cell          written by   with                read by             with
 completion    the NIC      st_release_sys      who waits           ld_acquire_sys
   its syndrome             st_relaxed_sys, before                  ld_relaxed_sys, after it

A queue pair has one completion, which the NIC writes again and again (a collapsed completion queue): it names the last
entry that is done, and with it all before are. 64 bytes, big-endian; what is read of them:

 +54    vendor's syndrome:8, syndrome:8    with an error: why
 +60    index:16                           of the last entry that is done; with an error, the one that failed
 +63    opcode:4 | .. | owner:1            REQ: done; REQ_ERR: failed, and nothing more is served; INVALID: none yet

A queue pair that has refused an entry flushes those behind it: each has an error completion, too, which overwrites the
one that says why. So who reads FLUSHED knows only that this entry or one before it failed; the host asks the NIC.

A completion says that what the entry read may be written again, and that what it wrote is there.

Source: rdma-core providers/mlx5/mlx5dv.h (mlx5_cqe64, mlx5_err_cqe); DeepEP csrc/kernels/ibgda_device.cuh
(ibgda_poll_cq)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.waits import report_fault, site, wait_until

IBGDA_COMPLETION = site(17, "sender on a queue pair", "completion", "the NIC to be done with an entry")
IBGDA_ERROR = site(18, "sender on a queue pair", "completion", "an entry that the NIC has refused")

COMPLETION_BYTES = 64
SYNDROME_WORD = 52  # its last byte
STATUS_WORD = 60  # index, big-endian; signature; opcode and owner
NONE_YET = -1  # a status: index 0xFFFF, opcode INVALID

REQ = 0  # opcodes
REQ_ERR = 13
INVALID = 15

FLUSHED = 0x05  # a syndrome: an entry before this one has been refused


@device_function
def index_of(status):
    """The 16-bit index that a status word names."""
    return (status & 0xFF) << 8 | (status >> 8) & 0xFF


@device_function
def opcode_of(status):
    return (status >> 28) & 0xF


@device_function
def is_done(status, index):
    """Whether an entry, by its number in the queue, is done. At most 2**15 entries may be under way."""
    return opcode_of(status) != REQ_ERR and (index_of(status) - index) & 0xFFFF < 0x8000


@device_function
def syndrome_at(completion):
    return (ptx.ld_relaxed_sys_s32(completion + SYNDROME_WORD) >> 24) & 0xFF


@device_function
def has_ended(status, index):
    """Whether an entry is done, or the queue pair has refused one."""
    return is_done(status, index) or opcode_of(status) == REQ_ERR


@device_function
def wait_done(network, completion, peer, queue, index):
    """Wait until an entry is done; one thread. Returns whether it is. network has the fields of Bounds."""
    load = ptx.ld_acquire_sys_s32  # PAIR ibgda-completion
    status, ended = wait_until(load, completion + STATUS_WORD, has_ended, index, network, ptx.wait_expired)
    if opcode_of(status) == REQ_ERR:
        report_fault(network, IBGDA_ERROR, peer, queue, index_of(status), syndrome_at(completion))
        return False
    if not ended:
        report_fault(network, IBGDA_COMPLETION, peer, queue, index & 0xFFFF, index_of(status))
    return ended
