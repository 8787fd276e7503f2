"""The transport over NVSHMEM: peers that it maps get plain copies, as with `direct`; the others get its device calls.

 rank s: stage --keep_message: st_na--> message in the buffer of s --put_nbi_warp: putmem_nbi--> in the buffer of r
         ------- amo_add, after quiet: int_atomic_add -------------------------------------> cell in the buffer of r

 cell              written by          with                       read by     with
 message in s      a warp of rank s    st_na_v4, syncwarp         NVSHMEM     putmem_nbi of the same warp
 message in r      NVSHMEM             putmem_nbi                 rank r      after the cell that amo_add has changed
 cell in r         NVSHMEM             int_atomic_add             rank r      ld_acquire_sys, by who waits for it

NVSHMEM orders nothing between two calls of its own: a put and an atomic may take different queues. So `quiet` is
nvshmem_quiet, which returns when the puts have arrived, and an add comes after it. That makes `queue` meaningless here.
nvshmem_quiet is called by one lane, for its warp. Who adds may be another thread that has synchronised with it: hence
the fence before the add, for peers to which NVSHMEM itself stores through a mapping.

A place in the buffer is named by its address here: the symmetric heap has it at the same offset on all ranks, and a
rank's number is NVSHMEM's number of it (its PE).

This module is imported only by those who want NVSHMEM. Its calls are linked in, see `nvshmem_library`; on the emulator
there are none.

Source: NVSHMEM API, nvshmemx_putmem_nbi_warp, nvshmem_quiet, nvshmem_int_atomic_add, nvshmem_ptr
"""

import sys
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, external
from nbep.device.network import direct, provide
from nbep.device.network.nvshmem_library import libraries
from nbep.device.network.seam import own_ptr, peer_ptr
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES
from nbep.device.types import I32, Sym

__all__ = ["NvshmemNetwork", "libraries"]


class NvshmemNetwork(NamedTuple):
    """The ranks that a kernel can reach. The table holds num_ranks addresses and never changes."""

    buffer_ptrs: Sym  # where this rank sees the buffer of each; 0 for those that NVSHMEM's calls reach
    rank: I32  # NVSHMEM's PE too
    num_ranks: I32
    num_remote: I32  # how many of them have 0 in the table
    own_buffer: Sym  # where this rank sees its own


class NeedsGpu(RuntimeError):
    """NVSHMEM was called where there is none: on the emulator."""

    def __init__(self):
        super().__init__("NVSHMEM needs GPUs; on the emulator use transport='direct' or 'ibgda'")


@external("nbep_nvshmem_put_nbi_warp", args=("s64", "s64", "s64", "s32"))
def nvshmem_put_nbi_warp(dst, src, num_bytes, pe):
    """Start to copy bytes of this rank's heap to the same heap of a PE. All lanes of a warp, with equal arguments.

    nvshmemx_putmem_nbi_warp. dst: the place's address on this rank
    """
    raise NeedsGpu


@external("nbep_nvshmem_quiet")
def nvshmem_quiet():
    """Wait until the puts have arrived that this thread has taken part in; one thread. nvshmem_quiet"""
    raise NeedsGpu


@external("nbep_nvshmem_add", args=("s64", "s32", "s32"))
def nvshmem_add(cell, value, pe):
    """Add to an s32 cell of a PE; one thread. nvshmem_int_atomic_add. cell: its address on this rank"""
    raise NeedsGpu


@device_function
def keep_message(network, src_offset, stage, num_bytes, lane):
    """NVSHMEM reads messages from the symmetric heap. Nothing to do if all peers are mapped."""
    if network.num_remote != 0:
        kept = own_ptr(network, src_offset)
        offset = lane * VEC_BYTES
        while offset < num_bytes:
            ptx.st_na_v4(kept + offset, ptx.ld_shared_v4(stage + offset))
            offset += WARP_BYTES
        ptx.syncwarp(ptx.FULL_MASK)


@device_function
def put_nbi_warp(network, place, stage, num_bytes, lane):
    if peer_ptr(network, place.dst, place.peer) != 0:
        direct.put_nbi_warp(network, place, stage, num_bytes, lane)
    else:
        nvshmem_put_nbi_warp(own_ptr(network, place.dst), own_ptr(network, place.src), num_bytes, place.peer)


@device_function
def quiet(network, lane):
    direct.quiet(network, lane)
    if network.num_remote != 0:
        if lane == 0:
            nvshmem_quiet()
        ptx.syncwarp(ptx.FULL_MASK)


@device_function
def amo_add(network, offset, value, peer, queue, is_behind):
    if peer_ptr(network, offset, peer) != 0:
        direct.amo_add(network, offset, value, peer, queue, is_behind)
    else:
        if is_behind:
            # With the add: what direct's release is, to which the acquire belongs.
            ptx.fence_acq_rel_sys()
        nvshmem_add(own_ptr(network, offset), value, peer)


@device_function
def sends_from_buffer(network):
    return network.num_remote != 0


@device_function
def is_message(network, peer):
    return peer_ptr(network, 0, peer) == 0


provide(NvshmemNetwork, sys.modules[__name__])
