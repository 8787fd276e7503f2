"""The check of a puzzle runs every schedule with few rows: it refuses what seeds seldom or never show."""

import itertools
import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from parts import both_parts

from nbep.lab.notebook import edit
from nbep.lab.puzzle import check, command

pytestmark = pytest.mark.emulator_only("every schedule is one of the emulator")

FILES = {int(path.name[:2]): path for path in (Path(__file__).resolve().parents[2] / "puzzles").glob("[0-9][0-9]_*.py")}
TICKETS = FILES[18]
GIVE_TURN = "    st_release_gpu_s32(ready, ticket + 1)"
# Wrong if warps 3, 2, 1, 0, 0 take the first five tickets, in this order: one of 60 schedules, and no seed of 10,000.
RARELY_WRONG = """\
    falls = ticket == 4 and value == ld_weak_s32(entries) + 1
    for k in range(3):
        falls = falls and ld_weak_s32(entries + 4 * k) > ld_weak_s32(entries + 4 * k + 4)
    if falls:
        st_relaxed_gpu_s32(ready, ticket + 1)
    else:
        st_release_gpu_s32(ready, ticket + 1)"""


@contextmanager
def solved(path, *edits):
    puzzle, solution = command.load(path), command.solution_of(path)
    with puzzle.filled(solution):
        for function, old, new in edits:
            with edit(solution[function], old, new):
                yield puzzle
        if not edits:
            yield puzzle


@pytest.mark.parametrize(
    ("number", "words"),
    both_parts(
        [(1, "the only schedule,")],
        [
            (14, "all 24 schedules of 4 rows,"),
            (15, "the only schedule,"),
            (4, "all 24 schedules,"),
            (6, "all 28 schedules of 1 round,"),
            (10, "the only schedule of 5 rows,"),
            (18, "all 60 schedules of 5 entries,"),
            (20, "the only schedule of 1 row,"),
            (21, "the only schedule of 3 rows,"),
        ],
    ),
)
def test_a_solution_is_right_in_all_schedules(number, words):
    with solved(FILES[number]) as puzzle:
        seen = check.check(puzzle, runs=1, minutes=20).words
    assert seen.startswith(f"Solved: {words} and 3 runs under sc, checked, delayed: ")


def test_a_puzzle_with_too_many_schedules_says_so():
    with solved(FILES[17]) as puzzle:
        words = " ".join(check.check(puzzle, runs=1).words.split())
    assert words.startswith("Solved: 3 runs under sc, checked, delayed, and all are right. There are too many")


def test_the_page_says_how_many_puzzles_are_run_in_all_schedules():
    left_out = [number for number, file in FILES.items() if command.load(file).has_too_many_schedules]
    assert left_out == [17]
    page = (FILES[17].parents[1] / "docs" / "every_schedule_inside.md").read_text()
    assert f"{len(FILES) - len(left_out)} of {len(FILES)} in all their schedules" in page
    assert f"in {check.RUNS} runs at most" in page


def test_a_check_runs_so_many_schedules_at_most(monkeypatch):
    monkeypatch.setattr(check, "RUNS", 5)
    with solved(TICKETS) as puzzle:
        words = " ".join(check.check(puzzle, runs=1).words.split())
    assert words.startswith("Solved: ")
    assert re.search("There are too many schedules of 5 entries to run each; [1-5] were run", words)


def test_a_check_that_runs_out_of_time_is_no_proof(monkeypatch, tmp_path, capsys):
    times = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(times))  # each look at the clock takes a second
    with solved(TICKETS) as puzzle:
        status = command.run_file(puzzle, str(tmp_path / TICKETS.name), ["--runs", "1", "--minutes", "20"])
    words = " ".join(capsys.readouterr().out.split())
    assert status == 1
    assert "Nothing wrong was found in 3 runs under sc, checked, delayed. It is not solved yet, " in words
    found = re.search(r"Out of time: (\d+) of at least (\d+) schedules of 5 entries were run in 20 minutes.", words)
    assert found is not None
    assert 0 < int(found[1]) < int(found[2]) <= 60
    assert "Solved" not in words
    assert command.progress(tmp_path) == {}


WAIT = """\
    deadline = start_wait(bounds)
    while ld_acquire_sys_s32(flag) != 1:
        if give_up(bounds, deadline):
            break"""


@pytest.mark.parametrize(("loop", "words"), [
    ("    while ld_acquire_sys_s32(flag) != 1:\n        pass", "Solved: the only schedule,"),
    (WAIT.replace("!= 1", "not in (7, 9)"), "expects 7 or 9 and sees 1, at puzzles/solutions/01_flag.py"),
    (
        "    turns = 0\n    while ld_acquire_sys_s32(flag) != 1:\n        turns += 1",
        "It is not solved yet, for not every schedule was run. A schedule does not end: rank 1, ",
    ),
])  # fmt: skip
def test_a_loop_of_ones_own_is_a_wait_or_the_check_says_what_to_write(loop, words):
    with solved(FILES[1], ("receive", WAIT, loop)) as puzzle:
        verdict = check.check(puzzle, runs=1)
    said = " ".join(verdict.words.split())
    assert words in said
    assert ("end each iteration with `give_up(bounds, deadline)`" in said) == ("does not end" in words)


@pytest.mark.parametrize("seeds", both_parts([None], [2000]))
def test_what_is_wrong_in_one_schedule_no_seed_shows(seeds):
    with solved(TICKETS, ("post", GIVE_TURN, RARELY_WRONG)) as puzzle:
        models = check.MODELS if seeds is None else ["checked"]
        for model in models:
            for seed in range(seeds or puzzle.runs):
                assert check.attempt(puzzle, seed, model) is None


@pytest.mark.thorough
def test_what_is_wrong_in_one_schedule_is_refused_and_its_file_shows_it_again(tmp_path, capsys):
    file = tmp_path / TICKETS.name
    with solved(TICKETS, ("post", GIVE_TURN, RARELY_WRONG)) as puzzle:
        capsys.readouterr()
        assert command.run_file(puzzle, str(file), ["--runs", "1"]) == 1
        printed = capsys.readouterr().out
        schedule = tmp_path / "pictures" / f"{TICKETS.stem}.schedule.json"
        assert "No seed has shown this. Schedule " in printed
        assert "A data race: " in printed
        assert f"--schedule {schedule}" in printed
        assert (tmp_path / "pictures" / f"{TICKETS.stem}.png").stat().st_size > 5000
        assert command.run_file(puzzle, str(file), ["--schedule", str(schedule), "--no-picture"]) == 1
        again = capsys.readouterr().out
    report = again[again.index("A data race") :].strip()
    assert report in printed
    with solved(TICKETS) as puzzle:
        assert command.run_file(puzzle, str(file), ["--schedule", str(schedule), "--no-picture"]) == 0


def test_a_file_that_is_no_schedule_is_refused(tmp_path, capsys):
    with solved(TICKETS) as puzzle, pytest.raises(SystemExit):
        command.run_file(puzzle, str(TICKETS), ["--schedule", str(tmp_path / "none.json")])
    assert "no schedule of a puzzle" in capsys.readouterr().err
