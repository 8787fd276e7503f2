"""Push: every rank writes to all its peers at once and as fast as it can. What dispatch and combine are held against.

 rank s: src[:] --16-byte stores--> NVLink --> buffer of every peer, a region for each source

 cell     written by   with     read by   with
 src      nobody       -        warps     ld_nc
 region   rank s       st_na    -         (nobody: only the time counts)

The warps of the grid are dealt out to the peers, so that all links are busy: one peer after the other is slower.
"""

from nbep.device.jit import kernel
from nbep.device.primitives import block_dim, block_idx, grid_dim, ld_nc_v4, thread_idx, u32_div, u32_mod
from nbep.device.protocols.copies import copy_row
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32, I64, In

ROW_BYTES = 14336  # as a token of 7168 bf16


@kernel(max_threads=768)
def push(src: In, region_offset: I64, num_rows: I32, peers: Peers):
    """Grid: any. Block: any multiple of 32. Copies num_rows rows of ROW_BYTES to each peer, at region_offset there."""
    num_peers = peers.num_ranks - 1
    warp = block_idx() + grid_dim() * (thread_idx() // 32)
    num_warps_per_peer = u32_div(grid_dim() * (block_dim() // 32), num_peers)
    peer = u32_mod(peers.rank + 1 + u32_mod(warp, num_peers), peers.num_ranks)
    row = u32_div(warp, num_peers)
    if row < num_warps_per_peer:
        region = buffer_of(peers, peer) + region_offset + peers.rank * num_rows * ROW_BYTES
        while row < num_rows:
            copy_row(ld_nc_v4, region + row * ROW_BYTES, src + row * ROW_BYTES, ROW_BYTES, thread_idx() % 32)
            row += num_warps_per_peer
