"""Who takes part in the hops between nodes: every warp that can have work has some."""

from collections import Counter
from types import SimpleNamespace

import pytest

import nbep
from nbep.device.cards import has_bulk_copies, max_smem_bytes
from nbep.device.kernels.internode.arguments import MAX_TEAMS, Context, Here
from nbep.device.kernels.internode.combine_sender import join_team, rank_of_ring
from nbep.device.layout.internode import MAX_RDMA_RANKS
from nbep.host.config import COMBINE_TABLE, DISPATCH_TABLE, nodes_config
from nbep.host.internode.memory import InternodeMemory, check_nodes

SHAPES = [(nodes, places) for nodes in (2, 3, 8, 18, 20) for places in (2, 3, 8)]


@pytest.mark.parametrize(("num_nodes", "num_places"), SHAPES)
@pytest.mark.parametrize("num_senders", [1, 2, 10, 18])
def test_each_ring_of_a_combine_has_one_team_and_each_team_has_rings(num_nodes, num_places, num_senders):
    for place in range(num_places):
        here = Here(0, place, num_nodes, num_places, 0, 1)
        ctx = Context(None, None, None, None, here, 0, (), None, None, None)
        num_rings = num_nodes * (num_places - 1)
        sizes: Counter = Counter()
        served: Counter = Counter()
        for sender in range(num_senders):
            team, num_teams = join_team(ctx, num_rings, sender, num_senders)
            if team.peer < num_teams:
                sizes[team.peer] += 1
                assert team.warp < team.num_warps
        for team in range(num_teams):
            served.update(rank_of_ring(ctx, ring) for ring in range(team, num_rings, num_teams))
        assert set(served.values()) == {1}
        assert sorted(served) == [rank for rank in range(num_nodes * num_places) if rank % num_places != place]
        assert sorted(sizes) == list(range(num_teams))
        assert set(sizes.values()) == {num_senders // num_teams}
        assert num_teams == min(num_senders, num_rings, MAX_TEAMS)


@pytest.mark.parametrize(("num_nodes", "num_places"), [*SHAPES, (2, 1), (18, 1), (20, 1)])
@pytest.mark.parametrize("most_warps", [0, 12, 20])
def test_blocks_have_warps_for_all_roles_and_stages_for_both_halves(num_nodes, num_places, most_warps):
    mode = InternodeMemory.__new__(InternodeMemory)
    mode.num_rdma_ranks, mode.num_nvl_ranks = num_nodes, num_places
    mode.rdma = SimpleNamespace(runtime=SimpleNamespace(has_tma=True, max_smem_bytes=max_smem_bytes((9, 0))))
    fewest, _ = mode.bounds_of_warps()
    for num_warps in range(fewest, max(most_warps, fewest) + 1):
        assert (num_places - 1) * mode.num_nvl_receivers(num_warps) <= num_warps - 2  # a sender, and its coordinator
        num_senders = num_warps - 1 - mode.num_rdma_receivers(num_warps)
        assert 2 * num_senders <= num_warps  # each has two places for its stage
        assert (num_senders > 0) == (num_places > 1)


@pytest.mark.parametrize(("cc", "most"), [((9, 0), 20), ((8, 0), 10), ((8, 6), 9), ((12, 0), 9), ((7, 5), 4)])
def test_nodes_that_a_cards_blocks_have_no_warps_for_are_refused(cc, most):
    """Cards of sm_90 take 20 nodes, those of sm_80 ten; those of sm_86 and sm_75 have less shared memory."""
    card = SimpleNamespace(has_tma=has_bulk_copies(cc), max_smem_bytes=max_smem_bytes(cc))
    for num_nodes in range(2, most + 1):
        check_nodes(card, num_nodes)
    if most < MAX_RDMA_RANKS:
        with pytest.raises(ValueError, match=f"group: got {most + 1} nodes; must be at most {most} nodes on this GPU"):
            check_nodes(card, most + 1)


def test_two_nodes_of_two_have_chunks_of_their_own():
    assert nodes_config(DISPATCH_TABLE, 24, 2, 2) == nbep.Config(24, 64, 288, 8, 128)
    assert nodes_config(COMBINE_TABLE, 24, 2, 2) == nbep.Config(24, 32, 288, 8, 128)
    assert nodes_config(COMBINE_TABLE, 24, 2, 8) == nbep.Config(24, 4, 288, 12, 128)
