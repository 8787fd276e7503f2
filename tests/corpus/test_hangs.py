"""The first paragraph about a kernel that hangs names the cause: the wait, the cell, what is expected and seen."""

from collections.abc import Sequence
from functools import partial

import hangs_nbep
import hangs_networks
import hangs_users
import internode
import intranode
import low_latency
import pytest
from cases import make_case
from entries import Broken, beginning, check
from hangs_nbep import NOTHING, PUBLISH_HEAD
from parts import both_parts
from scenarios import scenario, with_edit

import nbep
from nbep.device.kernels.internode import coordinator
from nbep.device.kernels.intranode import dispatch
from nbep.device.kernels.low_latency import dispatch_sender
from nbep.device.network.ibgda import queue_pair
from nbep.device.protocols import grid_barrier
from nbep.lab.notebook import edit

pytestmark = [pytest.mark.emulator_only("a GPU reports no deadlock"), pytest.mark.usefixtures("held_reports")]

ENTRIES = [*hangs_nbep.ENTRIES, *hangs_users.ENTRIES]
NETWORKS = hangs_networks.ENTRIES


@pytest.mark.parametrize(
    ("broken", "seeds"),
    both_parts(
        [(broken, range(1)) for broken in [*ENTRIES[::2], *NETWORKS[::3]]],
        thorough=[
            *((broken, range(i % 2 == 0, 3)) for i, broken in enumerate(ENTRIES)),
            *((broken, range(i % 3 == 0, 2)) for i, broken in enumerate(NETWORKS)),
        ],
    ),
    ids=str,
)
def test_the_report_names_why_it_hangs(broken: Broken, seeds: range) -> None:
    check(broken._replace(seeds=seeds, least=len(seeds)))


FIRST = {"stages: lanes miss a phase of their mbarrier": 1}  # the first seed that shows it with delayed stores


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("broken", "memory_model", "seeds"),
    [
        *((broken, model, range(2)) for broken in hangs_users.ENTRIES for model in ("delayed", "checked")),
        *((broken, "delayed", [FIRST.get(broken.name, 0)]) for broken in NETWORKS[1::2]),
    ],
    ids=str,
)
def test_the_report_is_the_same_in_every_memory_model(broken: Broken, memory_model: str, seeds: Sequence[int]) -> None:
    check(broken._replace(run=partial(broken.run, memory_model=memory_model), seeds=seeds, least=len(seeds)))


def inside_a_node() -> None:
    case = make_case(1, num_ranks=8, num_tokens=40, num_topk=4, routing="everywhere")
    with edit(dispatch.receive_tokens, PUBLISH_HEAD, NOTHING):
        intranode.run(case, intranode.Options(nbep.Config(4, 2, 5)))


def between_nodes() -> None:
    case = internode.make_node_case(1, 2, 4, num_tokens=24, num_topk=4, routing="everywhere")
    with edit(coordinator.publish_heads, "head, total, Column", "head, 0, Column"):
        internode.run(case, internode.Options(nbep.Config(4, 2, 8, 2, 4)))


def with_low_latency() -> None:
    case = low_latency.make_low_latency_case(1, num_ranks=8, num_tokens=8, num_topk=4)
    with edit(dispatch_sender.count_choices, "completion(num_chosen)", "completion(num_chosen + 1)"):
        low_latency.run(case, low_latency.Options())


def at_a_grid_barrier() -> None:
    run = scenario("internode", ranks=8)
    with_edit(grid_barrier.barrier_grid, "TOP - (ptx.grid_dim() - 1)", "TOP - ptx.grid_dim()", run)(1)


def over_nics() -> None:
    run = scenario("low_latency", ranks=8, nic=1, experts=1, topk=2, tokens=2)
    with_edit(queue_pair.submit, "ring(field(qp, DOORBELL), after, field(qp, QPN))", NOTHING, run)(1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hang", "who"),
    [
        (at_a_grid_barrier, "the grid barrier"),
        (over_nics, "the low-latency dispatch receiver"),
        (inside_a_node, "the dispatch sender"),
        (between_nodes, "the internode dispatch RDMA sender"),
        (with_low_latency, "the low-latency dispatch receiver"),
    ],
)
def test_a_hang_of_eight_ranks_fits_in_40_lines(hang, who) -> None:
    with pytest.raises(nbep.DeadlockError) as caught:
        hang()
    lines = str(caught.value).splitlines()
    assert len(lines) <= 40
    assert who in lines[0]
    assert caught.value.full.startswith(beginning(caught.value))
    assert len(caught.value.full.splitlines()) > 2 * len(lines)
