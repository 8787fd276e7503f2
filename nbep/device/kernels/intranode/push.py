"""Push: every rank writes as fast as it can, to all its peers at once or at home. What dispatch and combine are held
against: the wire, and the way out of an SM, which serves both.

 rank s: src[:] --16-byte stores--> NVLink --> buffer of every peer, a region for each source
         src[:] --16-byte stores--> its own buffer, as many regions behind those

 cell     written by   with     read by   with
 src      no kernel    -        warps     ld_nc
 region   rank s       st_na    -         (never: only the time counts)

The warps of the grid are dealt out to the peers, so that all links are busy: one peer after the other is slower.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.protocols.copies import copy_row
from nbep.device.protocols.peers import CLUSTERS, Peers, buffer_of
from nbep.device.types import I32, I64, In

ROW_BYTES = 14336  # as a token of 7168 bf16
TO_PEERS = 0
AT_HOME = 1
BOTH = 2  # odd warps at home, even ones to the peers: as many bytes each


@kernel(max_threads=768, clusters=CLUSTERS)
def push(src: In, region_offset: I64, num_rows: I32, destination: I32, peers: Peers):
    """Grid: any. Block: any multiple of 64. Copies num_rows rows of ROW_BYTES to each region, from region_offset on."""
    num_peers = peers.num_ranks - 1
    warp = ptx.thread_idx() // 32
    num_warps = ptx.block_dim() // 32
    at_home = destination == AT_HOME
    if destination == BOTH:
        at_home = warp % 2 == 1
        warp //= 2
        num_warps //= 2
    warp = ptx.block_idx() + ptx.grid_dim() * warp
    num_warps_per_peer = ptx.u32_div(ptx.grid_dim() * num_warps, num_peers)
    which = ptx.u32_mod(warp, num_peers)
    row = ptx.u32_div(warp, num_peers)
    if row < num_warps_per_peer:
        dst_rank = peers.rank if at_home else ptx.u32_mod(peers.rank + 1 + which, peers.num_ranks)
        region = peers.num_ranks + which if at_home else peers.rank
        dst = buffer_of(peers, dst_rank) + region_offset + region * num_rows * ROW_BYTES
        while row < num_rows:
            copy_row(ptx.ld_nc_v4, dst + row * ROW_BYTES, src + row * ROW_BYTES, ROW_BYTES, ptx.thread_idx() % 32)
            row += num_warps_per_peer
