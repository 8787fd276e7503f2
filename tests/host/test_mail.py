"""Reports of ranks that share a GPU: whoever raises first has those of the others."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nbep.host.ranks import roll_call
from nbep.host.ranks.comm import CommGroup, InProcessComm
from nbep.host.ranks.roll_call import RollCall


def wait_until(predicate, describe, told=None):
    while not predicate():
        pass


GPU = SimpleNamespace(target="cuda", check_caller=lambda verb: None, wait_until=wait_until, tell_hosts=lambda: None)


@pytest.fixture
def roll_calls():
    """Of three virtual ranks, which are threads."""
    group = CommGroup(range(3))
    with ThreadPoolExecutor(3) as ranks:
        return list(ranks.map(lambda rank: RollCall(InProcessComm(group, rank, GPU)), range(3)))


def test_each_rank_that_fails_has_the_reports_of_all(roll_calls):
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda rank: roll_calls[rank].reports(f"from {rank}"), range(3)))
    assert found == [["from 0", "from 1", "from 2"]] * 3


def test_no_rank_waits_long_for_one_that_does_not_fail(roll_calls, monkeypatch):
    monkeypatch.setattr(roll_call, "REPORTS_S", 0.01)
    assert roll_calls[1].reports("from 1") == ["from 1"]
