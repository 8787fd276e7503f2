"""A combine that fetches rows from where experts wrote them: the same bits as one that pushes, and no row too early."""

import ml_dtypes
import numpy as np
import pytest
from cases import make_case
from elastic import ElasticOptions, dispatch_arguments, make_elastic_buffer
from parts import both_parts
from target import MEMORY_MODELS, spawn

pytestmark = pytest.mark.emulator_only("NumPy arrays over the shared rows")


def fetched_and_pushed(comm, cases, is_async):
    """For each case: what a combine of shared rows returns, which are spoilt right behind it; and one of other rows."""
    options = ElasticOptions(with_weights=False)
    buffer = make_elastic_buffer(comm, [(case, options) for case in cases])
    rows = buffer.make_rows(sum(sum(case.num_tokens) for case in cases), cases[0].hidden)
    results = []
    for case in cases:
        recv_x, _, _, handle, _ = buffer.dispatch(**dispatch_arguments(case, options, comm.rank))
        x = rows.like(recv_x)
        x[:] = (recv_x.astype(np.float32) * (1.37 + comm.rank)).astype(ml_dtypes.bfloat16)
        elsewhere = np.array(x)
        bias = case.x[comm.rank]
        fetched, _, event = buffer.combine(x, handle, bias=bias, async_with_compute_stream=is_async)
        event.current_stream_wait()
        x[:] = np.nan
        results.append((fetched.tobytes(), buffer.combine(elsewhere, handle, bias=bias)[0].tobytes()))
    buffer.destroy()
    return results


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[1, 4]))
def test_the_bits_are_those_of_a_combine_that_pushes(num_ranks, memory_model, is_async):
    counts = [(5, 0, 3, 7), (0, 4, 1, 2), (0, 0, 0, 0)]
    cases = [make_case(i, num_ranks=num_ranks, num_tokens=c[:num_ranks], num_topk=3) for i, c in enumerate(counts)]
    for results in spawn(fetched_and_pushed, num_ranks, (cases, is_async), memory_model=memory_model):
        for number, (fetched, pushed) in enumerate(results):
            assert fetched == pushed, number


def test_a_rank_that_fetches_alone_is_named():
    case, options = make_case(1), ElasticOptions(with_weights=False)

    def main(comm):
        buffer = make_elastic_buffer(comm, [(case, options)])
        rows = buffer.make_rows(20, case.hidden)
        recv_x, _, _, handle, _ = buffer.dispatch(**dispatch_arguments(case, options, comm.rank))
        buffer.combine(rows.like(recv_x) if comm.rank else np.array(recv_x), handle)

    with pytest.raises(ValueError, match="x in shared rows"):
        spawn(main, 2)
