"""Layers of frameworks conform as they are, and each fault planted in one is found, in the run that the table says."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
import client_layers as layers  # noqa: E402
import planted_faults as planted  # noqa: E402

from nbep.conformance import conforms, run  # noqa: E402

NBEPS = {"Uninitialized", "DataRace", "DeadlockError", "ValueError", "RuntimeError"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", layers.LAYERS)
def test_a_layer_as_it_is_raises_no_alarm(name):
    if not layers.has_sources(name):
        pytest.skip("NBEP_TEST_CLIENTS names no folder with its sources")
    conforms(layers.LAYERS[name], seeds=2, without=layers.WITHOUT.get(name, ()))


@pytest.mark.thorough
@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: f"{fault[1]}: {fault[4][:40]}")
def test_a_fault_is_found_where_the_table_says(fault):
    _, name, where, old, new, found_by, *case = fault
    if not layers.has_sources(name):
        pytest.skip("NBEP_TEST_CLIENTS names no folder with its sources")
    found = run(layers.LAYERS[name], 2, *case, edits=[planted.edit(name, where, old, new)])
    assert found_by in {each.kind for each in found}


def test_the_table_has_the_kinds_that_reports_show():
    counts = Counter(fault[0] for fault in planted.FAULTS)
    assert len(planted.FAULTS) >= 97
    assert counts[planted.EVENT] == 13
    assert {fault[5] for fault in planted.FAULTS if fault[0] == planted.EVENT} == {"Uninitialized"}
    by_nbep = sum(fault[5] in NBEPS for fault in planted.FAULTS)
    assert by_nbep > len(planted.FAULTS) / 2
