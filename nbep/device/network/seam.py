"""What a kernel sees of a network: these functions, and nothing else reaches another rank's memory.

cell     written by   with        read by                   with
stage    lanes        st_shared   copy engine and network   after a proxy fence and syncwarp

A place in the buffer is its offset, the same on all ranks. A `queue` orders what goes to one peer: a message that was
put on a queue is there before what is added on the same queue afterwards; queues are not ordered with each other.
Only the network writes a cell that peers add to, as long as one of them may: a NIC and a GPU that change the same
word at the same time lose what one of them did.

What stands behind them is a transport. Each has a type of network, and its own version of each function.

Source: DeepEP csrc/kernels/ibgda_device.cuh (nvshmemi_ibgda_put_nbi_warp, nvshmemi_ibgda_amo_nonfetch_add,
nvshmemi_ibgda_quiet, nvshmemi_get_p2p_ptr)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import by_type, device_function
from nbep.device.types import I32, Sym


class Network(NamedTuple):
    """The ranks that a kernel can reach; other transports have a type of their own."""

    buffer_ptrs: Sym  # [num_ranks] s64: where this rank sees the buffer of each, 0 if it cannot; never changes
    rank: I32
    num_ranks: I32
    own_buffer: Sym  # where this rank sees its own


class Place(NamedTuple):
    """Where a message or what is added goes: an offset at a peer, and on which queue."""

    dst: int
    src: int  # of a message: the place in this rank's buffer that keep_message was given
    peer: int
    queue: int


@device_function
def own_ptr(network, offset):
    """The address of a place in this rank's own buffer."""
    return network.own_buffer + offset


@device_function
def peer_ptr(network, offset, peer):
    """The address at which this rank sees a place in a peer's buffer; 0 if the peer's memory is not mapped."""
    base = ptx.ld_nc_keep_s64(network.buffer_ptrs + 8 * peer)
    return base + offset if base != 0 else 0


@by_type()
def keep_message(network, src_offset, stage, num_bytes, lane):
    """Tell of a message in shared memory that this warp puts next, once or to several peers. All lanes of a warp.

    Args:
        src_offset: where a transport that sends from global memory keeps the message in this rank's buffer; a multiple
            of 16, as `stage` and `num_bytes`
        stage: shared address of the message, which all lanes may read
    """


@by_type()
def put_nbi_warp(network, place, stage, num_bytes, lane):
    """Start to put a message, or a part of it, into a peer's buffer. All lanes of a warp.

    It is on its way at the latest with the next amo_add on the same queue. How many bytes may be put at once, the host
    checks: Transport.check_message.

    Args:
        stage: as for keep_message; the copy engine may read it, too (a proxy fence and a syncwarp come before). It may
            be written again after tma_store_wait_read_all, or after quiet
    """


@by_type()
def quiet(network, lane):
    """Order what this warp has put before what is added on the same queues later. All lanes of a warp.

    Later is what this warp adds, and what others add that have synchronised with it.
    """


@by_type()
def amo_add(network, offset, value, peer, queue, is_behind):
    """Add to an s32 cell in a peer's buffer. One thread.

    Args:
        offset: of the cell, the same in each buffer
        queue: on which it comes behind what was put there before
        is_behind: who sees it also sees what was quiet on the queue before. Otherwise the number is all that it tells
    """


@by_type()
def sends_from_buffer(network):
    """Whether messages leave from this rank's buffer, so that a place is free again only when they have arrived."""


@by_type()
def is_message(network, peer):
    """Whether an add to this peer costs a message of its own."""


@device_function
def further(place, num_bytes):
    """The place of what comes so many bytes later in a message."""
    return Place(place.dst + num_bytes, place.src + num_bytes, place.peer, place.queue)


@device_function
def put_stage(network, place, data, num_bytes, lane):
    """Put what the lanes have written into a stage, and wait until it may be written again; one warp."""
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    keep_message(network, place.src, data, num_bytes, lane)
    put_nbi_warp(network, place, data, num_bytes, lane)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_read_all()
    ptx.syncwarp(ptx.FULL_MASK)
