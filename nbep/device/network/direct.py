"""The transport for peers whose memory is mapped: over NVLink, on the same card, on the emulator.

 rank s: stage --put_nbi_warp: bulk copy, or st_na--> message in the buffer of rank r
         ------- amo_add, after quiet -------------> cell in the buffer of rank r

 cell        written by          with                    read by     with
 message     a warp of rank s    bulk copy, or st_na     rank r      after the cell that amo_add has changed
 cell        a thread of rank s  atom_add_release_sys    rank r      ld_acquire_sys, by who waits for it
             and if it stands alone  atom_add_relaxed_sys

A bulk copy is done when tma_store_wait_all returns to the lane that started it; a release orders plain stores.
Whoever adds speaks for the warps that it has synchronised with: their messages come before what it adds.
"""

import sys

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network import provide
from nbep.device.network.seam import Network, peer_ptr
from nbep.device.protocols.staging import VEC_BYTES, WARP_BYTES

__all__ = ["Network"]


@device_function
def keep_message(network, src_offset, stage, num_bytes, lane):
    """Nothing to do: messages leave from shared memory."""


@device_function
def put_nbi_warp(network, place, stage, num_bytes, lane):
    dst = peer_ptr(network, place.dst, place.peer)
    if ptx.has_tma():
        if lane == 0:
            ptx.tma_store_1d(dst, stage, num_bytes)
            ptx.tma_store_commit()
    else:
        offset = lane * VEC_BYTES
        while offset < num_bytes:
            ptx.st_na_v4(dst + offset, ptx.ld_shared_v4(stage + offset))
            offset += WARP_BYTES


@device_function
def quiet(network, lane):
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def amo_add(network, offset, value, peer, queue, is_behind):
    """A number that stands alone need not wait for what is on its way: a release waits for all that its SM has sent."""
    cell = peer_ptr(network, offset, peer)
    if is_behind:
        ptx.atom_add_release_sys_s32(cell, value)  # PAIR network-amo: the messages before it
    else:
        ptx.atom_add_relaxed_sys_s32(cell, value)


@device_function
def sends_from_buffer(network):
    return False


@device_function
def is_message(network, peer):
    return False


provide(Network, sys.modules[__name__])
