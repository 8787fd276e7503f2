"""Exchanges between the lanes of a warp. Every lane in `mask` calls the same function with the same mask.

A lane outside 0 to 31 in shfl_up and shfl_down gives the lane's own value. Source: PTX ISA "shfl.sync", "vote.sync".
"""

from nbep.emulator import current_thread

from ..jit import primitive

FULL_MASK = 0xFFFFFFFF

_VOTE = "{{ .reg .pred p, q; setp.ne.s32 q, $2, 0; vote.sync.{}.pred p, q, $1; selp.s32 $0, 1, 0, p; }}"


@primitive("shfl.sync.idx.b32 $0, $2, $3, 31, $1;", "s32", ("u32", "s32", "s32"), effect="converge")
def shfl_idx_s32(mask, value, lane):
    """The value of `lane`."""
    return current_thread().shfl("idx", mask, value, lane)


@primitive(
    "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $2; shfl.sync.idx.b32 lo, lo, $3, 31, $1;"
    " shfl.sync.idx.b32 hi, hi, $3, 31, $1; mov.b64 $0, {lo, hi}; }",
    "s64",
    ("u32", "s64", "s32"),
    effect="converge",
)
def shfl_idx_s64(mask, value, lane):
    """The 64-bit value of `lane`."""
    return current_thread().shfl("idx", mask, value, lane)


@primitive("shfl.sync.idx.b32 $0, $2, $3, 31, $1;", "f32", ("u32", "f32", "s32"), effect="converge")
def shfl_idx_f32(mask, value, lane):
    """The float32 of `lane`."""
    return current_thread().shfl("idx", mask, value, lane)


@primitive("shfl.sync.bfly.b32 $0, $2, $3, 31, $1;", "s32", ("u32", "s32", "s32"), effect="converge")
def shfl_xor_s32(mask, value, lane_mask):
    """The value of the lane whose number differs in the bits of `lane_mask`."""
    return current_thread().shfl("xor", mask, value, lane_mask)


@primitive("shfl.sync.bfly.b32 $0, $2, $3, 31, $1;", "f32", ("u32", "f32", "s32"), effect="converge")
def shfl_xor_f32(mask, value, lane_mask):
    """The float32 of the lane whose number differs in the bits of `lane_mask`."""
    return current_thread().shfl("xor", mask, value, lane_mask)


@primitive("shfl.sync.up.b32 $0, $2, $3, 0, $1;", "s32", ("u32", "s32", "s32"), effect="converge")
def shfl_up_s32(mask, value, delta):
    """The value of the lane `delta` below."""
    return current_thread().shfl("up", mask, value, delta)


@primitive("shfl.sync.down.b32 $0, $2, $3, 31, $1;", "s32", ("u32", "s32", "s32"), effect="converge")
def shfl_down_s32(mask, value, delta):
    """The value of the lane `delta` above."""
    return current_thread().shfl("down", mask, value, delta)


@primitive(_VOTE.format("any"), "pred", ("u32", "pred"), effect="converge")
def vote_any(mask, predicate):
    """Whether the predicate holds in some lane of `mask`."""
    return current_thread().vote("any", mask, predicate)


@primitive(_VOTE.format("all"), "pred", ("u32", "pred"), effect="converge")
def vote_all(mask, predicate):
    """Whether the predicate holds in every lane of `mask`."""
    return current_thread().vote("all", mask, predicate)


@primitive(
    "{ .reg .pred q; setp.ne.s32 q, $2, 0; vote.sync.ballot.b32 $0, q, $1; }",
    "u32",
    ("u32", "pred"),
    effect="converge",
)
def vote_ballot(mask, predicate):
    """The lanes of `mask` in which the predicate holds, one bit each."""
    return current_thread().vote("ballot", mask, predicate)


@primitive("match.any.sync.b32 $0, $2, $1;", "u32", ("u32", "s32"), effect="converge")
def match_any_s32(mask, value):
    """The lanes of `mask` that hold the same value as this one, one bit each."""
    return current_thread().match_any(mask, value)
