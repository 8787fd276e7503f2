"""What all ranks must pass alike to a collective call, as words, and the error that names who has passed what.

 who compares                  what                       when they differ
 CallLog, of ranks of one      all arguments, by name     the later rank raises, before a launch
   process
 kernels of the normal mode,   a digest of the words,     each rank sends its words to all, and its host finds out
   and of an ElasticBuffer       where ranks meet           who differs; see kernels.parts.calls
 low-latency kernels,          two words, since ranks     each rank reports the word; see host.low_latency.calls
   with check_calls              do not meet

`named` gives the words their names, and `difference` makes the sentence, wherever it is found.

 rank 0: call 7: dispatch, 2 choices a token --> first at call 7: leaves what it passes
 rank 1: call 7: dispatch, 3 choices a token --> differs: ValueError on rank 1, which may call again
 rank 1: call 7: dispatch, 2 choices a token --> last at call 7: takes it away

No rank waits for the log: one may be calls ahead of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from nbep.device.kernels.parts.calls import NUM_WORDS, Call
from nbep.device.protocols.peers import ONE
from nbep.host.arguments import ROW_DTYPES
from nbep.host.ranks.comm import Communicator, InProcessComm

DISPATCH, COMBINE, ELASTIC_DISPATCH, ELASTIC_COMBINE, BARRIER = VERBS = (
    "dispatch",
    "combine",
    "elastic dispatch",
    "elastic combine",
    "barrier",
)
SCALES_DTYPES = ("float32", "int32")
HAS_HANDLE = 1  # in the word of a handle, which adds its number

# Below ONE, so a digest fits. Both are primes: words that differ in one place have different digests.
DIGESTS = 16777213
FACTOR = 6700417


class Word(NamedTuple):
    """An argument that is a word of a call, and how its value is shown."""

    name: str
    shown: Callable[[int], object] = int


def _handle(word: int) -> object:
    of = f"that of dispatch {word - HAS_HANDLE}" if word > HAS_HANDLE else "a handle of unknown origin"
    return of if word else None


def _scales(word: int) -> object:
    return f"{word // 2} {SCALES_DTYPES[word % 2]} a token" if word else None


def _choices(word: int) -> object:
    return f"{word} choices a token" if word else None


HANDLE = Word("handle", _handle)
ZERO_COPY = Word("zero_copy", bool)
WEIGHTS = Word("topk_weights", lambda word: "given" if word else None)
X = Word("dtype of x", ROW_DTYPES.__getitem__), Word("hidden size of x"), Word("scales", _scales)
SHARED = Word("x in shared rows", (False, True, "with its scales").__getitem__)
NUM_EXPERTS = "size of num_tokens_per_expert"
CONFIG = tuple(
    Word(f"config.{name}")
    for name in (
        "num_sms",
        "num_max_nvl_chunked_send_tokens",
        "num_max_nvl_chunked_recv_tokens",
        "num_max_rdma_chunked_send_tokens",
        "num_max_rdma_chunked_recv_tokens",
    )
)
SIZES = Word("topk_idx", _choices), Word("num_experts"), Word("num_max_tokens_per_rank")
# Behind the verb
WORDS: dict[str, tuple[Word, ...]] = {
    DISPATCH: (HANDLE, ZERO_COPY, *X, SIZES[0], Word(NUM_EXPERTS, lambda word: word or None), *CONFIG),
    COMBINE: (HANDLE, ZERO_COPY, X[1], Word("topk_weights", _choices), *CONFIG),
    ELASTIC_DISPATCH: (HANDLE, WEIGHTS, *X, *SIZES, SHARED),
    ELASTIC_COMBINE: (HANDLE, WEIGHTS, X[1], *SIZES, Word("do_expand", bool), SHARED),
    BARRIER: (),
}


@lru_cache(maxsize=1024)
def make_call(verb: str, *words: int) -> Call:
    """The words of a call, from the verb on, with what arrives for them."""
    all_words = VERBS.index(verb), *words, *(0,) * (NUM_WORDS - 1 - len(words))
    return Call(ONE + digest_of(all_words), *all_words)


def digest_of(words: Iterable[int]) -> int:
    """One of DIGESTS."""
    digest = 0
    for word in words:
        digest = (digest * FACTOR + word) % DIGESTS
    return digest


def named(words: Sequence[int]) -> tuple[str, Arguments]:
    """The verb of a call, and its arguments by their names."""
    verb = VERBS[words[0]]
    return verb, {word.name: word.shown(value) for word, value in zip(WORDS[verb], words[1:], strict=False)}


def arguments_of(call: Call, handle: Any) -> Arguments:
    """What a CallLog compares: whose handle it is, too, where the kernels do not."""
    arguments = named(call[1:])[1]
    return arguments if handle is None else {**arguments, HANDLE.name: _handle(HAS_HANDLE + handle.number)}


def received_error(rank: int, of_node: range, sent: dict[int, list[int]]) -> ValueError | None:
    """The error for a rank that has the words which some ranks have sent; None if they do not differ.

    A rank that has not sent its own has met no other call: it calls the same as those of its node that have.
    """
    own = next((sent[peer] for peer in (rank, *of_node) if peer in sent), None)
    other = next((peer for peer in sent if sent[peer] != own), None)
    if own is None or other is None:
        return None
    return difference(Made(rank, *named(own)), Made(other, *named(sent[other])))


# Ranks of one process


Arguments = dict[str, object]  # in the order in which they are compared


class Unknown:
    """The value of an argument that this rank cannot tell: like any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Made(NamedTuple):
    """What a rank passed to a collective call."""

    rank: int
    verb: str
    arguments: Arguments


class CallLog:
    """The collective calls of one buffer that not all of its ranks have made yet. The ranks share it."""

    def __init__(self, num_ranks: int):
        self._num_calls = [0] * num_ranks  # so far, by rank
        self._last = [""] * num_ranks  # the verb of the last one
        self._calls: dict[int, Made] = {}  # by their number: what the first rank passed
        self._lock = Lock()  # virtual ranks are threads
        self._is_closed = False

    @classmethod
    def shared(cls, comm: Communicator) -> CallLog | None:
        """A log that all ranks of comm share; None if they live in processes of their own. Collective."""
        return comm.bcast(cls(comm.size)) if isinstance(comm, InProcessComm) else None

    def add(self, rank: int, verb: str, arguments: Arguments) -> None:
        """Note the next call of a rank.

        Raises: ValueError if another rank called another verb there, or passed another argument; the call then does
                not count
        """
        with self._lock:
            if self._is_closed:
                return
            number, made = self._num_calls[rank], Made(rank, verb, arguments)
            first = self._calls.setdefault(number, made)
            if first[1:] != made[1:]:
                raise difference(made, first, number)
            self._num_calls[rank] += 1
            self._last[rank] = verb
            if min(self._num_calls) > number:
                del self._calls[number]

    def so_far(self) -> list[tuple[int, str]]:
        """By rank: how many calls it has made, and the last one; nothing if that is not known."""
        return [] if self._is_closed else list(zip(self._num_calls, self._last, strict=True))

    def close(self) -> None:
        """Compare no more: a CUDA graph replays calls that do not pass here."""
        with self._lock:
            self._is_closed = True
            self._calls.clear()


def difference(own: Made, other: Made, number: int | None = None) -> ValueError:
    """The error for a rank that has passed something else than another one; number: of the call, if that is known."""
    nth = "" if number is None else f"the buffer's collective call {number + 1}"
    name = "buffer"
    got: tuple[object, object] = own.verb, other.verb
    where = f"as {nth}" if nth else "in the same call"
    if own.verb == other.verb:
        name = next(name for name, value in own.arguments.items() if other.arguments[name] != value)
        got = own.arguments[name], other.arguments[name]
        where = f"in {own.verb}, {nth}" if nth else f"in the same {own.verb}"
    return ValueError(
        f"{name}: got {got[0]} on rank {own.rank}, {got[1]} on rank {other.rank} {where}; must be the same on all ranks"
    )
