"""Random rounds between nodes on one buffer: fresh routing, sizes, configs and options each time, made from a seed.

A round is a dispatch, sometimes cached dispatches of its handle, and combines, often in turn with another round's.
"""

import random
from typing import NamedTuple

import internode
from arrays import LIBRARY, to_target
from cases import NODE_ROUTINGS, ROUTINGS, Case, make_case
from intranode import Expected, Outcome, combine, dispatch, dispatch_input

import nbep


class Sizes(NamedTuple):
    """What rounds are made of. The largest of each must fit into the buffer."""

    hiddens: tuple[int, ...] = (8, 128, 1024, 7168)
    most_tokens: int = 64
    most_topk: int = 8
    most_experts: int = 8  # of a rank
    most_channels: int = 12
    most_slots: int = 64  # of a ring, at either level


SMALL = Sizes((8, 128, 256), 12, 4, 3, 3, 9)


class Round(NamedTuple):
    case: Case
    options: internode.Options
    with_cached: bool
    num_combines: int

    def __str__(self) -> str:
        case = self.case
        shape = f"{case.num_nodes}x{case.num_nvl_peers}, inputs {case.seed}, {case.num_tokens} tokens, {case.hidden}"
        return f"{shape}, {self.options}, cached {self.with_cached}, {self.num_combines} combines"


def make_round(rng: random.Random, num_nodes: int, num_nvl_peers: int, sizes: Sizes) -> Round:
    num_ranks = num_nodes * num_nvl_peers
    hidden = rng.choice(sizes.hiddens)
    most = rng.choice((1, sizes.most_tokens // 3, sizes.most_tokens))
    case = make_case(
        rng.getrandbits(20),
        num_ranks=num_ranks,
        num_tokens=[rng.choice((0, rng.randint(0, most), most)) for _ in range(num_ranks)],
        hidden=hidden,
        num_topk=rng.randint(1, sizes.most_topk),
        experts_per_rank=rng.randint(1, sizes.most_experts),
        routing=rng.choice(("grouped", *ROUTINGS, *NODE_ROUTINGS)),
        num_nodes=num_nodes,
    )
    with_topk = rng.random() < 0.7
    can_be_fp8 = hidden % 128 == 0 and LIBRARY != "cupy"
    options = internode.Options(
        random_config(rng, num_nodes, sizes),
        with_topk=with_topk,
        fp8=rng.choice((None, None, "row", "column", "packed")) if can_be_fp8 else None,
        expert_alignment=rng.choice((1, 1, 4)),
        num_worst_tokens=max(1, sum(case.num_tokens)) if with_topk and rng.random() < 0.3 else 0,
        num_biases=rng.randint(0, 2),
    )
    return Round(case, options, rng.random() < 0.4, rng.choice((0, 1, 1, 2)))


def random_config(rng: random.Random, num_nodes: int, sizes: Sizes) -> nbep.Config:
    """Rings of a few slots as often as large ones. Nodes share the slots of a ring inside a node in combine."""

    def chunk_and_slots(least: int) -> tuple[int, int]:
        most = sizes.most_slots if rng.random() < 0.5 else max(2 * least, sizes.most_slots // 8)
        chunk = rng.randint(1, max(1, most // (2 * least)))
        return chunk, rng.randint(max(chunk + 1, least * chunk), most)

    (nvl, nvl_slots), (rdma, rdma_slots) = chunk_and_slots(num_nodes), chunk_and_slots(2)
    return nbep.Config(2 * rng.randint(1, sizes.most_channels), nvl, nvl_slots, rdma, rdma_slots - rdma_slots % rdma)


def num_bytes(num_nodes: int, num_nvl_peers: int, sizes: Sizes) -> dict[str, int]:
    """The sizes of a buffer for any round."""
    case = make_case(
        num_ranks=num_nodes * num_nvl_peers,
        num_nodes=num_nodes,
        num_tokens=0,
        hidden=max(sizes.hiddens),
        num_topk=sizes.most_topk,
    )
    config = nbep.Config(2 * sizes.most_channels, 1, sizes.most_slots, 1, sizes.most_slots)
    return internode.num_bytes(case, internode.Options(config))


def wrong_in(buffer: nbep.Buffer, rounds: list[Round], where: str) -> list[str]:
    """Run rounds on one rank: all dispatches, then all combines. What is wrong with them."""
    rank = buffer.rank
    outcomes: list[Outcome] = []
    for case, options, with_cached, _ in rounds:
        outcome = dispatch(buffer, case, options, rank)
        if with_cached:
            x = to_target(dispatch_input(case, options, rank))
            outcome.cached_x = buffer.dispatch(x, handle=outcome.handle, config=options.config)[0]
        outcomes.append(outcome)
    for number in range(2):
        for (case, options, _, num_combines), outcome in zip(rounds, outcomes, strict=True):
            if number < num_combines:
                combine(buffer, case, options, rank, outcome)
    wrong = []
    for a_round, outcome in zip(rounds, outcomes, strict=True):
        try:
            Expected(a_round.case, a_round.options).check(rank, outcome, f"{where}, rank {rank}")
        except AssertionError as error:
            wrong.append(f"{a_round}: {error}")
    return wrong


def wrong_rounds(buffer: nbep.Buffer, num_nodes: int, seed: int, num_rounds: int, sizes: Sizes) -> list[str]:
    """What is wrong on one rank, of rounds that come one by one or in pairs."""
    rng = random.Random(seed)
    wrong = []
    for number in range(num_rounds):
        rounds = [
            make_round(rng, num_nodes, buffer.group_size // num_nodes, sizes) for _ in range(rng.choice((1, 1, 2)))
        ]
        wrong += wrong_in(buffer, rounds, f"seed {seed}, round {number}")
    return wrong
