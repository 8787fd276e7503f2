"""The counts of a run are those of what it does: against plain loops over the routes, and against the queues' trace."""

from collections import Counter

import pytest

import nbep
from nbep.lab.trace import Trace
from nbep.lab.trace.table import entry_lives
from research.model import runs
from research.model.runs import count
from research.model.traffic import Traffic
from research.model.work import Work

pytestmark = pytest.mark.emulator_only("it counts with the emulator's tracer")
OVER_NIC = Work("low_latency", 4, 2, 3, 256, 2, 8, seed=5)
MESSAGE_BYTES = 256 + 2 * 4 + 8 + 16  # e4m3, two scales, padding, the note


def link(work: Work, rank: int, peer: int) -> str:
    if rank == peer:
        return "home"
    return "nvlink" if rank // work.num_nvl_peers == peer // work.num_nvl_peers else "network"


def choices(work: Work) -> Counter:
    """Over all ranks: by which link each choice goes to its expert."""
    experts_per_rank = work.num_experts // work.num_ranks
    return Counter(
        link(work, rank, int(expert) // experts_per_rank)
        for rank in range(work.num_ranks)
        for expert in work.topk_idx(rank).reshape(-1)
    )


@pytest.mark.parametrize("transport", ["direct", pytest.param("ibgda", marks=pytest.mark.thorough)])
def test_each_choice_is_one_message_on_the_link_to_its_expert(transport):
    work = Work("low_latency", 4, 2, 3, 256, 2, 8, transport=transport, seed=5)
    counts, expected = count(work)["dispatch"], choices(work)
    assert expected["nvlink"] > 0
    assert expected["network"] > 0
    assert counts["network"]["messages"] == expected["network"]
    for name in ("nvlink", "network"):
        assert counts[name]["payload"] == expected[name] * MESSAGE_BYTES


@pytest.mark.thorough
def test_combine_takes_as_many_rows_back_over_the_same_links():
    counts, expected = count(OVER_NIC)["combine"], choices(OVER_NIC)
    assert counts["network"]["payload"] == expected["network"] * 2 * OVER_NIC.hidden
    assert counts["nvlink"]["payload"] == expected["nvlink"] * 2 * OVER_NIC.hidden


@pytest.mark.thorough
def test_messages_and_flags_on_the_network_are_the_entries_that_the_queues_had(monkeypatch):
    tallies = []

    class Kept(Traffic):
        def __init__(self, *args):
            super().__init__(*args)
            tallies.append(self.tallies)

    monkeypatch.setattr(runs, "Traffic", Kept)
    count(OVER_NIC)
    counted = Counter()
    for (_, name), tally in tallies[0].items():
        if name == "network":
            counted[name] += tally.messages + sum(tally.flags.values())

    trace = Trace()
    monkeypatch.setattr(trace, "enter", lambda *_: None, raising=False)
    nbep.spawn(lambda comm: runs._low_latency(comm, OVER_NIC, trace), 4, "emulator", tracer=trace)
    num_entries = 0
    for rank in range(4):
        for peer in range(4):
            for queue in range(OVER_NIC.num_experts // OVER_NIC.num_ranks):
                if link(OVER_NIC, rank, peer) == "network":
                    num_entries += len(entry_lives(trace, rank, peer, queue))
    assert counted["network"] == num_entries > 0


def test_a_token_for_two_experts_of_a_peer_crosses_nvlink_once_inside_a_node():
    work = Work("intranode", 2, 2, 6, 128, 4, 8, use_fp8=False, seed=1)
    pairs = sum(int(work.routes(rank)[:, 1 - rank].sum()) for rank in range(2))
    num_choices = sum(int((work.topk_idx(rank) // 4 == 1 - rank).sum()) for rank in range(2))
    counts = count(work)
    assert num_choices > pairs > 0
    assert counts["dispatch"]["nvlink"]["payload"] == pairs * 256
    assert counts["combine"]["nvlink"]["payload"] == pairs * 256
    assert counts["dispatch"]["network"] == {}


def test_the_order_of_threads_changes_no_count():
    work = Work("intranode", 2, 2, 5, 128, 2, 4, num_channels=2, nvl_chunks=(2, 2))
    assert count(work, seed=1) == count(work, seed=2)
