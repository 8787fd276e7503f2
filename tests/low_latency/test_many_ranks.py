"""More ranks than a warp has lanes, in nodes of 8: every loop over ranks goes around more than once, or just fits."""

import numpy as np
import pytest
from low_latency import HOOK, Options, Trip, make_buffer, make_low_latency_case, run
from parts import both_parts
from target import spawn

from nbep.host.target.emulator import EmulatorRuntime

pytestmark = pytest.mark.emulator_only("a card has no room for so many ranks at once")

DEDUPLICATE = Options(deduplicate=True)
ALL_AT_ONCE = Options(
    use_fp8=True, round_scale=True, use_ue8m0=True, dispatch_as=HOOK, use_logfmt=True, combine_as=HOOK
)
WIDE = Options(use_fp8=True, zero_copy=True, with_stats=True)


@pytest.fixture(autouse=True)
def one_block(monkeypatch):
    monkeypatch.setattr(EmulatorRuntime, "resident_blocks", lambda *_: 1)


@pytest.fixture
def between_nodes(monkeypatch):
    """Nodes of 8, which software NICs connect."""
    monkeypatch.setenv("NBEP_TRANSPORT", "ibgda")
    monkeypatch.setenv("NBEP_NUM_NVL_PEERS", "8")


def few_tokens(num_ranks: int, **arguments):
    arguments = {"num_tokens": 1, "num_topk": 3, "experts_per_rank": 1, **arguments}
    return make_low_latency_case(num_ranks, num_ranks=num_ranks, **arguments)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    both_parts(
        [(10, DEDUPLICATE)],
        thorough=[(32, DEDUPLICATE), (34, ALL_AT_ONCE), (48, WIDE)],
        long=[(64, Options()), (64, DEDUPLICATE), (128, Options()), (256, Options())],
    ),
)
def test_tokens_of_many_ranks_reach_their_experts_and_return(num_ranks, options):
    run(few_tokens(num_ranks, hidden=512 if options.use_ue8m0 else 128), options)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    both_parts(
        [], thorough=[(16, Options())], long=[(32, ALL_AT_ONCE), (32, Options()), (32, DEDUPLICATE), (64, Options())]
    ),
)
@pytest.mark.usefixtures("between_nodes")
def test_the_same_between_nodes(num_ranks, options):
    run(few_tokens(num_ranks, hidden=512 if options.use_ue8m0 else 128), options)


@pytest.mark.parametrize(
    ("options", "memory_model"),
    both_parts(
        [],
        thorough=[(Options(), "checked"), (DEDUPLICATE, "delayed")],
        long=[(Options(), "delayed"), (DEDUPLICATE, "checked")],
    ),
)
def test_what_is_ordered_with_few_ranks_is_ordered_with_many(options, memory_model):
    run(few_tokens(34), options, memory_model=memory_model)


@pytest.mark.parametrize("memory_model", both_parts([], thorough=[], long=["delayed", "checked"]))
@pytest.mark.usefixtures("between_nodes")
def test_the_same_over_nics(memory_model):
    run(few_tokens(32), memory_model=memory_model)


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", [7168, 8192])
def test_rows_of_real_models(hidden):
    run(few_tokens(32, hidden=hidden), Options(use_fp8=True))


@pytest.mark.parametrize("num_nvl_peers", both_parts([1], thorough=[3, 8]))
def test_any_number_of_ranks_a_node(num_nvl_peers):
    case, options = few_tokens(3 * num_nvl_peers), Options()

    def trip(comm, case, options):
        buffer = make_buffer(comm, [(case, options)], transport="ibgda", num_nvl_peers=num_nvl_peers)
        outcome = Trip(buffer, case, options).whole()
        buffer.destroy()
        return outcome

    run(case, options, fn=trip)


@pytest.mark.thorough
def test_a_buffer_of_many_ranks_is_cleaned_and_goes_on_without_two():
    """What has cells, signals and masks of its own for each rank: 34 are more than a block's 32 threads."""
    num_ranks, masked = 34, (3, 33)
    case, options = few_tokens(num_ranks), Options()

    def main(comm):
        buffer = make_buffer(comm, [(case, options)], enable_shrink=True)
        first = Trip(buffer, case, options).whole()
        buffer.clean_low_latency_buffer(1, case.hidden, case.num_experts)
        second = Trip(buffer, case, options).whole()
        status = np.zeros(num_ranks, np.int32)
        for rank in masked:
            if comm.rank not in masked:
                buffer.low_latency_update_mask_buffer(rank, True)
        buffer.low_latency_query_mask_buffer(status)
        buffer.destroy()
        return first, second, status.nonzero()[0].tolist()

    for rank, (first, second, status) in enumerate(spawn(main, num_ranks)):
        assert np.array_equal(first.combined_x, second.combined_x)
        assert status == ([] if rank in masked else list(masked))
