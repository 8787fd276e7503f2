"""Names of the cells in the buffers, for reports and traces: inside a node, between nodes, low latency."""

from nbep.device.alignment import align_up
from nbep.device.layout.internode import (
    COUNT_MESSAGE_BYTES,
    MAX_CHANNELS,
    call_offset,
    counts_bytes,
    message_offset,
    num_rdma_bytes_needed,
    rings_offset,
)
from nbep.device.layout.intranode import (
    CALL_BYTES,
    CALL_ROWS,
    EXPERT_COUNTS,
    NUM_RING_CELLS,
    RINGS,
    Header,
    RingShape,
    header_bytes,
    locate_header,
    locate_ring,
    slot_bytes,
)
from nbep.device.layout.low_latency import (
    ARRIVALS,
    BARRIER_SIGNALS,
    CALLS,
    COUNTS_BYTES,
    CREDITS,
    MAX_EXPERTS,
    NUM_HALVES,
    WORDS_OF_CALL,
    WORDS_OF_LINE,
    pointer_table,
    quarter_bytes,
)
from nbep.device.protocols.peers import describe_peers


def describe_offset(shape: RingShape | None, num_ranks: int, num_nvl_bytes: int, offset: int) -> str:
    """Name the cell at a byte offset of the buffer, for reports. shape is that of the latest launch, if any."""
    if offset >= num_nvl_bytes:
        trailer = offset - num_nvl_bytes
        if trailer >= CALL_ROWS:
            peer, byte = divmod(trailer - CALL_ROWS, CALL_BYTES)
            return f"call[rank {peer}] word {byte // 4}"
        return describe_peers(trailer)
    if num_nvl_bytes <= RINGS:  # no room for a ring: it holds something else
        return f"buffer + {offset}"
    if offset < EXPERT_COUNTS:
        src, dst = divmod(offset // 4, num_ranks)
        return f"rank_counts[src {src}, dst {dst}]"
    if offset < RINGS:
        return f"expert_counts word {(offset - EXPERT_COUNTS) // 4}"
    return describe_ring(shape, offset)


def describe_ring(shape: RingShape | None, offset: int) -> str:
    """Name the cell of a ring at a byte offset from RINGS up."""
    if shape is None:
        return f"buffer + {offset}"
    num_rings = shape.num_channels * shape.num_ranks
    cell, ring = divmod((offset - RINGS) // 4, num_rings)
    if cell < NUM_RING_CELLS:
        channel, src = divmod(ring, shape.num_ranks)
        return f"{('start', 'end', 'head', 'tail')[cell]}[channel {channel}, src {src}]"
    row = header_bytes(shape)
    slot, byte = divmod(offset - locate_ring(0, shape, 0, 0).x + row, slot_bytes(shape))
    ring, slot = divmod(slot, shape.num_slots)
    if not 0 <= ring < num_rings:
        return f"buffer + {offset} (padding)"
    channel, src = divmod(ring, shape.num_ranks)
    part, at = part_of_slot(shape, byte)
    return f"{part}[channel {channel}, src {src}, slot {slot}]" + (f" + {at}" if part != "padding" else "")


def part_of_slot(shape: RingShape, byte: int) -> tuple[str, int]:
    """What a byte of a slot belongs to, and which byte of that it is."""
    row = header_bytes(shape)
    sizes = (8 * shape.num_topk, 4 * shape.num_topk, 4 * shape.num_scales, 4 * shape.num_src_idx, shape.hidden_bytes)
    for name, start, size in zip((*Header._fields, "x"), (*locate_header(row, shape), row), sizes, strict=True):
        if start <= byte < start + size:
            return name, byte - start
    return "padding", byte


# Between nodes


def describe_rdma_offset(shape: RingShape | object | None, num_rdma_ranks: int, cells: int, offset: int) -> str:
    """Name the cell at a byte offset of the RDMA buffer. shape is that of the latest launch, if it was of this mode."""
    if offset >= cells:
        return _describe_cell(num_rdma_ranks, offset - cells)
    if not isinstance(shape, RingShape) or offset >= num_rdma_bytes_needed(shape):
        return f"buffer + {offset}"
    area, byte = divmod(offset, num_rdma_bytes_needed(shape) // 2)
    slot, byte = divmod(byte, slot_bytes(shape))
    ring, slot = divmod(slot, shape.num_slots)
    channel, node = divmod(ring, shape.num_ranks)
    part, at = part_of_slot(shape, byte)
    return f"{('recv', 'send')[area]} {part}[channel {channel}, node {node}, slot {slot}] + {at}"


def _describe_cell(num_rdma_ranks: int, cell: int) -> str:
    word = cell // 4
    if word < num_rdma_ranks:
        return f"arrived[node {word}]"
    for name, first in (("tail", 1), ("head", 1 + MAX_CHANNELS)):
        channel, node = divmod(word - first * num_rdma_ranks, num_rdma_ranks)
        if 0 <= channel < MAX_CHANNELS:
            return f"{name}[channel {channel}, node {node}]"
    message, byte = divmod(cell - message_offset(0, num_rdma_ranks, 0, 0), COUNT_MESSAGE_BYTES)
    place, node = divmod(message, num_rdma_ranks)
    if place >= 4:
        rank, byte = divmod(cell - call_offset(0, num_rdma_ranks, 0), CALL_BYTES)
        return f"call[rank {rank}] word {byte // 4}"
    return f"count message {('recv', 'send')[place // 2]}[{place % 2}, node {node}] word {byte // 4}"


def describe_nvl_offset(shape: RingShape | None, num_rdma_ranks: int, num_nvl_ranks: int, offset: int) -> str:
    """Name the cell at a byte offset of the NVL buffer. shape is that of the latest launch, if any."""
    rings = rings_offset(num_rdma_ranks, num_nvl_ranks)
    if offset < rings + RINGS:
        place, byte = divmod(offset, counts_bytes(num_rdma_ranks))
        parity, source = divmod(place, num_nvl_ranks)
        return f"counts[{parity}, from local rank {source}] word {byte // 4}"
    return describe_ring(shape, offset - rings)


# Low latency


def describe_low_latency_offset(num_ranks: int, num_rdma_bytes: int, offset: int) -> str:
    """Name the cell at a byte offset of the buffer, for reports."""
    if offset >= num_rdma_bytes:
        return _describe_low_latency_cell(num_ranks, offset - num_rdma_bytes)
    quarter = quarter_bytes(num_rdma_bytes)
    if quarter == 0 or offset >= 4 * quarter:
        return f"buffer + {offset}"
    part, byte = divmod(offset, quarter)
    name = f"{'recv' if part < NUM_HALVES else 'send'}[half {part % NUM_HALVES}]"
    return f"{name} + {byte}"


def place_of_count(num_ranks: int, cell: int) -> tuple[int, int, int]:
    """Half, local expert and rank of a count, by its offset behind num_rdma_bytes."""
    half, index = divmod(cell // 4, MAX_EXPERTS)
    return half, *divmod(index, num_ranks)


def row_of_cell(num_ranks: int, cell: int) -> tuple[int, int]:
    """The row and the rank of a cell, by its offset behind num_rdma_bytes."""
    return divmod((cell - COUNTS_BYTES) // 4, align_up(num_ranks, WORDS_OF_LINE))


def _describe_low_latency_cell(num_ranks: int, cell: int) -> str:
    if cell < COUNTS_BYTES:
        half, expert, rank = place_of_count(num_ranks, cell)
        return f"counts[half {half}, rank {rank}, local expert {expert}]"
    if cell >= pointer_table(num_ranks):
        return f"pointer table + {cell - pointer_table(num_ranks)}"
    row, rank = row_of_cell(num_ranks, cell)
    if row < CALLS:
        return f"arrivals[half {row - ARRIVALS}, rank {rank}]"
    if row < CREDITS:
        half, word = divmod(row - CALLS, WORDS_OF_CALL)
        return f"calls[half {half}, rank {rank}, word {word}]"
    if row < BARRIER_SIGNALS:
        return f"credits[half {row - CREDITS}, rank {rank}]"
    return f"barrier_signal[rank {rank}]"
