"""Ranks of a node that are one notify ahead of another do not touch what it still reads: counts have two places.

In a search no rank stays behind for that long, so one is held here, between the node's barrier and its sums.
"""

import ast

import pytest

from nbep.device.kernels.internode import notify_dispatch
from nbep.device.primitives import globaltimer, thread_idx
from nbep.lab.check import Run, broken, edited, perform

pytestmark = [pytest.mark.emulator_only("a rank is held in Python"), pytest.mark.thorough]
HELD, NANOSECONDS = 3, 1_000_000
RUN = Run("internode.sparse", (("ranks", 4), ("rounds", 2)), memory_model="checked")


def hold(network):
    if network.rank == HELD and thread_idx() == 0:
        until = globaltimer() + NANOSECONDS
        while globaltimer() < until:
            pass


def held_before_its_sums(function: ast.FunctionDef) -> None:
    place = next(i for i, node in enumerate(function.body) if "sum_rank_counts" in ast.unparse(node))
    function.body.insert(place, ast.parse("_hold(ctx.network)").body[0])


@pytest.fixture(autouse=True)
def held(monkeypatch):
    monkeypatch.setattr(notify_dispatch, "_hold", hold, raising=False)
    with edited(notify_dispatch.exchange, held_before_its_sums):
        yield


def test_a_rank_that_stays_behind_reads_its_own_counts():
    assert perform(RUN) is None


def test_counts_with_one_place_are_overwritten_and_found():
    with broken("internode.notify_dispatch.counts_from: place of a round"):
        found = perform(RUN)
    assert found is not None
    assert found.kind == "race"
