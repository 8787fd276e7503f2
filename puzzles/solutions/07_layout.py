"""Puzzle 7, solved: first a bit for each rank, then one count for each bit."""

from nbep.lang import atom_add_relaxed_gpu_s32, device_function, ld_nc_s64, st_weak_s32

NUM_RANKS, EXPERTS_PER_RANK, NUM_TOPK = 4, 2, 3


@device_function
def count_token(experts, per_rank, in_rank):
    bits = 0
    for k in range(NUM_TOPK):
        expert = ld_nc_s64(experts + 8 * k)
        if expert >= 0:
            bits |= 1 << (expert // EXPERTS_PER_RANK)
    for rank in range(NUM_RANKS):
        if bits >> rank & 1:
            st_weak_s32(in_rank + 4 * rank, 1)
            atom_add_relaxed_gpu_s32(per_rank + 4 * rank, 1)


HINTS = (
    "Find out first which ranks the token goes to, then count each of them once.",
    "One bit for each rank: bits |= 1 << rank. A bit that is set twice is set once.",
    "Load the experts with ld_nc_s64(experts + 8 * k), skip -1, and count with atom_add_relaxed_gpu_s32.",
)
