"""RDMA senders and their coordinator: the first hop of internode dispatch. See dispatch.py.

 (n, l): x[t] --sender--> slot of ring[channel, n] of (d, l), for every node d with a rank that wants the token
                          tails[channel, n] <--coordinator, when all slots below are filled

 cell                 written by          with                     read by             with
 stage of a warp      copy engine         bulk copy                network             after its mbarrier
   its notes          lanes               st_shared                network             after a proxy fence, syncwarp
 slot[k] of (d, l)    sender              put_nbi_warp             forwarder           after tails
 board[w, d]          sender w, lane d    atom_exch_release_cta    coordinator         ld_acquire_cta
                      all, at the start   st_shared 0              all                 after syncthreads
 tails[c, n] of (d,l) coordinator, lane d amo_add, behind slots    forwarder           ld_acquire_sys
 heads[c, d]          (d, l)              amo_add, behind reads    senders, lane d     ld_acquire_sys
 sent[c, d]           coordinator, lane d st_weak                  senders (next call) ld_weak
 send_rdma_head       sender 0            st_weak                  (combine)           -

The warps go through the same tokens of the channel and take them in turn. Each knows without asking which slot a token
has at a node: its index there is the number of tokens before it that go there. The warps finish in any order, but the
tail says that all slots below it are filled: so the coordinator tells only as many as *all* warps are done with. DeepEP
has a window of 32 bits for that, one for each slot behind the tail, under a lock.

A sender waits until each node that its token goes to has a free slot. Only then does it put the token to the first one.

Source: DeepEP csrc/kernels/internode.cu, dispatch (WarpRole::kRDMASender, kRDMASenderCoordinator)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import BOARD, BOARD_ROW, rank_of
from nbep.device.kernels.internode.coordinator import tell_tails, tokens_to_node
from nbep.device.layout.internode import META_WORDS, NODES_PER_WORD, head_offset, recv_row, send_row
from nbep.device.layout.intranode import MAX_NVL_PEERS, locate_notes, note_bytes
from nbep.device.network.seam import keep_message, own_ptr, put_nbi_warp, quiet
from nbep.device.protocols.board import RETIRED, note_progress
from nbep.device.protocols.channels import channel_task_range, goes_to_any
from nbep.device.protocols.notes import Experts, Token, clear_padding, to_stage, write_notes
from nbep.device.protocols.staging import STAGE_BYTES, Row, begin_copy, end_fill
from nbep.device.protocols.totals import wait_total_free
from nbep.device.protocols.waits import RDMA_SENDER_COORDINATOR, RDMA_SENDER_HEAD, Waiter


@device_function
def tokens_for_nodes(inputs, here, token, end, lane):
    """Which of 32 tokens go to the node of a lane: bit j for token + j. And which go anywhere, in every lane."""
    mine = 0
    anywhere = 0
    num_ranks = here.num_rdma_ranks * here.num_nvl_ranks
    for node in range(here.num_rdma_ranks):
        goes = False
        if token + lane < end:
            row = inputs.is_token_in_rank + (token + lane) * num_ranks
            goes = goes_to_any(row + node * here.num_nvl_ranks, here.num_nvl_ranks) != 0
        chosen = ptx.vote_ballot(ptx.FULL_MASK, goes)
        anywhere |= chosen
        if lane == node:
            mine = chosen
    return mine, anywhere


@device_function
def note_rdma_heads(out, here, chosen, index, token, end, lane):
    """Write the slots of 32 tokens at every node, lane j those of token + j; -1 where one does not go."""
    for node in range(here.num_rdma_ranks):
        to_node = ptx.shfl_idx_s32(ptx.FULL_MASK, ptx.s32(chosen), node)
        first = ptx.shfl_idx_s32(ptx.FULL_MASK, index, node)
        if token + lane < end:
            before = ptx.popc_u32(to_node & ((1 << lane) - 1))
            head = first + before if (to_node >> lane) & 1 != 0 else -1
            ptx.st_weak_s32(out.send_rdma_head + 4 * ((token + lane) * here.num_rdma_ranks + node), head)


@device_function
def source_meta(inputs, here, shape, token, lane):
    """In lane i word i of a token's source meta; see layout.internode."""
    word = token if lane == 0 else here.rdma_rank
    row = inputs.is_token_in_rank + token * here.num_rdma_ranks * here.num_nvl_ranks
    k = lane % MAX_NVL_PEERS
    for i in range(META_WORDS, shape.num_src_idx):
        node = NODES_PER_WORD * (i - META_WORDS) + lane // MAX_NVL_PEERS
        wants = 0
        if node < here.num_rdma_ranks and k < here.num_nvl_ranks:
            wants = ptx.ld_nc_u8(row + node * here.num_nvl_ranks + k)
        bits = ptx.vote_ballot(ptx.FULL_MASK, wants != 0)
        if lane == i:
            word = ptx.s32(bits)
    return word


@device_function
def put_part(network, here, shape, nodes, slot, offset, data, num_bytes, lane):
    """Start to put a part of a slot, which is in the stage, to each node of a mask; one warp.

    slot: in lane d the slot at node d; offset: of the part, from the slot's row on
    """
    while nodes != 0:
        node = ptx.ffs_u32(nodes) - 1
        at = ptx.u32_mod(ptx.shfl_idx_s32(ptx.FULL_MASK, slot, node), shape.num_slots)
        dst = recv_row(shape, here.channel, here.rdma_rank, at) + offset
        src = send_row(shape, here.channel, node, at) + offset
        keep_message(network, src, data, num_bytes, lane)
        put_nbi_warp(network, dst, src, data, num_bytes, rank_of(here, node), here.channel, lane)
        nodes &= nodes - 1


@device_function
def send_token(inputs, network, here, shape, sizes, token, nodes, slot, stage, parity, lane):
    """Put a token and its notes to each node of a mask; one warp. Returns the parity of the stage's next fill."""
    row = inputs.x + token * shape.hidden_bytes
    front = note_bytes(shape)
    begin_copy(Row(row, shape.hidden_bytes, front), stage, lane)
    word = source_meta(inputs, here, shape, token, lane)  # while the row is on its way
    ptx.syncwarp(ptx.FULL_MASK)
    notes = locate_notes(stage.data + front, shape)
    write_notes(to_stage(), notes, Token(inputs, sizes, token, Experts(0, sizes.num_experts)), word, shape, lane)
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    done = 0
    while True:
        part = min(shape.hidden_bytes - done, STAGE_BYTES - front)
        parity = end_fill(ptx.ld_nc_v4, Row(row + done, part, front), stage, parity, lane)
        put_part(network, here, shape, nodes, slot, done - front, stage.data, front + part, lane)
        done += part
        if done == shape.hidden_bytes:
            break
        front = 0  # the notes have gone with the first part
        ptx.syncwarp(ptx.FULL_MASK)
        begin_copy(Row(row + done, shape.hidden_bytes - done, front), stage, lane)
    quiet(network, lane)
    return parity


@device_function
def send_tokens(out, inputs, network, progress, bounds, here, shape, sizes, sender, num_senders, stage, lane):
    """Sender: put every num_senders-th token of the channel to the nodes that want it."""
    is_node = lane < here.num_rdma_ranks
    base = 0
    if is_node:
        base = ptx.ld_weak_s32(progress.sent + 4 * (here.channel * here.num_rdma_ranks + lane))
    head = own_ptr(network, head_offset(sizes.cells, here.num_rdma_ranks, here.channel, lane))
    cell = ptx.smem_base() + BOARD + BOARD_ROW * sender + 4 * lane
    clear_padding(stage.data + note_bytes(shape), shape, lane)
    parity = 0
    index = 0  # in lane d: how many tokens of the channel before these 32 go to node d
    free_end = 0  # in lane d: the first slot at node d that is not known to be free
    token, end = channel_task_range(sizes.num_tokens, shape.num_channels, here.channel)
    turn = 0  # whose turn it is with the first of them
    while token < end:
        chosen, anywhere = tokens_for_nodes(inputs, here, token, end, lane)
        if sender == 0 and out.send_rdma_head != 0:
            note_rdma_heads(out, here, chosen, index, token, end, lane)
        own = anywhere & ptx.vote_ballot(ptx.FULL_MASK, ptx.u32_mod(turn + lane, num_senders) == sender)
        while own != 0:
            j = ptx.ffs_u32(own) - 1
            goes = (chosen >> j) & 1 != 0
            slot = index + ptx.popc_u32(chosen & ((1 << j) - 1))
            if is_node:
                note_progress(cell, slot)
            if goes and slot >= free_end:
                peer = rank_of(here, lane)
                waiter = Waiter(RDMA_SENDER_HEAD, peer, here.channel)
                free_end = wait_total_free(head, base, slot, shape.num_slots, bounds, waiter)
            if not ptx.vote_all(ptx.FULL_MASK, not goes or slot < free_end):
                return
            nodes = ptx.vote_ballot(ptx.FULL_MASK, goes)
            parity = send_token(inputs, network, here, shape, sizes, token + j, nodes, slot, stage, parity, lane)
            own &= own - 1
        index += ptx.popc_u32(chosen)
        token += 32
        turn = ptx.u32_mod(turn + 32, num_senders)
    if is_node:
        note_progress(cell, RETIRED)


@device_function
def coordinate_senders(inputs, network, progress, bounds, here, shape, sizes, num_senders, lane):
    """Sender coordinator; one warp, a lane for each node."""
    if lane < here.num_rdma_ranks:
        total = tokens_to_node(inputs.rdma_channel_prefix_matrix, shape.num_channels, here.channel, lane)
        column = ptx.smem_base() + BOARD + 4 * lane
        chunk, site = sizes.num_max_rdma_send_tokens, RDMA_SENDER_COORDINATOR
        tell_tails(network, progress, bounds, here, total, column, num_senders, chunk, sizes.cells, site, lane)
