"""The options of the low-latency verbs, one by one and together."""

from dataclasses import replace

import numpy as np
import pytest
from cases import make_case
from low_latency import ASYNC, HOOK, Options, make_low_latency_case, run
from parts import both_parts, dear

from nbep.device.cards import SM75, SM80, SM89

pytestmark = pytest.mark.usefixtures("blocks")

UE8M0 = Options(use_fp8=True, round_scale=True, use_ue8m0=True)


@dear
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("hidden", both_parts([640], thorough=[128]))
def test_fp8_tokens_come_with_transposed_scales(hidden, round_scale, deduplicate):
    case = make_low_latency_case(1, num_tokens=4, hidden=hidden)
    run(case, Options(use_fp8=True, round_scale=round_scale, deduplicate=deduplicate))


@dear
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("hidden", both_parts([1536], thorough=[512]))
def test_ue8m0_scales_are_four_exponents_a_word(hidden, deduplicate):
    case = make_low_latency_case(2, num_tokens=4, hidden=hidden)
    run(case, Options(use_fp8=True, round_scale=True, use_ue8m0=True, deduplicate=deduplicate))


@dear
@pytest.mark.parametrize("called_as", [HOOK, ASYNC])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_hooks_and_events_give_the_same_bits(deduplicate, called_as):
    case = make_low_latency_case(3, num_ranks=3, num_tokens=[5, 1, 3], num_topk=3)
    run(case, Options(dispatch_as=called_as, combine_as=called_as, deduplicate=deduplicate))


@dear
@pytest.mark.parametrize("combine_as", [HOOK, ASYNC])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_rows_may_lie_in_the_buffer_already(deduplicate, combine_as):
    case = make_low_latency_case(4, num_tokens=5, num_topk=3)
    run(case, Options(zero_copy=True, deduplicate=deduplicate, combine_as=combine_as))


def test_combine_writes_to_out():
    run(make_low_latency_case(5, num_tokens=5), Options(with_out=True))


@dear
@pytest.mark.parametrize("called_as", [HOOK, ASYNC])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_statistics_are_added_to_what_was_there(deduplicate, called_as):
    case = make_low_latency_case(6, num_ranks=3, num_tokens=[4, 0, 2], num_topk=2)
    run(case, Options(with_stats=True, deduplicate=deduplicate, dispatch_as=called_as, combine_as=called_as))


@pytest.mark.parametrize("hidden", both_parts([384], thorough=[128, 2048]))
def test_logfmt_gives_the_references_bits(hidden):
    run(make_low_latency_case(7, num_tokens=4, hidden=hidden, num_topk=3), Options(use_logfmt=True))


def test_logfmt_rows_that_do_not_fit_into_a_stage():
    case = make_case(8, num_tokens=1, hidden=7168, unused=0)  # 14,336 bytes as bf16
    encoded = [(x.astype(np.float32) / 8).astype(x.dtype) for x in case.x]
    for rank, x in enumerate(encoded):
        case.x[rank][:, 1024:5120] = x[:, 1024:5120]
    run(case, Options(use_logfmt=True))


@pytest.mark.emulator_only("a GPU is the card that it is")
@pytest.mark.parametrize("cc", both_parts([(SM75,)], thorough=[(SM80,), (SM89,), ((12, 0),)]))
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(deduplicate=True),
        UE8M0,
        Options(use_logfmt=True),
        Options(zero_copy=True, deduplicate=True, use_fp8=True),
    ],
    ids=str,
)
def test_a_card_without_copy_engine_or_conversions_computes_the_same(options, cc):
    case = make_low_latency_case(9, num_tokens=[3, 4], hidden=512, num_topk=3)
    run(case, replace(options, compute_capability=cc))
