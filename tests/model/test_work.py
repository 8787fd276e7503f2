"""Routes are drawn as DeepEP's tests draw them, and features are what plain loops count in them."""

from dataclasses import replace

import numpy as np
import pytest

from research.model.features import features, mean, total
from research.model.published import work_of
from research.model.work import Work

NORMAL = Work("internode", 12, 2, 40, 256, 6, 48, num_channels=3, nvl_chunks=(3, 2), rdma_chunks=(2, 5), seed=3)


def node_of(work, expert):
    return int(expert) // (work.num_experts // work.num_nodes)


def test_a_token_of_the_normal_modes_goes_to_four_nodes_at_most():
    nodes = [len({node_of(NORMAL, expert) for expert in row}) for row in NORMAL.topk_idx(5)]
    assert max(nodes) <= 4
    assert max(len({node_of(NORMAL, e) for e in row}) for row in replace(NORMAL, mode="low_latency").topk_idx(5)) > 4


@pytest.mark.parametrize("mode", ["internode", "low_latency"])
def test_a_token_chooses_different_experts(mode):
    for row in replace(NORMAL, mode=mode).topk_idx(1):
        assert len(set(row.tolist())) == NORMAL.num_topk


def test_ranks_and_seeds_draw_differently_and_the_same_draws_are_the_same():
    first = NORMAL.topk_idx(0)
    assert (replace(NORMAL, rdma_chunks=(9, 9)).topk_idx(0) == first).all()
    assert (NORMAL.topk_idx(1) != first).any()
    assert (replace(NORMAL, seed=4).topk_idx(0) != first).any()


@pytest.mark.parametrize(("verb", "nvl_chunk", "rdma_chunk"), [("dispatch", 3, 2), ("combine", 2, 5)])
def test_features_between_nodes_are_what_loops_count(verb, nvl_chunk, rdma_chunk):
    rank, per_channel = 7, 14  # of 40 tokens
    routes = NORMAL.routes(rank)
    to_nodes, to_ranks = {}, {}
    for token in range(NORMAL.num_tokens):
        destinations = [dst for dst in range(NORMAL.num_ranks) if routes[token, dst]]
        channel = token // per_channel
        for node in {dst // 2 for dst in destinations} - {rank // 2}:
            to_nodes.setdefault((channel, node), []).append(token)
        for dst in destinations:
            if dst % 2 != rank % 2:
                to_ranks.setdefault((channel, dst), []).append(token)
    found = features(NORMAL, verb, rank)
    assert found["pairs.network"] == sum(map(len, to_nodes.values()))
    assert found["pairs.nvlink"] == sum(map(len, to_ranks.values()))
    assert found["chunks.network"] == sum(-(-len(tokens) // rdma_chunk) for tokens in to_nodes.values())
    assert found["chunks.nvlink"] == sum(-(-len(tokens) // nvl_chunk) for tokens in to_ranks.values())
    assert found["rings.network"] == 3 * 5
    assert found["pairs.home"] + found["pairs.nvlink"] == routes.sum()


def test_features_of_low_latency_are_what_loops_count():
    work, rank = Work("low_latency", 6, 2, 5, 128, 3, 12, seed=4), 2
    links = ["network", "network", "home", "nvlink", "network", "network"]
    destinations = [int(expert) for expert in work.topk_idx(rank).reshape(-1)]
    found = features(work, "dispatch", rank)
    for link in ("home", "nvlink", "network"):
        there = [expert for expert in destinations if links[expert // 2] == link]
        assert found[f"choices.{link}"] == len(there)
        assert found[f"chosen.{link}"] == len(set(there))
        assert found[f"experts.{link}"] == 2 * links.count(link)


def test_the_mean_over_all_ranks_is_the_total_by_their_number():
    sums = total(NORMAL, "dispatch")
    assert mean(NORMAL, "dispatch", NORMAL.num_ranks) == pytest.approx({name: x / 12 for name, x in sums.items()})


def test_published_works_have_the_sizes_of_the_table():
    work = work_of("internode", 64)
    assert (work.num_tokens, work.hidden, work.num_topk, work.num_experts) == (4096, 7168, 8, 256)
    assert (work.num_nodes, work.num_channels) == (8, 12)
    assert work_of("low_latency", 1024).num_experts == 1024
    assert work_of("low_latency", 16).topk_idx(3).shape == (128, 8)


def test_tokens_reach_as_many_nodes_as_chance_has_it():
    work = work_of("internode", 32)
    by_node = work.routes(0).reshape(4096, 4, 8).any(axis=2)
    # Eight different ones of 256 experts miss a given node of 64 experts with the chance of drawing none of them.
    chance = 1 - np.prod([(192 - i) / (256 - i) for i in range(8)])
    assert by_node.mean() == pytest.approx(chance, rel=0.01)
