"""Exhibits that hang on a GPU as well: what a rank raises there, and on the emulator where time passes.

NBEP_TEST_TARGET=cuda python -m pytest -s tests/museum/test_time_outs.py      prints it
"""

from typing import NamedTuple

import pytest
from exhibits import MUSEUM, repaired
from target import TARGET, spawn

from nbep.host.ranks.timeouts import PeerTimeout
from nbep.lab.check.scenario import load_module

if TARGET == "cuda":
    import torch  # noqa: F401 - before ranks ask for streams of their own


class Waits(NamedTuple):
    """Who may raise first: who waits, for whom, and the cell that it polls."""

    name: str
    waits: set[tuple[int, int, str]]

    def __str__(self) -> str:
        return self.name


EXHIBITS = [
    Waits("uccl_940", {(rank, 3, "count") for rank in range(3)}),
    Waits("mori_597", {(rank, rank, "arrived") for rank in range(3)}),
    Waits("deepep_317", {(0, 1, "head"), (1, 0, "tail"), (1, 1, "done")}),
    Waits("sglang_31072", {(0, 1, "arrived"), (1, 1, "copied")}),
    Waits("vllm_43547", {(rank, 2, "barrier_signal") for rank in (0, 1, 3)}),
]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Of a Buffer; memory for kernels of one's own takes the limit as an argument."""
    monkeypatch.setenv("NBEP_TIMEOUT_MS", "3000")


def run(program):
    module = load_module(program)
    return spawn(module.main, getattr(module, "NUM_RANKS", 2), on_deadlock="expire")


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=str)
def test_a_time_out_names_who_is_waited_for_and_the_cell(exhibit):
    with pytest.raises(PeerTimeout) as caught:
        run(MUSEUM / exhibit.name / "program.py")
    error = caught.value
    print("", exhibit.name, error, *error.__notes__, sep="\n")
    assert any("has made 5 collective calls" in note for note in error.__notes__) == (exhibit.name == "vllm_43547")
    assert (error.rank, error.peer, error.cell) in exhibit.waits


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=str)
def test_the_repaired_form_ends(exhibit, tmp_path):
    run(repaired(MUSEUM / exhibit.name / "program.py", tmp_path))
