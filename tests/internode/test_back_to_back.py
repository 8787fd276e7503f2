"""Calls of all shapes follow each other on one buffer of several nodes.

A ring lies elsewhere in each call, and peers may still be in the call before: what a late store, a late message, a late
poll or a missing barrier would do shows here.
"""

from dataclasses import replace

import numpy as np
import pytest
from calls import SlowRank, check_calls, check_steps, make_calls, make_steps
from cases import Case
from internode import NIC, TRANSPORTS, Options, make_node_case
from parts import both_parts, dear
from target import MEMORY_MODELS, TARGET
from trips import dispatches_first, run_rounds

import nbep
from nbep import reference

pytestmark = pytest.mark.long

IBGDA = {"transport": "ibgda", "nic": NIC}
KERNELS = "nbep.device.kernels.internode"


@pytest.mark.parametrize(
    ("memory_model", "num_nodes", "num_nvl_peers", "seeds"),
    both_parts(
        [],
        thorough=[
            *(("sc", *shape, range(5)) for shape in ((2, 2), (3, 2), (2, 3))),
            *((model, 2, 2, range(4)) for model in ("delayed", "checked")),
            ("delayed", 2, 3, range(4, 6)),
            ("checked", 3, 2, range(4, 6)),
        ],
    ),
)
def test_every_call_gets_the_references_bits(memory_model, num_nodes, num_nvl_peers, seeds):
    if memory_model != "sc" and TARGET != "emulator":
        pytest.skip("a GPU has its own memory model")
    for seed in seeds:
        calls = make_calls(seed, num_nodes * num_nvl_peers, num_nodes)
        check_calls(seed, calls, memory_model=memory_model)


@pytest.mark.emulator_only("a seed gives a schedule")
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seeds", both_parts([], thorough=[range(10, 14)]))
def test_every_call_over_nics_gets_the_references_bits(seeds, memory_model):
    for seed in seeds:
        check_calls(seed, make_calls(seed, 4, 2, **IBGDA), memory_model=memory_model)


@pytest.mark.emulator_only("the host is faster than every kernel")
@pytest.mark.parametrize(
    ("memory_model", "transport", "seeds"),
    both_parts(
        [],
        thorough=[(model, transport, range(2)) for model in ("sc", "delayed", "checked") for transport in TRANSPORTS],
    ),
)
def test_hosts_that_run_ahead_get_the_references_bits(memory_model, transport, seeds):
    for seed in seeds:
        calls = make_calls(seed, 4, 2, transport=transport, nic=NIC)
        check_steps(seed, *make_steps(seed, calls), memory_model=memory_model)


def first_tokens_to_one_rank(seed: int, rank: int) -> Case:
    """Two tokens of rank 0 go to a rank of its own node, and all others of its tokens to itself."""
    case = make_node_case(seed, num_tokens=(20, 0, 0, 0), num_topk=1, experts_per_rank=1)
    case.topk_idx[0][:] = np.where(np.arange(20) < 2, rank, 0)[:, None]
    layouts = [reference.get_dispatch_layout(idx, case.num_experts, case.num_ranks) for idx in case.topk_idx]
    return replace(case, layouts=layouts)


@dear
@pytest.mark.emulator_only("one rank is made slow")
@pytest.mark.parametrize("memory_model", both_parts(["sc"], thorough=["delayed", "checked"]))
@pytest.mark.parametrize("seed", both_parts(range(1), thorough=[1], long=range(2, 6)))
def test_a_forwarder_is_done_with_a_rank_when_that_has_its_last_token(seed, memory_model, monkeypatch):
    """Rank 1 has both of its tokens, and goes on to the next call, while rank 0 forwards others."""
    slow = SlowRank(monkeypatch, [(f"{KERNELS}.dispatch_forwarder", "publish_tail")])
    slow.rank, slow.reads = 0, 200
    options = Options(nbep.Config(2, 1, 3, 1, 2))
    rounds = [(first_tokens_to_one_rank(number, 1), options) for number in range(3)]
    run_rounds(dispatches_first, rounds, seed, memory_model=memory_model)
