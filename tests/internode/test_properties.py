"""Whatever the inputs and settings between nodes: the reference's bits."""

import pytest
from cases import NODE_ROUTINGS, ROUTINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from internode import TRANSPORTS, Options, make_node_case, run
from parts import both_parts
from target import MEMORY_MODELS

import nbep

pytestmark = pytest.mark.long


@st.composite
def cases(draw):
    num_nodes, num_nvl_peers = draw(st.sampled_from([(2, 2), (2, 2), (2, 1), (3, 1), (3, 2), (2, 3)]))
    num_ranks = num_nodes * num_nvl_peers
    return make_node_case(
        draw(st.integers(0, 1 << 20)),
        num_nodes,
        num_nvl_peers,
        num_tokens=draw(st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)),
        hidden=draw(st.sampled_from([8, 128, 256])),
        num_topk=draw(st.integers(1, 6)),
        experts_per_rank=draw(st.integers(1, 5)),
        routing=draw(st.sampled_from(ROUTINGS + NODE_ROUTINGS)),
    )


@st.composite
def options(draw, case):
    nvl, rdma = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    config = nbep.Config(
        2 * draw(st.integers(1, 3)),
        nvl,
        case.num_nodes * nvl + draw(st.integers(0, 6)),
        rdma,
        rdma * draw(st.integers(2, 4)),
    )
    with_topk = draw(st.booleans())
    return Options(
        config,
        with_topk=with_topk,
        fp8=draw(st.sampled_from([None, "row", "column", "packed"])) if case.hidden % 128 == 0 else None,
        expert_alignment=draw(st.sampled_from([1, 3, 8])),
        num_worst_tokens=sum(case.num_tokens) + draw(st.integers(0, 3)) if with_topk and draw(st.booleans()) else 0,
        num_biases=draw(st.integers(0, 2)),
        transport=draw(st.sampled_from(TRANSPORTS)),
    )


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("max_examples", both_parts([2], thorough=[10], long=[40]))
def test_dispatch_and_combine_between_nodes_are_the_references_bits(max_examples, memory_model):
    @settings(max_examples=max_examples)
    @given(data=st.data(), case=cases(), seed=st.integers(0, 1 << 20))
    def check(data, case, seed):
        run(case, data.draw(options(case)), seed=seed, memory_model=memory_model)

    check()
