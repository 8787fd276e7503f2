"""As many nodes as DeepEP has settings for: 20. A block of combine between them has 22 warps."""

import pytest
from internode import TRANSPORTS, Options, make_node_case, run
from parts import both_parts

import nbep
from nbep.host.config import COMBINE_TABLE, DISPATCH_TABLE


@pytest.mark.parametrize(
    ("num_nodes", "num_nvl_peers", "transport"),
    both_parts(
        [],
        thorough=[
            (10, 2, "direct"),
            (10, 2, "ibgda"),
            *((20, 1, transport) for transport in TRANSPORTS),
            (19, 1, "direct"),
        ],
    ),
)
def test_dispatch_and_combine_between_many_nodes_are_the_references_bits(num_nodes, num_nvl_peers, transport):
    num_ranks = num_nodes * num_nvl_peers
    num_tokens = [rank % 3 for rank in range(num_ranks)]
    case = make_node_case(12, num_nodes, num_nvl_peers, num_tokens=num_tokens, num_topk=4, experts_per_rank=1)
    run(case, Options(nbep.Config(2, 1, num_nodes, 1, 2), num_biases=1, transport=transport))


def test_a_buffer_takes_as_many_nodes_as_there_are_settings_for():
    """With blocks of the usual size and, in combine, of one warp for each of 20 nodes and two that coordinate."""
    most = max(max(table.over_nodes) for table in (DISPATCH_TABLE, COMBINE_TABLE)) // 8

    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 17, 1 << 17, num_nvl_peers=1)
        mode = buffer._memory.internode
        warps = mode.num_warps(None), mode.num_warps(None, mode.most_combine_warps)
        buffer.destroy()
        return warps

    assert nbep.spawn(main, most) == [(20, 22)] * most
