"""What the kernels between nodes take, how blocks of dispatch and combine share memory, and their context."""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.layout.internode import MAX_RDMA_RANKS
from nbep.device.layout.intranode import MAX_NVL_PEERS, RingShape
from nbep.device.network.seam import Network
from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.types import Sym

MAX_WARPS = 20  # of a block: with more of them a thread has 80 registers in place of 96
MOST_WARPS = MAX_RDMA_RANKS + 2  # of a block of combine between so many nodes that MAX_WARPS are not enough
MAX_WARPS_BEFORE_SM90 = 12  # where the warps copy themselves, which takes registers
MAX_TEAMS = 12  # each has a named barrier
MAX_NVL_RINGS = MAX_RDMA_RANKS * MAX_NVL_PEERS

# Shared memory of a block, before what its warps have for themselves.
BATCHES = 0  # [MAX_TEAMS] of 16 bytes: what a team takes next, or the tail that it has seen
BOARD = 16 * MAX_TEAMS  # [MOST_WARPS, MAX_RDMA_RANKS] s32: how far each warp has come with each node's ring
BOARD_ROW = 4 * MAX_RDMA_RANKS
STAGES = (BOARD + MOST_WARPS * BOARD_ROW + 127) // 128 * 128

# In combine there are the lists of a sum before the stages, see `kernels.parts.sums`: rows and their top-k weights.
LISTS = STAGES
WEIGHT_LIST = 8 * (MAX_RDMA_RANKS + 2)  # in a warp's lists: behind its rows, biases among them
LIST_BYTES = (WEIGHT_LIST + 8 * MAX_RDMA_RANKS + 127) // 128 * 128
PUBLISHED = LISTS + MOST_WARPS * LIST_BYTES  # [MAX_NVL_RINGS] s32: the published heads of a forwarder block's NVL rings
COMBINE_STAGES = PUBLISHED + 4 * MAX_NVL_RINGS
SUMS_WORD = MAX_NVL_PEERS  # of a forwarder's row on the board in combine: its sums; before it the NVL rings of its node


class Progress(NamedTuple):
    """A rank's own memory: what the totals of coordinator.py count at the start of a call."""

    sent: Sym  # [MAX_CHANNELS, num_rdma_ranks] s32: slots that this rank has filled at the ranks of other nodes
    received: Sym  # [MAX_CHANNELS, num_rdma_ranks] s32: slots of this rank that it has emptied
    rounds: Sym  # s32: notifies so far
    called: Sym  # s32: what this rank has added to the arrivals of its peers so far
    grid_arrivals: Sym  # s32, see `protocols.grid_barrier`


class Here(NamedTuple):
    """Which rank this is: the nvl_rank-th of node rdma_rank. And the channel of its block, of how many."""

    rdma_rank: int
    nvl_rank: int
    num_rdma_ranks: int
    num_nvl_ranks: int
    channel: int
    num_channels: int


class Context(NamedTuple):
    """What every function of these kernels needs. A kernel makes it once; what it calls takes it first, as `ctx`."""

    network: Network  # this rank among all: the functions of network.seam
    peers: Peers  # this rank in its node
    progress: Progress
    bounds: Bounds
    here: Here
    lane: int
    sizes: tuple  # the kernel's
    nvl: RingShape | None  # the rings inside a node; None in the two notifies, as those between nodes
    rdma: RingShape | None
    call: tuple | None  # parts.calls.Call, which the ranks compare; None in dispatch and combine


@device_function
def find_here(network, peers, channel, num_channels):
    return Here(
        ptx.u32_div(network.rank, peers.num_ranks),
        peers.rank,
        ptx.u32_div(network.num_ranks, peers.num_ranks),
        peers.num_ranks,
        channel,
        num_channels,
    )


@device_function
def rank_at(ctx, node):
    """The rank of a node that this one exchanges with: the one with the same local rank."""
    return node * ctx.here.num_nvl_ranks + ctx.here.nvl_rank


@device_function
def neighbor_at(ctx, nvl_rank):
    """The rank with that local rank in this node."""
    return ctx.here.rdma_rank * ctx.here.num_nvl_ranks + nvl_rank


# What the prefix sums of a notify say of this channel


@device_function
def tokens_to_node(ctx, prefix_matrix, node):
    """How many tokens of this channel there are for a node, or from it; prefix_matrix is inclusive."""
    cell = matrix_cell(prefix_matrix, node, ctx.here.channel, ctx.here.num_channels)
    return ptx.ld_nc_s32(cell) - (ptx.ld_nc_s32(cell - 4) if ctx.here.channel > 0 else 0)


@device_function
def first_passing_row(ctx, inputs, node):
    """The row of send_nvl_head of the first token of this channel from a node."""
    row = ptx.ld_nc_s32(inputs.recv_rdma_rank_prefix_sum + 4 * (node - 1)) if node > 0 else 0
    if ctx.here.channel > 0:
        before = node * ctx.here.num_channels + ctx.here.channel - 1
        row += ptx.ld_nc_s32(inputs.recv_rdma_channel_prefix_matrix + 4 * before)
    return row


@device_function
def rows_from(ctx, inputs, rank):
    """Where the rows of a source rank's channel begin in recv_x, and where those behind them."""
    begins = matrix_cell(inputs.recv_gbl_channel_prefix_matrix, rank, ctx.here.channel, ctx.here.num_channels)
    if ctx.here.channel == ctx.here.num_channels - 1:
        return ptx.ld_nc_s32(begins), ptx.ld_nc_s32(inputs.recv_gbl_rank_prefix_sum + 4 * rank)
    return ptx.ld_nc_s32(begins), ptx.ld_nc_s32(begins + 4)
