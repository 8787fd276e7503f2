"""RDMA senders and their coordinator: the first hop of internode dispatch. See dispatch.py.

 (n, l): x[t] --sender--> slot of ring[channel, n] of (d, l), for every node d with a rank that wants the token
                          tails[channel, n] <--coordinator, when all slots below are filled

 cell                 written by          with                     read by             with
 stage of a warp      copy engine         bulk copy (1)            network             after its mbarrier
   its header         lanes               st_shared                network             after a proxy fence, syncwarp
 slot[k] of (d, l)    sender              put_nbi_warp             forwarder           after tails
 board[w, d]          sender w, lane d    atom_exch_release_cta    coordinator         ld_acquire_cta
                      all, at the start   st_shared 0              all                 after syncthreads
 tails[c, n] of (d,l) coordinator, lane d amo_add, behind slots    forwarder           ld_acquire_sys
 heads[c, d]          (d, l)              amo_add, behind reads    senders, lane d     ld_acquire_sys
 sent[c, d]           coordinator, lane d st_weak                  senders (next call) ld_weak
 send_rdma_head       sender 0            st_weak                  (combine)           -

 (1) If a NIC sends, the lanes have read the stage: the next copy comes after a proxy fence of each, and a syncwarp.

The warps go through the same tokens of the channel and take them in turn. Each knows without asking which slot a token
has at a node: its index there is the number of tokens before it that go there. The warps finish in any order, but the
tail says that all slots below it are filled: so the coordinator tells only as many as *all* warps are done with. DeepEP
has a window of 32 bits for that, one for each slot behind the tail, under a lock.

A sender waits until each node that its token goes to has a free slot. Only then does it put the token to the first one.

Source: DeepEP csrc/kernels/internode.cu, dispatch (WarpRole::kRDMASender, kRDMASenderCoordinator)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import rank_at, tokens_to_node
from nbep.device.kernels.internode.coordinator import Column, board_row, publish_tails, wait_total_free
from nbep.device.kernels.parts.header import Experts, Token, clear_padding, to_stage, write_header
from nbep.device.layout.internode import META_WORDS, NODES_PER_WORD, head_offset, recv_row, send_row
from nbep.device.layout.intranode import MAX_NVL_PEERS, header_bytes, locate_header
from nbep.device.network.seam import Place, keep_message, own_ptr, put_nbi_warp, quiet, sends_from_buffer
from nbep.device.protocols.board import RETIRED, note_progress
from nbep.device.protocols.channels import channel_task_range, goes_to_any
from nbep.device.protocols.copies import Row, begin_copy, end_fill
from nbep.device.protocols.staging import STAGE_BYTES
from nbep.device.protocols.waits import Waiter, site

RDMA_SENDER_HEAD = site(21, "internode dispatch RDMA sender", "head", "free slots in the peer's RDMA ring")
RDMA_SENDER_COORDINATOR = site(22, "internode dispatch sender coordinator", "done", "the senders of its own block")


class Destinations(NamedTuple):
    """Where a token goes: a mask of nodes, and in lane d the slot at node d."""

    nodes: int
    slot: int


@device_function
def tokens_for_nodes(ctx, inputs, token, end):
    """Which of 32 tokens go to the node of a lane: bit j for token + j. And which go anywhere, in every lane."""
    mine = 0
    anywhere = 0
    num_ranks = ctx.here.num_rdma_ranks * ctx.here.num_nvl_ranks
    for node in range(ctx.here.num_rdma_ranks):
        goes = False
        if token + ctx.lane < end:
            row = inputs.is_token_in_rank + (token + ctx.lane) * num_ranks
            goes = goes_to_any(row + node * ctx.here.num_nvl_ranks, ctx.here.num_nvl_ranks) != 0
        chosen = ptx.vote_ballot(ptx.FULL_MASK, goes)
        anywhere |= chosen
        if ctx.lane == node:
            mine = chosen
    return mine, anywhere


@device_function
def note_rdma_heads(ctx, out, chosen, index, token, end):
    """Write the slots of 32 tokens at every node, lane j those of token + j; -1 where one does not go."""
    for node in range(ctx.here.num_rdma_ranks):
        to_node = ptx.shfl_idx_s32(ptx.FULL_MASK, ptx.s32(chosen), node)
        first = ptx.shfl_idx_s32(ptx.FULL_MASK, index, node)
        if token + ctx.lane < end:
            before = ptx.popc_u32(to_node & ((1 << ctx.lane) - 1))
            head = first + before if (to_node >> ctx.lane) & 1 != 0 else -1
            ptx.st_weak_s32(matrix_cell(out.send_rdma_head, token + ctx.lane, node, ctx.here.num_rdma_ranks), head)


@device_function
def source_meta(ctx, inputs, token):
    """In lane i word i of a token's source meta; see layout.internode."""
    here, lane = ctx.here, ctx.lane
    word = token if lane == 0 else here.rdma_rank
    row = inputs.is_token_in_rank + token * here.num_rdma_ranks * here.num_nvl_ranks
    k = lane % MAX_NVL_PEERS
    for i in range(META_WORDS, ctx.rdma.num_src_idx):
        node = NODES_PER_WORD * (i - META_WORDS) + lane // MAX_NVL_PEERS
        wants = 0
        if node < here.num_rdma_ranks and k < here.num_nvl_ranks:
            wants = ptx.ld_nc_u8(row + node * here.num_nvl_ranks + k)
        bits = ptx.vote_ballot(ptx.FULL_MASK, wants != 0)
        if lane == i:
            word = ptx.s32(bits)
    return word


@device_function
def put_part(ctx, to, offset, data, num_bytes):
    """Start to put a part of a slot, which is in the stage, to each destination; one warp.

    offset: of the part, from the slot's row on
    """
    nodes = to.nodes
    while nodes != 0:
        node = ptx.ffs_u32(nodes) - 1
        at = ptx.u32_mod(ptx.shfl_idx_s32(ptx.FULL_MASK, to.slot, node), ctx.rdma.num_slots)
        dst = recv_row(ctx.rdma, ctx.here.channel, ctx.here.rdma_rank, at) + offset
        src = send_row(ctx.rdma, ctx.here.channel, node, at) + offset
        keep_message(ctx.network, src, data, num_bytes, ctx.lane)
        place = Place(dst, src, rank_at(ctx, node), ctx.here.channel)
        put_nbi_warp(ctx.network, place, data, num_bytes, ctx.lane)
        nodes &= nodes - 1
    if sends_from_buffer(ctx.network) and ptx.has_tma():
        ptx.fence_proxy_async_shared()  # the lanes have read the stage: the engine may fill it again


@device_function
def send_token(ctx, inputs, token, to, stage, parity):
    """Put a token and its header to each destination; one warp. Returns the parity of the stage's next fill."""
    hidden_bytes = ctx.rdma.hidden_bytes
    row = inputs.x + token * hidden_bytes
    front = header_bytes(ctx.rdma)
    begin_copy(Row(row, hidden_bytes, front), stage, ctx.lane)
    word = source_meta(ctx, inputs, token)  # while the row is on its way
    ptx.syncwarp(ptx.FULL_MASK)
    header = locate_header(stage.data + front, ctx.rdma)
    experts = Experts(0, ctx.sizes.num_experts)
    write_header(to_stage(), header, Token(inputs, ctx.sizes, token, experts), word, ctx.rdma, ctx.lane)
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    done = 0
    while True:
        part = min(hidden_bytes - done, STAGE_BYTES - front)
        parity = end_fill(ptx.ld_nc_v4, Row(row + done, part, front), stage, parity, ctx.lane)
        put_part(ctx, to, done - front, stage.data, front + part)
        done += part
        if done == hidden_bytes:
            break
        front = 0  # the header has gone with the first part
        ptx.syncwarp(ptx.FULL_MASK)
        begin_copy(Row(row + done, hidden_bytes - done, front), stage, ctx.lane)
    quiet(ctx.network, ctx.lane)
    return parity


@device_function
def send_tokens(ctx, out, inputs, sender, num_senders, stage):
    """Sender: put every num_senders-th token of the channel to the nodes that want it."""
    here, lane = ctx.here, ctx.lane
    is_node = lane < here.num_rdma_ranks
    base = 0
    if is_node:
        base = ptx.ld_weak_s32(matrix_cell(ctx.progress.sent, here.channel, lane, here.num_rdma_ranks))
    head = own_ptr(ctx.network, head_offset(ctx.sizes.cells, here.num_rdma_ranks, here.channel, lane))
    cell = board_row(sender) + 4 * lane
    clear_padding(stage.data + header_bytes(ctx.rdma), ctx.rdma, lane)
    parity = 0
    index = 0  # in lane d: how many tokens of the channel before these 32 go to node d
    free_end = 0  # in lane d: the first slot at node d that is not known to be free
    token, end = channel_task_range(ctx.sizes.num_tokens, here.num_channels, here.channel)
    turn = 0  # whose turn it is with the first of them
    while token < end:
        chosen, anywhere = tokens_for_nodes(ctx, inputs, token, end)
        if sender == 0 and out.send_rdma_head != 0:
            note_rdma_heads(ctx, out, chosen, index, token, end)
        own = anywhere & ptx.vote_ballot(ptx.FULL_MASK, ptx.u32_mod(turn + lane, num_senders) == sender)
        while own != 0:
            j = ptx.ffs_u32(own) - 1
            goes = (chosen >> j) & 1 != 0
            slot = index + ptx.popc_u32(chosen & ((1 << j) - 1))
            if is_node:
                note_progress(cell, slot)
            if goes and slot >= free_end:
                waiter = Waiter(RDMA_SENDER_HEAD, rank_at(ctx, lane), here.channel)
                free_end = wait_total_free(head, base, slot, ctx.rdma.num_slots, ctx.bounds, waiter)
            if not ptx.vote_all(ptx.FULL_MASK, not goes or slot < free_end):
                return
            to = Destinations(ptx.vote_ballot(ptx.FULL_MASK, goes), slot)
            parity = send_token(ctx, inputs, token + j, to, stage, parity)
            own &= own - 1
        index += ptx.popc_u32(chosen)
        token += 32
        turn = ptx.u32_mod(turn + 32, num_senders)
    if is_node:
        note_progress(cell, RETIRED)


@device_function
def coordinate_senders(ctx, inputs, num_senders):
    """Sender coordinator; one warp, a lane for each node."""
    if ctx.lane < ctx.here.num_rdma_ranks:
        total = tokens_to_node(ctx, inputs.rdma_channel_prefix_matrix, ctx.lane)
        publish_tails(ctx, total, Column(board_row(0) + 4 * ctx.lane, num_senders), RDMA_SENDER_COORDINATOR)
