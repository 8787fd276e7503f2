"""What all ranks must pass alike to a call, as words, and the error that names who has passed what.

 who compares                  what                       when they differ
 ranks.call_log, of ranks      all arguments, by name     the later rank raises, before a launch
   in one process
 kernels of the normal mode,   a digest of the words,     each rank sends its words to all, and its host finds out
   and of an ElasticBuffer       where ranks meet           who differs; see kernels.parts.calls
 low-latency kernels,          two words, since ranks     each rank reports the word; see host.low_latency.calls
   with check_calls              do not meet

`named` gives the words their names, and `difference` of ranks.call_log makes the sentence, wherever it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from nbep.device.kernels.parts.calls import NUM_WORDS, Call
from nbep.device.protocols.peers import ONE
from nbep.host.arguments import ROW_DTYPES
from nbep.host.config import Config
from nbep.host.elastic.handle import EPHandle
from nbep.host.handles import ArraysHandle, Numbered
from nbep.host.node import Node
from nbep.host.normal_checks import Tokens
from nbep.host.ranks.call_log import Arguments, Made, difference

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


def dispatch_call(
    memory: Node,
    tokens: Tokens,
    config: Config,
    handle: ArraysHandle | None = None,
    between_nodes: bool = False,
    zero_copy: bool = False,
) -> Call:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.dispatch."""
    sizes = *_of_x(tokens), tokens.num_topk, tokens.num_experts
    of_handle = handle_word(memory, handle)
    return make_call(DISPATCH, of_handle, int(zero_copy), *sizes, *_of_config(config, between_nodes, zero_copy))


def combine_call(
    memory: Node,
    hidden: int,
    num_topk: int,
    config: Config,
    handle: ArraysHandle,
    between_nodes: bool = False,
    zero_copy: bool = False,
) -> Call:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.combine."""
    words = handle_word(memory, handle), int(zero_copy), hidden, num_topk
    return make_call(COMBINE, *words, *(() if zero_copy else _of_config(config, between_nodes, zero_copy)))


def elastic_dispatch_call(
    memory: Node, tokens: Tokens, num_max_tokens: int, handle: EPHandle | None, has_weights: bool, is_shared: int
) -> Call:
    """What the others read out of this rank's half. Whether and how rows are expanded is each rank's own affair."""
    words = handle_word(memory, handle), int(has_weights), *_of_x(tokens), tokens.num_topk
    return make_call(ELASTIC_DISPATCH, *words, tokens.num_experts, num_max_tokens, is_shared)


def elastic_combine_call(
    memory: Node,
    hidden: int,
    num_topk: int,
    handle: EPHandle,
    one_each: bool,
    has_weights: bool,
    is_fetched: bool = False,
) -> Call:
    """Where this rank's rows come to lie at the others. one_each: see kernels.elastic.combine"""
    words = handle_word(memory, handle), int(has_weights), hidden, num_topk, handle.num_experts
    return make_call(ELASTIC_COMBINE, *words, handle.num_max_tokens_per_rank, int(one_each), int(is_fetched))


def handle_word(memory: Node, handle: Numbered | None) -> int:
    """Which dispatch it is of, if the buffer has check_calls: a replay of a CUDA graph counts no calls."""
    if handle is None:
        return 0
    return HAS_HANDLE + (handle.number if memory.compares_handles else 0)


def _of_x(tokens: Tokens) -> tuple[int, int, int]:
    scales = 0
    if tokens.scales.is_array:
        scales = 2 * tokens.num_scales + SCALES_DTYPES.index(tokens.scales.dtype_name)
    return ROW_DTYPES.index(tokens.x.dtype_name), tokens.hidden, scales


def _of_config(config: Config, between_nodes: bool, zero_copy: bool) -> tuple[int, ...]:
    """What both ends of a ring must know alike: how many there are, their slots, between nodes also their chunks.

    Without rings: how many blocks there are, and which rows land together.
    """
    if zero_copy:
        return config.num_sms, config.num_max_nvl_chunked_send_tokens
    of_node = config.num_sms, 0, config.num_max_nvl_chunked_recv_tokens
    if not between_nodes:
        return of_node
    return *of_node, config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens


# Who differs


def named(words: Sequence[int]) -> tuple[str, Arguments]:
    """The verb of a call, and its arguments by their names."""
    verb = VERBS[words[0]]
    return verb, {word.name: word.shown(value) for word, value in zip(WORDS[verb], words[1:], strict=False)}


def arguments_of(call: Call, handle: Numbered | None) -> Arguments:
    """What `call_log` compares: whose handle it is, too, where the kernels do not."""
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
