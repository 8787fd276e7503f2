"""What all ranks must pass alike to a low-latency call, as two words: each rank sends them to every other one.

A digest does where ranks meet: see host.calls. Here they do not meet. Where calls differ, a kernel may wait for what
never comes, and would send no words after its time-out: so the words come with the call, and then the host finds them.
And code that sends words only then would stand in the way of all warps, which costs more than the second word does: see
records/attempts.md, "Who tells and compares the words of a call".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, LowLatencyShape
from nbep.host.arguments import refuse
from nbep.host.calls import Arguments

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


ORIGINS = 15  # so many calls on, a handle is not distinguished from that of an earlier dispatch


def _origin(word: int) -> str:
    return f"that of low-latency call {word - 1} (modulo {ORIGINS})" if word else "one of unknown origin"


# deduplicate is named first: without it the words have no number of choices.
FIELDS = (
    Field(0, 1, 1, ("deduplicate", NAMES_IN_HANDLE["deduplicate"]), bool),
    Field(0, 2, 1, ("use_fp8", ""), bool),
    Field(0, 3, 1, ("round_scale", ""), bool),
    Field(0, 4, 1, ("", "use_logfmt"), bool),
    Field(0, 5, 6, ("topk_idx", "handle.num_topk"), "{} choices a token".format),
    Field(0, 11, 12, ("num_experts", "handle.num_experts"), int),
    Field(0, 23, 4, ("", "handle"), _origin),
    Field(1, 1, 14, (MAX_TOKENS, f"handle.{MAX_TOKENS}"), int),
    Field(1, 15, 11, ("hidden size of x", "handle.hidden"), lambda blocks: blocks * COLUMNS_PER_SCALE),
)


def words_of(verb: int, shape: LowLatencyShape, round_scale: bool = False, origin: int = 0) -> Words:
    """The words of a call. origin: of a combine's handle, see LowLatencyMemory.origin_of

    Raises: ValueError for a size that no dispatch takes
    """
    words = [verb, verb]
    flags = shape.deduplicate, shape.use_fp8, int(round_scale), shape.use_logfmt
    sizes = shape.num_topk, shape.num_experts, origin, shape.num_max_tokens, shape.hidden // COLUMNS_PER_SCALE
    for field, value in zip(FIELDS, (*flags, *sizes), strict=True):
        if value >= 1 << field.bits:  # of a handle that was put together
            refuse(field.names[verb], field.shown(value), f"less than {field.shown(1 << field.bits)}")
        words[field.word_index] |= value << field.begin
    return words[0], words[1]


def named(index: int, word: int) -> tuple[str, Arguments]:
    """The verb of a call, and by their names its arguments in one of the words."""
    verb, fields = word & 1, (field for field in FIELDS if field.word_index == index)
    return VERBS[verb], {
        field.names[verb]: field.shown(word >> field.begin & (1 << field.bits) - 1) for field in fields
    }
