"""A division by a number that the host knows is right for all quotients that it is made for."""

from itertools import chain

import pytest

from nbep.device.alignment import INVERSE_BITS, divided, inverse_of
from nbep.device.layout.low_latency import MAX_EXPERTS, local_and_rank, rank_of, shape_of


@pytest.mark.parametrize("divisor", [*range(1, 40), 63, 64, 65, 127, 1000, 1023, MAX_EXPERTS // 2, 16383])
def test_the_quotient_is_that_of_integers_up_to_the_bound(divisor):
    most = (1 << INVERSE_BITS) // divisor - 1
    edges = chain.from_iterable((q * divisor - 1, q * divisor, q * divisor + 1) for q in (1, 2, 3, most // divisor))
    for value in filter(most.__ge__, (*range(3 * divisor), *edges, most)):
        assert divided(value, inverse_of(divisor)) == value // divisor


@pytest.mark.parametrize(("num_ranks", "per_rank"), [(2, 1), (3, 5), (4, 72), (6, 3), (16, 64), (256, 8), (96, 3)])
def test_experts_and_pairs_are_found_by_their_numbers(num_ranks, per_rank):
    shape = shape_of(num_ranks, num_ranks * per_rank, 8, 128)
    for number in range(num_ranks * per_rank):
        assert rank_of(shape, number) == divmod(number, per_rank)
        assert local_and_rank(shape, number) == divmod(number, num_ranks)
