"""All schedules give one result."""

import pytest
from cases import make_case
from intranode import Options, round_trip, run
from parts import both_parts, dear
from target import MEMORY_MODELS

import nbep
from nbep.device.cards import SM80

pytestmark = pytest.mark.emulator_only("a seed gives a schedule, and a tracer sees it")


@pytest.mark.emulator_only("new arrays of a GPU hold what the memory held before")
def test_rows_that_nothing_wrote_are_the_same_in_every_run():
    options = Options(num_worst_tokens=20)
    first, second = (run(make_case(1), options) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.recv_x.tobytes() == b.recv_x.tobytes()


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 16)], long=[range(16, 40)]))
def test_all_seeds_give_one_result(seeds, memory_model):
    case = make_case(2, num_tokens=(9, 6), hidden=128, num_topk=3)
    for seed in seeds:
        run(case, Options(num_biases=1), seed=seed, memory_model=memory_model)
        run(
            case,
            Options(fp8="column", config=nbep.Config(2, 3, 5, num_threads=128)),
            seed=seed,
            memory_model=memory_model,
        )


@dear
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts([(4, range(1))], thorough=[(4, range(1, 3)), (8, range(1))], long=[(4, range(3, 8)), (8, range(1, 5))]),
)
@pytest.mark.parametrize("memory_model", ["delayed", "checked"])
def test_more_ranks_give_one_result_if_stores_may_be_late_or_must_be_ordered(num_ranks, seeds, memory_model):
    for seed in seeds:
        run(make_case(3, num_ranks=num_ranks, num_tokens=4, num_topk=3), seed=seed, memory_model=memory_model)


def test_kernels_without_bulk_copies_give_the_same():
    def main(comm, case, options):
        comm.runtime.world.compute_capability = SM80
        return round_trip(comm, case, options)

    run(make_case(5, num_tokens=9, hidden=264), fn=main)
    run(make_case(6, num_tokens=9, hidden=128), Options(fp8="row"), fn=main)
