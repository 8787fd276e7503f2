"""Whatever the inputs and options: the reference's bits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from low_latency import ASYNC, BOTH, HOOK, LOW_LATENCY_ROUTINGS, Options, make_low_latency_case, run
from parts import both_parts
from target import MEMORY_MODELS, TARGET

from nbep.device.cards import SM75, SM80, SM89, SM90


@st.composite
def cases(draw):
    num_ranks = draw(st.sampled_from([2, 2, 2, 3, 4]))
    return make_low_latency_case(
        draw(st.integers(0, 1 << 20)),
        num_ranks=num_ranks,
        num_tokens=draw(st.lists(st.integers(0, 7), min_size=num_ranks, max_size=num_ranks)),
        hidden=draw(st.sampled_from([128, 128, 512, 1024, 1152])),
        num_topk=draw(st.integers(1, 6)),
        experts_per_rank=draw(st.integers(1, 5)),
        routing=draw(st.sampled_from(LOW_LATENCY_ROUTINGS)),
    )


@st.composite
def options(draw, case):
    use_fp8 = draw(st.booleans())
    round_scale = use_fp8 and draw(st.booleans())
    deduplicate = draw(st.booleans())
    use_logfmt = not deduplicate and draw(st.booleans())
    return Options(
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=round_scale and case.hidden % 512 == 0 and draw(st.booleans()),
        deduplicate=deduplicate,
        dispatch_as=draw(st.sampled_from([BOTH, HOOK, ASYNC])),
        use_logfmt=use_logfmt,
        zero_copy=not use_logfmt and draw(st.booleans()),
        combine_as=draw(st.sampled_from([BOTH, HOOK, ASYNC])),
        with_out=draw(st.booleans()),
        with_stats=draw(st.booleans()),
        spare=draw(st.integers(0, 2)),
        compute_capability=draw(st.sampled_from([SM75, SM80, SM89, SM90])) if TARGET == "emulator" else SM90,
    )


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("max_examples", both_parts([3], thorough=[15], long=[120]))
def test_dispatch_and_combine_are_the_references_bits(max_examples, memory_model):
    @settings(max_examples=max_examples)
    @given(data=st.data(), case=cases(), seed=st.integers(0, 1 << 20))
    def check(data, case, seed):
        run(case, data.draw(options(case)), seed=seed, memory_model=memory_model)

    check()
