"""The forms in the file are those of the protocol: runs that they were not found from come out of them exactly."""

import pytest
from parts import both_parts

from research.model import counts
from research.model.counts import RUNS, NotLinear, contradictions, dump, evaluate_exactly, find_forms, load, name_of
from research.model.features import total
from research.model.runs import count
from research.model.work import Work

pytestmark = pytest.mark.emulator_only("it counts with the emulator's tracer")
OTHERS = [
    Work("intranode", 4, 4, 10, 384, 3, 12, num_channels=3, nvl_chunks=(2, 3), seed=91),
    Work("internode", 4, 2, 6, 384, 3, 8, num_channels=2, nvl_chunks=(2, 3), rdma_chunks=(3, 2), seed=96),
    Work("internode", 6, 2, 3, 256, 2, 12, nvl_chunks=(1, 2), rdma_chunks=(2, 1), transport="direct", seed=97),
    Work("low_latency", 4, 2, 5, 640, 3, 16, seed=92),
    Work("low_latency", 4, 2, 5, 384, 3, 8, use_fp8=False, transport="direct", seed=93),
]


@pytest.mark.parametrize(
    "work", both_parts([(work,) for work in OTHERS[4:]], thorough=[(work,) for work in OTHERS[:4]])
)
def test_a_new_run_counts_what_the_forms_say(work):
    assert contradictions(load()[name_of(work)], work, count(work, seed=7)) == []


PUBLISHED_SIZE = [
    Work("intranode", 2, 2, 4, 7168, 8, 16, num_channels=2, nvl_chunks=(2, 1), seed=95),
    Work("internode", 4, 2, 1, 7168, 8, 16, nvl_chunks=(1, 1), rdma_chunks=(1, 1), seed=98),
    Work("low_latency", 2, 1, 1, 7168, 8, 16, seed=94),
]


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(work, id=name_of(work), marks=() if work.mode == "intranode" else pytest.mark.thorough)
        for work in PUBLISHED_SIZE
    ],
)
def test_a_run_with_tokens_of_the_published_size_counts_what_the_forms_say(work):
    assert contradictions(load()[name_of(work)], work, count(work)) == []


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_the_file_is_what_the_runs_give(name):
    assert dump({name: find_forms(RUNS[name])}) == dump({name: load()[name]})


def test_every_mode_has_forms_of_both_verbs_in_the_file():
    assert load().keys() == RUNS.keys()
    assert all(forms.keys() == {"dispatch", "combine"} for forms in load().values())


def fake_runs(monkeypatch, change=None):
    """What the forms say in place of runs, in which `change` may change something of the last one."""
    works = RUNS["intranode"]
    runs = {
        work: {
            verb: {
                link: {what: int(evaluate_exactly(form, total(work, verb))) for what, form in whats.items()}
                for link, whats in links.items()
            }
            for verb, links in load()["intranode"].items()
        }
        for work in works
    }
    if change is not None:
        change(runs[works[-1]])
    monkeypatch.setattr(counts, "count", lambda work, seed: runs[work])
    return works, runs


def test_forms_that_a_proof_contradicts_are_refused(monkeypatch):
    def change(run):
        run["dispatch"]["nvlink"]["flags.ring"] += 1

    works, _ = fake_runs(monkeypatch, change)
    with pytest.raises(NotLinear, match=r"dispatch, nvlink, flags.ring: chunks.nvlink \+ 2 rings.nvlink is not"):
        find_forms(works)


def test_bytes_without_a_form_are_refused(monkeypatch):
    works, runs = fake_runs(monkeypatch)
    runs[works[0]]["combine"]["nvlink"]["payload"] += 1
    with pytest.raises(NotLinear, match="combine, nvlink, payload: "):
        find_forms(works)


def test_flags_without_a_form_have_a_bound_that_every_run_keeps(monkeypatch):
    works, runs = fake_runs(monkeypatch)
    for i, work in enumerate(works):
        most = total(work, "dispatch")["pairs.nvlink"]
        runs[work]["dispatch"]["nvlink"]["flags.ring"] = max(0, most - i % 3)
    forms = find_forms(works)
    assert "flags.ring" not in forms["dispatch"]["nvlink"]
    assert forms["dispatch"]["nvlink"]["flags.ring at most"] == {"pairs.nvlink": 1}
    assert [line for work in works for line in contradictions(forms, work, runs[work])] == []
    runs[works[0]]["dispatch"]["nvlink"]["flags.ring"] += 9
    assert contradictions(forms, works[0], runs[works[0]]) != []


def test_each_difference_between_a_run_and_the_forms_is_named(monkeypatch):
    works, runs = fake_runs(monkeypatch)
    work, forms = works[0], load()["intranode"]
    assert contradictions(forms, work, runs[work]) == []
    runs[work]["combine"]["nvlink"]["flags.bell"] = 3
    runs[work]["dispatch"]["nvlink"]["payload"] -= 1
    lines = contradictions(forms, work, runs[work])
    assert [line.partition(":")[0] for line in lines] == ["dispatch, nvlink, payload", "combine, nvlink, flags.bell"]
