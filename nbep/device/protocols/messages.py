"""Messages that a warp makes in a stage and puts into a peer's buffer.

cell     written by   with        read by                   with
stage    lanes        st_shared   copy engine and network   after a proxy fence and syncwarp
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network.seam import keep_message, put_nbi_warp


@device_function
def put_stage(network, dst, src, data, num_bytes, peer, queue, lane):
    """Put what the lanes have written into a stage, and wait until it may be written again; one warp."""
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    keep_message(network, src, data, num_bytes, lane)
    put_nbi_warp(network, dst, src, data, num_bytes, peer, queue, lane)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_read_all()
    ptx.syncwarp(ptx.FULL_MASK)
