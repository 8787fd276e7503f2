"""What all ranks must pass alike to a low-latency call, as two words, and in what two calls differ.

Ranks of one process are compared before a launch, by `call_log`. The kernels compare all ranks; see
kernels.low_latency.calls. Where calls differ so that a kernel waits for what never comes, its time-out is the first to
know: then the host looks whether words have come that are not this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, LowLatencyShape
from nbep.device.protocols.waits import FaultReport
from nbep.host.arguments import refuse

DISPATCH, COMBINE = range(2)
VERBS = ("low_latency_dispatch", "low_latency_combine")  # the lowest bit of both words
MAX_TOKENS, HOOK = "num_max_dispatch_tokens_per_rank", "return_recv_hook"
# What a combine's shape has from its handle, by the names of LowLatencyShape
NAMES_IN_HANDLE = {
    "num_experts": "handle.num_experts",
    "num_max_tokens": f"handle.{MAX_TOKENS}",
    "hidden": "handle.hidden",
    "num_topk": "handle.num_topk",
    "deduplicate": "deduplicate of the handle's dispatch",
}

Words = tuple[int, int]


class Field(NamedTuple):
    """An argument in a word, what it is called in each verb if it can differ there, and how its number is shown."""

    word_index: int
    begin: int  # the lowest bit
    bits: int
    names: tuple[str, str]
    shown: Callable[[int], object]

    def of(self, word: int) -> int:
        return word >> self.begin & (1 << self.bits) - 1

    def difference(self, rank: int, report: FaultReport) -> str:
        own, theirs = (self.shown(self.of(word)) for word in (report.expected, report.seen))
        return f"{self.names[_verb_of(report.expected)]}: got {own} on rank {rank}, {theirs} on rank {report.peer}"


DEDUPLICATE = Field(0, 1, 1, ("deduplicate", "deduplicate of the handle's dispatch"), bool)
USE_FP8 = Field(0, 2, 1, ("use_fp8", ""), bool)
ROUND_SCALE = Field(0, 3, 1, ("round_scale", ""), bool)
USE_LOGFMT = Field(0, 4, 1, ("", "use_logfmt"), bool)
NUM_TOPK = Field(0, 5, 6, ("topk_idx", "handle.num_topk"), "{} choices a token".format)
NUM_EXPERTS = Field(0, 11, 12, ("num_experts", "handle.num_experts"), int)
NUM_MAX_TOKENS = Field(1, 1, 14, (MAX_TOKENS, f"handle.{MAX_TOKENS}"), int)
HIDDEN = Field(1, 15, 11, ("hidden size of x", "handle.hidden"), lambda blocks: blocks * COLUMNS_PER_SCALE)
ORIGINS = 15  # so many calls on, a handle is not distinguished from that of an earlier dispatch
ORIGIN = Field(
    0,
    23,
    4,
    ("", "handle"),
    lambda word: f"that of low-latency call {word - 1} (modulo {ORIGINS})" if word else "one of unknown origin",
)
FIELDS = (DEDUPLICATE, USE_FP8, ROUND_SCALE, USE_LOGFMT, NUM_TOPK, NUM_EXPERTS, ORIGIN, NUM_MAX_TOKENS, HIDDEN)


def words_of(verb: int, shape: LowLatencyShape, round_scale: bool = False, origin: int = 0) -> Words:
    """The words of a call. origin: of a combine's handle, see LowLatencyMemory.origin_of

    Raises: ValueError for a size that no dispatch takes
    """
    words = [verb, verb]
    for field, value in (
        (DEDUPLICATE, shape.deduplicate),
        (USE_FP8, shape.use_fp8),
        (ROUND_SCALE, int(round_scale)),
        (USE_LOGFMT, shape.use_logfmt),
        (NUM_TOPK, shape.num_topk),
        (NUM_EXPERTS, shape.num_experts),
        (ORIGIN, origin),
        (NUM_MAX_TOKENS, shape.num_max_tokens),
        (HIDDEN, shape.hidden // COLUMNS_PER_SCALE),
    ):
        if value >= 1 << field.bits:  # of a handle that was put together
            refuse(field.names[verb], field.shown(value), f"less than {field.shown(1 << field.bits)}")
        words[field.word_index] |= value << field.begin
    return words[0], words[1]


def _verb_of(word: int) -> int:
    return word & 1


def difference_error(rank: int, report: FaultReport) -> ValueError:
    """The error for a rank whose call is not that of a peer. The report's channel is the word that differs."""
    verb, theirs = (_verb_of(word) for word in (report.expected, report.seen))
    if verb != theirs:
        named = f"buffer: got {VERBS[verb]} on rank {rank}, {VERBS[theirs]} on rank {report.peer} in the same call"
    else:
        named = f"{' and '.join(_differences(rank, report))} in the same {VERBS[verb]}"
    return ValueError(f"{named}; must be the same on all ranks")


def _differences(rank: int, report: FaultReport) -> list[str]:
    different = [
        field
        for field in FIELDS
        if field.word_index == report.channel and field.of(report.expected) != field.of(report.seen)
    ]
    if different[0] is DEDUPLICATE:  # without it a call does not tell how many choices there are
        different = [field for field in different if field is not NUM_TOPK]
    return [field.difference(rank, report) for field in different]
