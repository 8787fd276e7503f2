"""Whatever the inputs and settings: the reference's bits."""

import pytest
from cases import ROUTINGS, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from intranode import Options, run
from parts import both_parts
from target import MEMORY_MODELS

import nbep


@st.composite
def cases(draw):
    num_ranks = draw(st.sampled_from([2, 2, 2, 4]))
    return make_case(
        draw(st.integers(0, 1 << 20)),
        num_ranks=num_ranks,
        num_tokens=draw(st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)),
        hidden=draw(st.sampled_from([8, 128, 256])),
        num_topk=draw(st.integers(1, 6)),
        experts_per_rank=draw(st.integers(1, 5)),
        routing=draw(st.sampled_from(ROUTINGS)),
    )


@st.composite
def options(draw, case):
    send = draw(st.integers(1, 5))
    config = nbep.Config(
        2 * draw(st.integers(1, 3)), send, send + draw(st.integers(1, 6)), mix_roles=draw(st.booleans())
    )
    with_topk = draw(st.booleans())
    return Options(
        config,
        with_topk=with_topk,
        fp8=draw(st.sampled_from([None, "row", "column", "packed"])) if case.hidden % 128 == 0 else None,
        expert_alignment=draw(st.sampled_from([1, 3, 8])),
        num_worst_tokens=sum(case.num_tokens) + draw(st.integers(0, 3)) if with_topk and draw(st.booleans()) else 0,
        num_biases=draw(st.integers(0, 2)),
        zero_copy=draw(st.booleans()),
    )


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("max_examples", both_parts([3], thorough=[20], long=[200]))
def test_dispatch_and_combine_are_the_references_bits(max_examples, memory_model):
    @settings(max_examples=max_examples)
    @given(data=st.data(), case=cases(), seed=st.integers(0, 1 << 20))
    def check(data, case, seed):
        run(case, data.draw(options(case)), seed=seed, memory_model=memory_model)

    check()
