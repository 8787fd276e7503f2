"""What a low-latency call does besides its tokens: waits, stores and adds, for any number of ranks.

The busiest block of a rank is counted, and the coordinator of the last one. Tests compare it with a run.
"""

from typing import NamedTuple

from nbep.host.low_latency.dispatch import teams

RANKS_OF_NODE = 8


class Call(NamedTuple):
    """Of one rank: sizes as in `Work`, and a launch. from_buffer: messages leave from the buffer, as over `ibgda`."""

    num_ranks: int
    num_experts: int = 256
    num_tokens: int = 128
    num_topk: int = 8
    num_blocks: int = 132
    num_threads: int = 640
    from_buffer: bool = True


def _each(number: int, blocks: int) -> int:
    """How much of a number the busiest block has."""
    return -(-number // blocks)


def credit_waits(call: Call) -> int:
    """Dispatch: a wait is one load if the peer has freed the half long ago, as it has when decoding goes on."""
    of_area = call.num_ranks if call.from_buffer else 0
    of_choices = call.num_topk * _each(call.num_tokens, call.num_blocks)
    of_counts = _each(call.num_experts, call.num_blocks)
    return of_area + of_choices + of_counts + 1  # for the coordinator


def credit_waits_of_each_lane(call: Call) -> int:
    """The same if each of these waits looked at all ranks, as it did before one warp of a block was enough."""
    each = credit_waits(call._replace(from_buffer=False))
    return each * (call.num_ranks + 1) if call.from_buffer else each


def count_waits(call: Call) -> int:
    """Dispatch: all blocks together; a team waits for the counts of its source and of those before it."""
    team_warps, _, _ = teams(call.num_experts, call.num_tokens, call.num_blocks, call.num_threads)
    local_experts = call.num_experts // call.num_ranks
    return team_warps * local_experts * call.num_ranks * (call.num_ranks + 1) // 2


def coordinator_stores(call: Call) -> int:
    """Slots and counts of all experts and ranks; one warp stores 32 at once."""
    return 2 * (call.num_experts + call.num_ranks)


def adds(call: Call) -> int:
    """Dispatch, all blocks: a count of each expert, and a credit for each rank."""
    return call.num_experts + call.num_ranks


def adds_over_network(call: Call) -> int:
    """Those of them that go to other nodes: each is an entry, and rings."""
    others = max(call.num_ranks - RANKS_OF_NODE, 0)
    return call.num_experts // call.num_ranks * others + others


def table(all_ranks: tuple[int, ...] = (8, 32, 64, 128, 256)) -> str:
    """What a page shows."""
    head = "ranks  credits  before  counts  stores  adds  entries of adds"
    rows = [
        f"{n:5}{credit_waits(call):9}{credit_waits_of_each_lane(call):8}{count_waits(call):8}"
        f"{coordinator_stores(call):8}{adds(call):6}{adds_over_network(call):17}"
        for n in all_ranks
        for call in (Call(n),)
    ]
    return "\n".join([head, *rows])
