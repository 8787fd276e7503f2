"""What all ranks must pass alike to a dispatch or a combine, as words; see Buffer.dispatch.

Ranks of one process are compared before a launch, by `call_log`. The notify kernels compare those of a node, in
processes of their own too, by a digest of the words; see nbep.device.kernels.parts.calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from nbep.device.kernels.parts.calls import CALLS_DIFFER, RANK_WORD, WORDS_OF_VERB, Call
from nbep.device.protocols.peers import ONE
from nbep.device.protocols.waits import FaultReport
from nbep.host.arguments import ROW_DTYPES
from nbep.host.config import Config
from nbep.host.handles import ArraysHandle, Numbered
from nbep.host.node import Node
from nbep.host.ranks.call_log import Arguments
from nbep.host.tokens import Tokens

DISPATCH, COMBINE, ELASTIC_DISPATCH, ELASTIC_COMBINE, ELASTIC_BARRIER = range(5)
VERBS = ("dispatch", "combine", "elastic dispatch", "elastic combine", "barrier")
SCALES_DTYPES = ("float32", "int32")
NAMES = (
    "buffer",
    "handle",
    "zero_copy",
    "dtype of x",
    "hidden size of x",
    "scales",
    "topk_idx",
    "size of num_tokens_per_expert",
    "config.num_sms",
    "config.num_max_nvl_chunked_send_tokens",
    "config.num_max_nvl_chunked_recv_tokens",
    "config.num_max_rdma_chunked_send_tokens",
    "config.num_max_rdma_chunked_recv_tokens",
)
VERB, HANDLE, ZERO_COPY, DTYPE, _, SCALES, TOPK, EXPERTS = range(8)
# Words of elastic calls that have other names. Its dispatches do not say in words whether ranks expand.
ELASTIC_NAMES = {2: "topk_weights", 6: "topk_idx", 7: "num_experts", 9: "num_max_tokens_per_rank", 10: "do_expand"}
HAS_HANDLE = 1  # in the word of a handle, which adds its number

# Below ONE, so a digest fits. Both are primes: words that differ in one place have different digests.
DIGESTS = 16777213
FACTOR = 6700417


@lru_cache(maxsize=1024)
def make_call(rank: int, words: tuple[int, ...]) -> Call:
    """The words of a rank's call, from the verb on, with what arrives for them."""
    return Call(ONE + digest_of(words), rank, *words)


def digest_of(words: Iterable[int]) -> int:
    """One of DIGESTS."""
    digest = 0
    for word in words:
        digest = (digest * FACTOR + word) % DIGESTS
    return digest


def dispatch_call(
    memory: Node,
    tokens: Tokens,
    num_experts: int | None,
    config: Config,
    handle: ArraysHandle | None = None,
    between_nodes: bool = False,
    zero_copy: bool = False,
) -> Call:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.dispatch.

    num_experts: None with a handle
    """
    scales = 0
    if tokens.scales.is_array:
        scales = 2 * tokens.num_scales + SCALES_DTYPES.index(tokens.scales.dtype_name)
    dtype = ROW_DTYPES.index(tokens.x.dtype_name)
    sizes = tokens.hidden, scales, tokens.num_topk, num_experts or 0
    of_handle = 0 if handle is None else handle_word(memory, handle)
    return make_call(
        memory.rank,
        (DISPATCH, of_handle, int(zero_copy), dtype, *sizes, *_of_config(config, between_nodes, zero_copy)),
    )


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
    words = COMBINE, handle_word(memory, handle), int(zero_copy), 0, hidden, 0, num_topk, 0
    return make_call(memory.rank, (*words, *_of_config(config, between_nodes, zero_copy)))


def handle_word(memory: Node, handle: Numbered) -> int:
    """Which dispatch it is of, if the buffer has check_calls: a replay of a CUDA graph counts no calls."""
    return HAS_HANDLE + (handle.number if memory.compares_handles else 0)


def _of_config(config: Config, between_nodes: bool, zero_copy: bool) -> tuple[int, ...]:
    """What both ends of a ring must know alike: how many there are, their slots, between nodes also their chunks.

    Without rings: how many blocks there are, and which rows land together.
    """
    if zero_copy:
        return config.num_sms, config.num_max_nvl_chunked_send_tokens, 0, 0, 0
    if not between_nodes:
        return config.num_sms, 0, config.num_max_nvl_chunked_recv_tokens, 0, 0
    return (
        config.num_sms,
        0,
        config.num_max_nvl_chunked_recv_tokens,
        config.num_max_rdma_chunked_send_tokens,
        config.num_max_rdma_chunked_recv_tokens,
    )


# In words


def arguments_of(call: Call, handle: Numbered | None) -> Arguments:
    """What `call_log` compares: the arguments by their names."""
    words = list(call[2:])
    words[HANDLE] = 0 if handle is None else HAS_HANDLE + handle.number
    named = (_named(call.verb, index, word) for index, word in enumerate(words) if index != VERB)
    return dict(named)


def difference_error(rank: int, report: FaultReport) -> ValueError:
    """The error for a rank whose call is not that of a peer."""
    verb, index = divmod(report.channel, WORDS_OF_VERB)
    name, own = _named(verb, index, report.expected)
    theirs = _named(verb, index, report.seen)[1]
    where = "the same call" if index == VERB else f"the same {VERBS[verb]}"
    return ValueError(
        f"{name}: got {own} on rank {rank}, {theirs} on rank {report.peer} in {where}; must be the same on all ranks"
    )


def relayed_error(rank: int, own: Sequence[int], relayed: Sequence[int]) -> ValueError | None:
    """The error for a call that another rank of the node has met and passed on, with its rank behind the words.

    own: the words of that one, who calls the same as this rank. None if nothing is there.
    """
    peer = relayed[RANK_WORD]
    for index, (expected, seen) in enumerate(zip(own[:RANK_WORD], relayed, strict=False)):
        if peer >= 0 and expected != seen:
            channel = WORDS_OF_VERB * own[VERB] + index
            return difference_error(rank, FaultReport(1, CALLS_DIFFER, peer, expected, seen, 0, 0, channel))
    return None


def _named(verb: int, index: int, word: int) -> tuple[str, object]:
    """What a word is called in a call of a verb, and what its value is."""
    name, value = NAMES[index], word
    if verb in (ELASTIC_DISPATCH, ELASTIC_COMBINE) and index in ELASTIC_NAMES:
        return ELASTIC_NAMES[index], _elastic_value(index, word)
    if index == VERB:
        return name, VERBS[word]
    if index == HANDLE:
        of = f"that of dispatch {word - HAS_HANDLE}" if word > HAS_HANDLE else "a handle of unknown origin"
        return name, of if word else None
    if index == ZERO_COPY:
        return name, bool(word)
    if index == DTYPE:
        return name, ROW_DTYPES[word]
    if index == SCALES:
        return name, f"{word // 2} {SCALES_DTYPES[word % 2]} a token" if word else None
    if index == TOPK:
        return name if verb == DISPATCH else "topk_weights", f"{word} choices a token" if word else None
    if index == EXPERTS:
        return name, word or None
    return name, value


def _elastic_value(index: int, word: int) -> object:
    if index == ZERO_COPY:
        return "given" if word else None
    if index == TOPK:
        return f"{word} choices a token"
    return bool(word) if ELASTIC_NAMES[index] == "do_expand" else word
