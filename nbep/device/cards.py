"""What cards of each compute capability have. Primitives, the emulator, the host and `nbep info` ask here.

 sm_75   no conversion to BF16: primitives compute it in integers
 sm_80   that conversion
 sm_89   conversions to and from FP8; before, primitives compute them in integers
 sm_90   bulk copies (TMA), clusters of blocks
 sm_120  bulk copies too, but not the shared memory for nbep's stages: kernels take the path of sm_80 there

Source: CUDA C++ Programming Guide, "Compute Capabilities"; PTX ISA.
"""

from __future__ import annotations

from functools import cache

ComputeCapability = tuple[int, int]
SM75, SM80, SM89, SM90 = (7, 5), (8, 0), (8, 9), (9, 0)
LOWEST_CC = SM75
CARDS = (SM75, SM80, (8, 6), SM89, SM90, (10, 0), (12, 0))  # for which tests compile every kernel
LARGEST_SMEM_KIB = 227
SMEM_KIB = {7: 64, 8: 99, 12: 99}  # most shared memory of a block, by the first number
SMEM_KIB_OF_SERVERS = {(8, 0): 163, (8, 7): 163}  # where the second number matters


def max_smem_bytes(cc: ComputeCapability) -> int:
    """Most shared memory that a block can have."""
    return SMEM_KIB_OF_SERVERS.get(cc, SMEM_KIB.get(cc[0], LARGEST_SMEM_KIB)) << 10


@cache  # kernels on the emulator ask for each token
def has_bulk_copies(cc: ComputeCapability) -> bool:
    """Whether kernels copy in bulk: the card must have the instructions, and shared memory for a stage of each warp."""
    return cc >= SM90 and max_smem_bytes(cc) >= LARGEST_SMEM_KIB << 10


def stand_ins(cc: ComputeCapability) -> list[str]:
    """In words, what kernels do without on this card, and what they do in its place."""
    lacks = []
    if cc < SM80:
        lacks.append("BF16 conversion in integers")
    if cc < SM89:
        lacks.append("FP8 conversion in integers")
    if not has_bulk_copies(cc):
        lacks.append("16-byte copies in place of bulk copies")
    return lacks
