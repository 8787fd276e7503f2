"""The transport for peers whose buffers lie in the host's memory, which every GPU maps; see `seam`.

 rank s: stage --put_nbi_warp: bulk copy, or st_na--> message in the buffer of rank r
         ------- amo_add, after quiet -------------> cell in the buffer of rank r

 cell        written by          with                          read by     with
 message     a warp of rank s    bulk copy, or st_na           rank r      after the cell that amo_add has changed
 cell        a thread of rank s  ld_relaxed_sys, st_release_sys  rank r    ld_acquire_sys, by who waits for it
             and if it stands alone  st_relaxed_sys

CUDA promises no atomics there, only that loads and stores are whole: see docs/architecture.md, "Memory of the host". So
what is added is loaded, summed and stored. It takes that no two threads add to one cell at the same time: an add is a
message, and parts of a count are added up on the GPU before (parts.arrivals.notify). Whoever adds next comes behind
the one before: in the order of the stream, or after its owner has emptied the cell and said so by a credit.
"""

import sys

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network import provide
from nbep.device.network.direct import keep_message, put_nbi_warp, quiet, sends_from_buffer
from nbep.device.network.seam import Network, peer_ptr

__all__ = ["HostNetwork", "amo_add", "is_message", "keep_message", "put_nbi_warp", "quiet", "sends_from_buffer"]


class HostNetwork(Network):
    """The same for ranks whose buffers lie in the host's memory, where only loads and stores are promised."""

    __slots__ = ()


@device_function
def amo_add(network, offset, value, peer, queue, is_behind):
    cell = peer_ptr(network, offset, peer)
    total = ptx.s32(ptx.ld_relaxed_sys_s32(cell) + value)
    if is_behind:
        ptx.st_release_sys_s32(cell, total)  # PAIR network-amo: the messages before it
    else:
        ptx.st_relaxed_sys_s32(cell, total)


@device_function
def is_message(network, peer):
    return True


provide(HostNetwork, sys.modules[__name__])
