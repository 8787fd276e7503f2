"""The picture of slots: which row lies in which slot, from when to when, and which rows were lost."""

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest

import nbep
from nbep.lab.notebook import edit
from nbep.lab.trace import Trace
from notebooks.slot_pictures import index, plot_slots, stays

RING = Path(__file__).resolve().parents[2] / "docs" / "examples" / "ring.py"
CELLS = {"tail[src 0]": 0, "head[src 0]": 64, **{f"x[slot {slot}, src 0]": 128 + 128 * slot for slot in range(4)}}
spec = importlib.util.spec_from_file_location("ring_example", RING)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def run(seed, monkeypatch, num_rows=10):
    """The page's ring, with its head beside its tail and with names that the picture understands."""
    create = nbep.SharedMemory.create
    monkeypatch.setattr(
        nbep.SharedMemory, "create", lambda comm, num_bytes, **options: create(comm, num_bytes, cells=CELLS)
    )
    trace = Trace()
    with (
        edit(example.send_row, "buffer_of(peers, 0) + HEAD", "buffer_of(peers, 1) + HEAD"),
        edit(example.receive_row, "buffer_of(peers, 0) + HEAD", "buffer_of(peers, 1) + HEAD"),
    ):
        nbep.spawn(example.main, 2, "emulator", (num_rows,), seed, tracer=trace)
    events = [e for e in trace.events(["fill", "store"]) if e.cell.owner == 1 and index(e, "src") == 0]
    return trace, stays(events, 0, 4, trace.last_step)


@pytest.mark.parametrize("seed", range(3))
def test_every_row_stays_once_and_leaves_before_the_next_one_comes(seed, monkeypatch):
    _, found = run(seed, monkeypatch)
    assert sorted((stay.number, stay.slot) for stay in found) == [(n, n % 4) for n in range(10)]
    assert not [stay for stay in found if stay.is_lost]
    assert all(stay.filled <= stay.announced <= stay.left for stay in found)
    by_slot = sorted(found, key=lambda stay: (stay.slot, stay.filled))
    for stay, after in pairwise(by_slot):
        assert stay.slot != after.slot or stay.left <= after.filled


def test_a_row_that_is_written_over_is_lost(monkeypatch):
    with edit(example.send_row, "i + 1 - NUM_SLOTS", "0"):
        lost = [[stay.number for stay in run(seed, monkeypatch)[1] if stay.is_lost] for seed in range(10)]
    assert any(lost)


def test_the_picture_has_a_lane_for_each_side_and_slot(monkeypatch):
    trace, _ = run(0, monkeypatch)
    labels = [label.get_text() for label in plot_slots(trace, dst=1).axes[0].get_yticklabels()]
    assert labels[:5] == ["rank 0 sends", "slot 0", "slot 1", "slot 2", "slot 3"]
    assert labels[5:] in ([], ["rank 1, warp 0"])
    with pytest.raises(ValueError, match="no slot of such a ring at rank 0"):
        plot_slots(trace, dst=0)
