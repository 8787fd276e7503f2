"""The forms in the file are those of the protocol: runs that they were not found from come out of them exactly."""

import pytest

from nbep.model import counts
from nbep.model.counts import RUNS, NotLinear, dump, expected, find_forms, load, name_of
from nbep.model.runs import count
from nbep.model.work import Work

pytestmark = pytest.mark.emulator_only("it counts with the emulator's tracer")
OTHERS = [
    Work("intranode", 4, 4, 10, 384, 3, 12, num_channels=3, nvl_chunks=(2, 3), seed=91),
    Work("low_latency", 4, 2, 5, 640, 3, 16, seed=92),
    Work("low_latency", 4, 2, 5, 384, 3, 8, use_fp8=False, transport="direct", seed=93),
]


@pytest.mark.parametrize("work", OTHERS, ids=name_of)
def test_a_new_run_counts_what_the_forms_say(work):
    assert count(work, seed=7) == expected(load()[name_of(work)], work)


PUBLISHED_SIZE = [
    Work("intranode", 2, 2, 4, 7168, 8, 16, num_channels=2, nvl_chunks=(2, 1), seed=95),
    Work("low_latency", 2, 1, 1, 7168, 8, 16, seed=94),
]


@pytest.mark.parametrize("work", PUBLISHED_SIZE, ids=name_of)
def test_a_run_with_tokens_of_the_published_size_counts_what_the_forms_say(work):
    assert count(work) == expected(load()[name_of(work)], work)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_the_file_is_what_the_runs_give(name):
    assert dump({name: find_forms(RUNS[name])}) == dump({name: load()[name]})


def test_every_mode_has_forms_of_both_verbs_in_the_file():
    assert load().keys() == RUNS.keys()
    assert all(forms.keys() == {"dispatch", "combine"} for forms in load().values())


def test_forms_that_a_proof_contradicts_are_refused(monkeypatch):
    works = RUNS["intranode"]
    runs = {work: expected(load()["intranode"], work) for work in works}
    runs[works[-1]]["dispatch"]["nvlink"]["flags.tail"] += 1
    monkeypatch.setattr(counts, "count", lambda work: runs[work])
    with pytest.raises(NotLinear, match=r"dispatch, nvlink, flags.tail: chunks.nvlink is not"):
        find_forms(works)
