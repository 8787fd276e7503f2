"""Both symmetric buffers of one rank in the normal mode between nodes.

Rank (n, l) is the one with rdma_rank n, its node, and nvl_rank l, its local rank.

 RDMA buffer
   offset 0               recv: slots [num_channels, num_rdma_ranks, num_slots], from rank (n, own l)
                          send: slots of the same number, where what goes there is kept, if it leaves from the buffer
   cells                  arrived [num_rdma_ranks] s32
                          tails, heads [MAX_CHANNELS, num_rdma_ranks] s32 each
                          count messages: recv [2, num_rdma_ranks], send [2, num_rdma_ranks]
                          calls that differ [num_rdma_ranks]
 NVL buffer
   offset 0               counts [2, num_nvl_ranks]: what each rank of the node has learned for the owner
                          rings, as inside a node: see layout.intranode

 a count message          from (n, l) to (d, l), s32 words: tokens of channels 0 to c to each rank (d, k)
                          [num_nvl_ranks, num_channels]; the same to node d, where a token counts once [num_channels];
                          tokens of each expert of the node [num_nvl_ranks, num_local_experts]
 counts                   from (d, l) to (d, k): tokens of channels 0 to c from each rank (n, l) [num_rdma_ranks,
                          num_channels]; tokens of each expert of the owner [num_local_experts]

Rings at both levels have slots of one form, that of a ring inside a node. Its src_idx are the words of the source meta:
the token's index at its rank, the rdma_rank of that rank, then bit k of byte d of the rest: the token goes to rank
(d, k). So the same bytes go to every node, and a forwarder hands on a slot as it came.

The ring (channel, n) in the RDMA buffer of (d, l) carries what (n, l) sends: tokens in dispatch, sums in combine. Its
slots count from 0 in every call. Its cells count on from call to call: tails[channel, n], at (d, l), says how many
slots all calls together have filled, and heads[channel, d], at (n, l), how many they have freed. No kernel resets
what a network adds to.

The cells lie behind num_rdma_bytes, and behind those of the low-latency mode: the slots are all that the modes share.

In dispatch the ring (channel, l) of the NVL buffer of (d, k) carries what (d, l) forwards to it. In combine there is
one for each node that the tokens came from, so that no row stands behind one for another node: ring (channel,
n * num_nvl_ranks + k) of (d, l) carries rows of (d, k) for rank (n, l).

Source: DeepEP csrc/kernels/internode.cu (SourceMeta, get_rdma_clean_meta, get_nvl_clean_meta, and the comments at "RDMA
symmetric layout" and "NVL buffer layouts")
"""

from functools import lru_cache

from nbep.device.jit import device_function
from nbep.device.layout.intranode import (
    ALIGNMENT_BYTES,
    CALL_BYTES,
    MAX_LOCAL_EXPERTS,
    MAX_NVL_PEERS,
    RINGS,
    RingShape,
    align_up,
    header_bytes,
    num_nvl_bytes_needed,
    slot_bytes,
)

MAX_RDMA_RANKS = 20  # as many as DeepEP has settings for; a block of combine has a warp for each, and two more
MAX_CHANNELS = 80
META_WORDS = 2  # before the bits: token index, rdma_rank
NODES_PER_WORD = 4  # whose ranks have their bits in one word
MAX_COUNTS = (MAX_NVL_PEERS + 1) * MAX_CHANNELS + MAX_NVL_PEERS * MAX_LOCAL_EXPERTS
COUNT_MESSAGE_BYTES = align_up(4 * MAX_COUNTS, ALIGNMENT_BYTES)


@device_function
def num_meta_words(num_rdma_ranks):
    """Words of the source meta: the num_src_idx of a ring's shape."""
    return META_WORDS + (num_rdma_ranks + NODES_PER_WORD - 1) // NODES_PER_WORD


@device_function
def bits_word(rdma_rank):
    """Which word of the source meta has the bits of a node's ranks."""
    return META_WORDS + rdma_rank // NODES_PER_WORD


@device_function
def bits_shift(rdma_rank):
    """Where in that word they begin."""
    return MAX_NVL_PEERS * (rdma_rank % NODES_PER_WORD)


# The RDMA buffer


@device_function
def recv_row(shape, channel, rdma_rank, slot):
    """Offset of the row of a slot that a node's rank fills, behind its header; shape: of the RDMA rings."""
    ring = channel * shape.num_ranks + rdma_rank
    return (ring * shape.num_slots + slot) * slot_bytes(shape) + header_bytes(shape)


@device_function
def send_row(shape, channel, rdma_rank, slot):
    """Offset of the place where this rank keeps what it sends to that slot at a node's rank."""
    return recv_row(shape, shape.num_channels, 0, 0) + recv_row(shape, channel, rdma_rank, slot) - header_bytes(shape)


@device_function
def arrived_offset(cells, rdma_rank):
    """The cell that a node's rank adds to when its part of a notify is here."""
    return cells + 4 * rdma_rank


@device_function
def tail_offset(cells, num_rdma_ranks, channel, rdma_rank):
    """The cell that counts what a node's rank has filled here."""
    return cells + 4 * (num_rdma_ranks * (1 + channel) + rdma_rank)


@device_function
def head_offset(cells, num_rdma_ranks, channel, rdma_rank):
    """The cell that counts what a node's rank has freed of what this rank has filled there."""
    return cells + 4 * (num_rdma_ranks * (1 + MAX_CHANNELS + channel) + rdma_rank)


@device_function
def message_offset(cells, num_rdma_ranks, parity, rdma_rank):
    """Where the count message of a node's rank comes; with parity + 2: where this rank keeps the one for that node."""
    messages = align_up(4 * num_rdma_ranks * (1 + 2 * MAX_CHANNELS), ALIGNMENT_BYTES)
    return cells + messages + (parity * num_rdma_ranks + rdma_rank) * COUNT_MESSAGE_BYTES


@device_function
def message_words(num_nvl_ranks, num_channels, num_local_experts):
    """Words of a count message."""
    return (num_nvl_ranks + 1) * num_channels + num_nvl_ranks * num_local_experts


@device_function
def call_offset(cells, num_rdma_ranks, rank):
    """Where the words of a rank come if calls differ."""
    return message_offset(cells, num_rdma_ranks, 4, 0) + CALL_BYTES * rank


def cells_bytes(num_rdma_ranks: int, num_ranks: int) -> int:
    """Bytes of all cells."""
    return align_up(call_offset(0, num_rdma_ranks, num_ranks), ALIGNMENT_BYTES)


# The NVL buffer


@device_function
def counts_bytes(num_rdma_ranks):
    """Room for what one rank tells another one of its node. It is the same in all calls: a rank may be one ahead."""
    return align_up(4 * (num_rdma_ranks * MAX_CHANNELS + MAX_LOCAL_EXPERTS), ALIGNMENT_BYTES)


@device_function
def rings_offset(num_rdma_ranks, num_nvl_ranks):
    """Where the NVL buffer's rings begin, less what a buffer inside a node has before its own."""
    return 2 * num_nvl_ranks * counts_bytes(num_rdma_ranks) - RINGS


@lru_cache(maxsize=1024)
def num_nvl_bytes_needed_between_nodes(shape: RingShape, num_rdma_ranks: int, num_nvl_ranks: int) -> int:
    """Bytes of NVL buffer that rings of this shape take, a multiple of ALIGNMENT_BYTES."""
    return rings_offset(num_rdma_ranks, num_nvl_ranks) + num_nvl_bytes_needed(shape)


@lru_cache(maxsize=1024)
def num_rdma_bytes_needed(shape: RingShape) -> int:
    """Bytes of RDMA buffer that rings of this shape take."""
    return 2 * shape.num_ranks * shape.num_channels * shape.num_slots * slot_bytes(shape)
