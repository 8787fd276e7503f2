"""get_dispatch_layout against the reference."""

import numpy as np
import pytest
from arrays import assert_kind, to_numpy, to_target
from cases import ROUTINGS, make_case
from intranode import Report, check_layout
from parts import both_parts
from target import spawn

import nbep


def layouts(case, seed=0):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
        *layout, _ = buffer.get_dispatch_layout(to_target(case.topk_idx[comm.rank]), case.num_experts)
        assert_kind(*layout)
        buffer.destroy()
        return to_numpy(layout)

    for rank, layout in enumerate(spawn(main, case.num_ranks, seed=seed)):
        sent = [case.provenance(rank, token) for token in range(len(case.x[rank]))]
        check_layout(Report(f"inputs {case.seed}, schedule {seed}, rank {rank}"), case.layouts[rank], layout, sent)


@pytest.mark.parametrize("num_ranks", both_parts([4], thorough=[2, 8]))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layout_marks_each_rank_once_for_every_routing(num_ranks, routing):
    layouts(make_case(1, num_ranks=num_ranks, num_tokens=9, num_topk=3, routing=routing))


def test_layout_of_different_token_counts_on_every_rank():
    layouts(make_case(2, num_ranks=4, num_tokens=[0, 1, 70, 33], num_topk=4, experts_per_rank=3))


def test_layout_with_more_experts_than_threads():
    layouts(make_case(3, num_ranks=2, num_tokens=5, num_topk=8, experts_per_rank=40))


def test_layout_with_top_32_of_one_expert_per_token():
    layouts(make_case(4, num_ranks=8, num_tokens=3, num_topk=32, experts_per_rank=5, unused=0))


def test_layout_counts_an_expert_twice_if_a_token_names_it_twice():
    topk_idx = np.array([[1, 1, -1]])

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
        num_tokens_per_rank, _, num_tokens_per_expert, _, _ = buffer.get_dispatch_layout(to_target(topk_idx), 4)
        buffer.destroy()
        return to_numpy(num_tokens_per_rank).tolist(), to_numpy(num_tokens_per_expert).tolist()

    assert spawn(main, 2) == [([1, 0], [0, 2, 0, 0])] * 2


def test_second_layout_does_not_see_the_counts_of_the_first():
    first, second = make_case(5, num_tokens=40), make_case(6, num_tokens=3)

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
        results = [
            buffer.get_dispatch_layout(to_target(case.topk_idx[comm.rank]), case.num_experts)[:4]
            for case in (first, second, first)
        ]
        buffer.destroy()
        return to_numpy(results)

    for rank, results in enumerate(spawn(main, 2)):
        for case, layout in zip((first, second, first), results, strict=True):
            check_layout(Report(f"inputs {case.seed}, rank {rank}"), case.layouts[rank], layout, [])
