"""In what a peer's low-latency call differs: found by the host, in this rank's own memory, once a kernel has failed.

A digest says that two calls differ, not in what. But a call has few words, and few values of each fit into the buffer:
the calls that are one argument away from this rank's own are some thousands. So all of them are made up. One of them is
the peer's if its digest

 has been seen                        in the report of a receiver, or in a count of a combine
 lies where its messages bring it     in the peer's share of the half. Where rows are longer, or in another format, the
                                      notes are where this rank's kernel does not look

The likeliest are tried first:

 1. one other argument, flags before sizes
 2. this rank's own other calls: a combine may have been given the handle of one
 3. two other arguments, one of them a flag

All that fit are named. With the 24 bits of a dispatch that is one, with the 13 of a combine seldom more.

A call that is right costs this nothing: the kernels and their messages are the same without it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbep.device.layout.low_latency import (
    COLUMNS_PER_SCALE,
    MAX_EXPERTS,
    MAX_LOCAL_EXPERTS,
    MAX_TOPK,
    NOTE_DIGEST,
    LowLatencyShape,
    arrival_offset,
    count_offset,
    message_stride,
    note_offset,
    quarter_bytes,
    quarter_bytes_needed,
    recv_offset,
)
from nbep.device.protocols.arrivals import MAX_TAGS, is_complete, number_of
from nbep.device.protocols.waits import (
    LOW_LATENCY_CALL,
    LOW_LATENCY_COMBINE_COUNT,
    LOW_LATENCY_DISPATCH_COUNT,
    ONE,
    FaultReport,
)
from nbep.host.calls import DIGESTS
from nbep.host.low_latency import digest
from nbep.host.low_latency.memory import LowLatencyMemory

DISPATCH, COMBINE = "low_latency_dispatch", "low_latency_combine"
MAX_HIDDEN = 1 << 16
MOST_SHARE_BYTES = 1 << 28  # that are looked at
MOST_MESSAGES = 16  # that are looked at, for each expert
SIZES = {
    "hidden": range(COLUMNS_PER_SCALE, MAX_HIDDEN + 1, COLUMNS_PER_SCALE),
    "num_max_tokens": range(1, MAX_TAGS + 1),
    "num_experts": range(1, MAX_EXPERTS + 1),  # of which those count that the ranks share evenly
}
NAMES_OF_DISPATCH = {
    "use_fp8": "use_fp8",
    "round_scale": "round_scale",
    "deduplicate": "deduplicate",
    "num_topk": "topk_idx",
    "hidden": "hidden size of x",
    "num_max_tokens": "num_max_dispatch_tokens_per_rank",
    "num_experts": "num_experts",
}
NAMES_OF_COMBINE = {
    "use_logfmt": "use_logfmt",
    "num_topk": "handle.num_topk",
    "hidden": "handle.hidden",
    "num_max_tokens": "handle.num_max_dispatch_tokens_per_rank",
    "num_experts": "handle.num_experts",
}
FLAGS = ("use_fp8", "round_scale", "deduplicate", "use_logfmt")


class Passed(NamedTuple):
    """What a call is passed that must be alike on all ranks; the shape has its digest."""

    shape: LowLatencyShape
    round_scale: int

    @property
    def verb(self) -> str:
        return DISPATCH if self.shape.digest >= ONE else COMBINE

    def word(self, field: str) -> int:
        return self.round_scale if field == "round_scale" else getattr(self.shape, field)

    def with_words(self, **words: int) -> Passed:
        """The call with other words."""
        round_scale = words.pop("round_scale", self.round_scale)
        shape = self.shape._replace(**words)
        if self.verb == DISPATCH:
            return Passed(digest.for_dispatch(shape, bool(round_scale)), round_scale)
        return Passed(digest.for_combine(shape), round_scale)

    @property
    def is_allowed(self) -> bool:
        """Whether a rank can have made it."""
        shape = self.shape
        return (
            shape.num_experts % shape.num_ranks == 0
            and self.round_scale <= shape.use_fp8
            and shape.use_logfmt + shape.deduplicate < 2
        )


def passed(shape: LowLatencyShape) -> Passed:
    """The call whose shape that is: of the digest, the only word that the shape lacks is known."""
    call = Passed(shape, 0)
    return call if call.with_words().shape.digest == shape.digest else Passed(shape, 1)


# What the peer may have called


def other_flags(own: Passed) -> Iterator[Passed]:
    """The calls with one other flag, but deduplicate."""
    for flag in ("use_fp8", "round_scale") if own.verb == DISPATCH else ("use_logfmt",):
        yield own.with_words(**{flag: 1 - own.word(flag)})


def other_deduplicate(own: Passed) -> Iterator[Passed]:
    """The calls with the other deduplicate; with it they say how many choices there are."""
    if own.shape.deduplicate:
        yield own.with_words(deduplicate=0, num_topk=0)
    else:
        for num_topk in range(1, MAX_TOPK + 1):
            yield own.with_words(deduplicate=1, num_topk=num_topk)


def other_sizes(own: Passed, num_rdma_bytes: int) -> Iterator[Passed]:
    """The calls with one other size, as far as they fit into the buffer."""
    if own.shape.deduplicate:
        for num_topk in range(1, MAX_TOPK + 1):
            yield own.with_words(num_topk=num_topk)
    room = quarter_bytes(num_rdma_bytes)
    for field, values in SIZES.items():

        def needed(value: int, field: str = field) -> int:
            return quarter_bytes_needed(own.shape._replace(**{field: value}))

        for value in values[: bisect_left(values, room + 1, key=needed)]:
            yield own.with_words(**{field: value})


def likely_first(own: Passed, num_rdma_bytes: int, known: Iterable[LowLatencyShape]) -> Iterator[list[Passed]]:
    """Calls that the peer may have made, the likeliest first. known: shapes of this rank's own calls"""
    flags = list(other_flags(own))
    yield [*flags, *other_deduplicate(own), *other_sizes(own, num_rdma_bytes)]
    yield [call for call in map(passed, known) if call.verb == own.verb]
    for call in flags:
        yield [*other_flags(call), *other_deduplicate(call), *other_sizes(call, num_rdma_bytes)]


def matching(
    own: Passed, num_rdma_bytes: int, known: Iterable[LowLatencyShape], is_it: Callable[[Passed], bool]
) -> list[Passed]:
    """The likeliest calls that it may be, each once."""
    for calls in likely_first(own, num_rdma_bytes, known):
        found = dict.fromkeys(call for call in calls if call != own and call.is_allowed and is_it(call))
        if found:
            return list(found)
    return []


# What has come from the peer


@dataclass
class Arrived:
    """What a peer has sent to this rank in one half."""

    numbers: list[int]  # that its complete counts tell
    share: np.ndarray  # s32

    def __post_init__(self) -> None:
        may_be_digests = (self.share >= ONE) & (self.share < ONE + DIGESTS)
        self._words = set(self.share[may_be_digests].tolist())

    @classmethod
    def of(cls, mode: LowLatencyMemory, half: int, peer: int) -> Arrived:
        num_bytes, read = mode.num_rdma_bytes, mode.symmetric.read
        counts = read(count_offset(num_bytes, half, peer, 0), MAX_LOCAL_EXPERTS, np.int32)
        arrival = read(arrival_offset(num_bytes, half, peer), 1, np.int32)
        share = recv_offset(num_bytes, mode.share_bytes, half, peer)
        return cls(
            [number_of(int(value)) for value in (*counts, *arrival) if is_complete(int(value))],
            read(share, min(mode.share_bytes, MOST_SHARE_BYTES) // 4, np.int32),
        )

    def verb(self, own: Passed) -> str | None:
        """What the peer has called, if a count tells it: those of a combine are larger."""
        if not self.numbers:
            return None
        most = max(digest.LEAST_OF_COMBINE - 1, own.shape.num_max_tokens)
        return COMBINE if max(self.numbers) > most else DISPATCH

    def has_message_of(self, call: Passed) -> bool:
        """Whether a digest of that call lies where one of its first messages brings it.

        Not of the very first alone: a receiver may have taken it for its own call's, and have emptied its digest.
        """
        shape = call.shape
        if shape.digest not in self._words:
            return False
        num_units = 1 if shape.deduplicate else shape.num_experts // shape.num_ranks
        units = np.arange(num_units)[:, np.newaxis] * shape.num_max_tokens
        messages = (units + np.arange(min(shape.num_max_tokens, MOST_MESSAGES))) * message_stride(shape)
        places = (messages + note_offset(shape) + NOTE_DIGEST) // 4
        return bool((self.share[places[places < self.share.size]] == shape.digest).any())


NOTHING = Arrived([], np.empty(0, np.int32))


# In words


def call_error(mode: LowLatencyMemory, report: FaultReport) -> ValueError | None:
    """What a rank is told that has met another call than its own; None if it has not, for all that is known.

    A wait that is over time is one for another call only if that is none of this rank's own: what is left of those is
    no sign of a difference.
    """
    if report.site == LOW_LATENCY_CALL:
        named = _first(_named(mode, *call, report.peer, report.seen) for call in _reported(mode, report.expected))
        return ValueError(f"{named or _all_of_them(mode.rank, report.peer)}; must be the same on all ranks")
    if report.site in (LOW_LATENCY_DISPATCH_COUNT, LOW_LATENCY_COMBINE_COUNT):
        verb = DISPATCH if report.site == LOW_LATENCY_DISPATCH_COUNT else COMBINE
        launched = [(call.shape, half) for half, call in mode.received_calls() if call.verb == verb]
        named = _first(_named(mode, *call, report.peer, None) for call in launched)
        return ValueError(f"{named}; must be the same on all ranks") if named else None
    return None


def _all_of_them(rank: int, peer: int) -> str:
    return (
        f"low-latency calls: rank {rank} and rank {peer} have made different ones, where they must make the same: the "
        f"verb, num_max_dispatch_tokens_per_rank, num_experts, the hidden size, use_fp8, round_scale, use_logfmt, "
        f"deduplicate, and with it the number of choices"
    )


def _reported(mode: LowLatencyMemory, own_digest: int) -> list[tuple[LowLatencyShape, int | None]]:
    """The shape of the call that has failed, and its half if it is the latest one there."""
    calls: list[tuple[LowLatencyShape, int | None]]
    calls = [(call.shape, half) for half, call in mode.received_calls() if call.shape.digest == own_digest]
    if not calls:
        calls.extend((shape, None) for shape in mode.known_shapes if shape.digest == own_digest)
    return calls


def _named(mode: LowLatencyMemory, shape: LowLatencyShape, half: int | None, peer: int, seen: int | None) -> str:
    """In what a peer's call differs from one of this rank, of which the half may be known; "" if unknown."""
    own, arrived = passed(shape), NOTHING
    if half is not None and not mode.runtime.is_capturing:
        with suppress(RuntimeError):  # a GPU that has failed: what is known without its memory is told
            arrived = Arrived.of(mode, half, peer)
    known = mode.known_shapes
    digests = {seen}
    if own.verb == COMBINE:
        digests.update(arrived.numbers)
        digests.discard(shape.digest)

    def is_it(call: Passed) -> bool:
        if seen is None and call.shape in known:
            return False
        return call.shape.digest in digests or (call.verb == DISPATCH and arrived.has_message_of(call))

    found = matching(own, mode.num_rdma_bytes, known, is_it)
    if found:
        return f"{', or '.join(difference(own, call, mode.rank, peer) for call in found)} in the same {own.verb}"
    verb = arrived.verb(own)
    if own.verb == COMBINE and seen is not None and seen < digest.LEAST_OF_COMBINE:
        verb = DISPATCH
    if verb in (None, own.verb):
        return ""
    return f"buffer: got {own.verb} on rank {mode.rank}, {verb} on rank {peer} in the same call"


def _first(texts: Iterable[str]) -> str:
    """The first that is not empty."""
    return next(filter(None, texts), "")


def difference(own: Passed, other: Passed, rank: int, peer: int) -> str:
    """Each argument in which they differ, with both values."""
    names = NAMES_OF_DISPATCH if own.verb == DISPATCH else NAMES_OF_COMBINE
    return " and ".join(
        f"{name}: got {_value(own, field)} on rank {rank}, {_value(other, field)} on rank {peer}"
        for field, name in names.items()
        if own.word(field) != other.word(field)
        and not (field == "num_topk" and own.verb == DISPATCH and own.shape.deduplicate != other.shape.deduplicate)
    )


def _value(call: Passed, field: str) -> object:
    word = call.word(field)
    if field == "num_topk" and call.verb == DISPATCH:
        return f"{word} choices a token"
    return bool(word) if field in FLAGS else word
