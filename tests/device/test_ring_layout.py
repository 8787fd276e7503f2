"""Where the parts of a ring lie: apart from each other, aligned, and named."""

import pytest

from nbep.device.layout.intranode import (
    ALIGNMENT_BYTES,
    EXPERT_COUNTS,
    RINGS,
    RingShape,
    header_bytes,
    locate_header,
    locate_ring,
    num_nvl_bytes_needed,
    slot_bytes,
)
from nbep.device.layout.names import describe_offset

SHAPES = [
    RingShape(2, 1, 3, 64, 0, 0, 0),
    RingShape(4, 2, 5, 4112, 1, 0, 1),
    RingShape(8, 3, 2, 7168, 8, 56, 1),
    RingShape(4, 2, 4, 128, 0, 1, 0),
]


def parts_of(shape):
    """(name, begin, end) of all parts of all slots, by address."""
    for channel in range(shape.num_channels):
        for src in range(shape.num_ranks):
            ring = locate_ring(0, shape, channel, src)
            for slot in range(shape.num_slots):
                row = ring.x + slot * slot_bytes(shape)
                starts = locate_header(row, shape)
                sizes = (8 * shape.num_topk, 4 * shape.num_topk, 4 * shape.num_scales, 4 * shape.num_src_idx)
                for name, start, size in zip(starts._fields, starts, sizes, strict=True):
                    yield f"{name}[channel {channel}, src {src}, slot {slot}]", start, start + size
                yield f"x[channel {channel}, src {src}, slot {slot}]", row, row + shape.hidden_bytes


def first_slot(shape):
    return locate_ring(0, shape, 0, 0).x - header_bytes(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_lie_one_after_the_other_within_the_buffer(shape):
    last = first_slot(shape)
    assert last >= RINGS + 4 * 4 * shape.num_channels * shape.num_ranks, "behind the cells"
    for name, begin, end in parts_of(shape):
        assert begin >= last, name
        last = end
    assert last <= num_nvl_bytes_needed(shape) < last + ALIGNMENT_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_messages_are_aligned_for_the_wire(shape):
    for name, begin, _ in parts_of(shape):
        if name.startswith("x["):
            assert begin % ALIGNMENT_BYTES == 0, name
            assert (begin - header_bytes(shape)) % ALIGNMENT_BYTES == 0, name
        if name.startswith("topk_idx["):
            assert begin % 8 == 0, name


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_has_its_name(shape):
    last = first_slot(shape)
    for name, begin, end in parts_of(shape):
        for byte in {last, begin - 1} if last < begin else ():
            assert describe_offset(shape, shape.num_ranks, 1 << 30, byte).startswith("padding[channel ")
        if begin < end:
            assert describe_offset(shape, shape.num_ranks, 1 << 30, begin) == f"{name} + 0"
            assert describe_offset(shape, shape.num_ranks, 1 << 30, end - 1) == f"{name} + {end - 1 - begin}"
        last = end
    assert "padding" in describe_offset(shape, shape.num_ranks, 1 << 30, num_nvl_bytes_needed(shape))


def test_counts_have_names_before_the_first_launch():
    """A peer writes them when the owner has launched nothing yet."""
    assert describe_offset(None, 4, 1 << 16, 4 * (4 * 2 + 3)) == "rank_counts[src 2, dst 3]"
    assert describe_offset(None, 4, 1 << 16, EXPERT_COUNTS + 8) == "expert_counts word 2"
    assert describe_offset(None, 4, 1 << 16, RINGS) == f"buffer + {RINGS}"
    assert describe_offset(None, 4, RINGS, 8) == "buffer + 8", "too small for a ring"
