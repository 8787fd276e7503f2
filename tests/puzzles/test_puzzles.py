"""Every puzzle is solved by its solution, refuses typical wrong ones with words of its own, and has a picture."""

import runpy
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from parts import both_parts
from processes import LIMIT_S, run_python
from target import TARGET

import nbep
from nbep.device.cards import CARDS
from nbep.device.compile import arch_name
from nbep.lab.notebook import edit
from nbep.lab.puzzle import Clue, check, command, picture

HERE = Path(__file__).resolve().parent
FILES = sorted((HERE.parents[1] / "puzzles").glob("[0-9][0-9]_*.py"))


def solutions_in(text):
    """Puzzle -> entries (name, edits, *rest), from a text as in `other_solutions` or `wrong_solutions`.

    A line `name | kind | words` begins an entry: kind is that of the clue, and words come out of the puzzle's own
    advice, not out of the emulator's report. An edit is `function: old text => new text`, or its lines with - and +.
    """
    table, entries = {}, []
    for line in filter(None, text.splitlines()):
        if line.isdigit():
            entries = table[int(line)] = []
        elif not line.startswith(" "):
            name, *rest = line.split(" | ")
            entries.append((name, [], *rest))
        elif line.startswith(("    -", "    +")):
            edit = entries[-1][1][-1]
            edit["-+".index(line[4]) + 1].append(line[6:])
        else:
            function, _, change = line.strip().partition(":")
            old, new = change[1:].split(" => ") if change else ((), ())
            entries[-1][1].append((function, [old] if old else [], [new] if new else []))
    return {
        number: [
            (name, [(function, "\n".join(old), "\n".join(new)) for function, old, new in edits], *rest)
            for name, edits, *rest in entries
        ]
        for number, entries in table.items()
    }


def table_of(name, variable):
    return solutions_in(runpy.run_path(str(HERE / f"{name}.py"))[variable])


WRONG_SOLUTIONS = {
    number: entries
    for path in sorted((HERE / "wrong_solutions").glob("*.py"))
    for number, entries in table_of(f"wrong_solutions/{path.stem}", "WRONG").items()
}
WRONG = [
    pytest.param(path, *case[1:], id=f"{path.stem}: {case[0]}", marks=() if i < 2 else pytest.mark.thorough)
    for path in FILES
    for i, case in enumerate(WRONG_SOLUTIONS[int(path.name[:2])])
]
DEAR = ("04_last_block", "10_ring")
RIGHT_TOO = [
    pytest.param(path, edits, id=f"{path.stem}: {name}", marks=pytest.mark.thorough if path.stem in DEAR else ())
    for path in FILES
    for name, edits in table_of("other_solutions", "RIGHT_TOO").get(int(path.name[:2]), ())
]
ON_THE_EMULATOR = pytest.mark.emulator_only("a GPU says less of what is wrong")

ONE_HOLE = [("send", "In `send`", "In `receive`"), ("receive", "In `receive`", "In `send`")]


@pytest.fixture(autouse=True)
def few_schedules(monkeypatch):
    """`test_schedules` runs all of them."""
    monkeypatch.setattr(check, "RUNS", 3)


each_puzzle = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_there_are_twenty_two_and_their_numbers_have_no_gap():
    assert [int(path.name[:2]) for path in FILES] == list(range(1, 23))
    for number, path in enumerate(FILES, 1):
        assert command.load(path).title.startswith(f"Puzzle {number}: ")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.thorough if path.stem in DEAR else (), id=path.stem) for path in FILES],
)
@pytest.mark.parametrize("runs", both_parts([1], thorough=[10]))
def test_the_solution_is_accepted(path, runs):
    """With so many runs under each memory model."""
    puzzle = command.load(path)
    with puzzle.filled(command.solution_of(path)):
        verdict = check.check(puzzle, TARGET, runs=runs)
    assert verdict.solved, verdict.words


OLDEST = "sm_75"
NEWER = [arch_name(cc) for cc in CARDS if arch_name(cc) != OLDEST]


@pytest.mark.compile
@ON_THE_EMULATOR
@pytest.mark.parametrize(("hole", "named", "not_named"), ONE_HOLE, ids=[hole for hole, *_ in ONE_HOLE])
def test_the_advice_of_puzzle_2_names_only_the_hole_that_is_wrong(hole, named, not_named):
    puzzle, solution = command.load(FILES[1]), command.solution_of(FILES[1])
    with puzzle.filled(solution), edit(solution[hole], "syncwarp(FULL_MASK)", "pass"):
        words = check.check(puzzle).words
    assert named in words
    assert not_named not in words


@pytest.mark.parametrize("arch", both_parts([], thorough=[OLDEST], long=NEWER))
def test_the_solutions_and_the_kernels_of_notebooks_compile(arch):
    compiled = run_python(HERE.parent / "support/course_kernels.py", arch).split("\n")
    assert {path.stem for path in FILES} <= {line.split()[0] for line in compiled if line}


@each_puzzle
def test_a_hole_is_named_and_nothing_runs(path):
    puzzle = command.load(path)
    verdict = check.check(puzzle)
    assert (verdict.solved, verdict.kind) == (False, "hole")
    assert all(f"`{name}`" in verdict.words for name in puzzle.holes)


@each_puzzle
def test_the_file_has_what_its_solution_uses(path):
    """Whoever writes the solution into the puzzle's file has to import nothing."""
    puzzle, solution = command.load(path), command.solution_of(path)
    names = {name for hole in puzzle.holes for name in solution[hole].__code__.co_names}
    assert not {name for name in names & set(solution) if name not in puzzle.scope and not is_helper(solution, name)}


def is_helper(solution, name: str) -> bool:
    """Whether the solution defines it itself."""
    return getattr(solution[name], "__module__", "").startswith("solution_")


@ON_THE_EMULATOR
@pytest.mark.usefixtures("held_reports")
@pytest.mark.parametrize(("path", "edits", "kind", "words"), WRONG)
def test_a_wrong_solution_is_refused_with_the_right_words(path, edits, kind, words):
    puzzle, solution = command.load(path), command.solution_of(path)
    with ExitStack() as stack:
        stack.enter_context(puzzle.filled(solution))
        for function, old, new in edits:
            stack.enter_context(edit(solution[function], old, new))
        verdict = check.check(puzzle)
    assert not verdict.solved
    assert kind in (verdict.kind, "")
    assert len(words) > 10
    assert words in one_line(verdict.words)


@ON_THE_EMULATOR
@pytest.mark.parametrize(("path", "edits"), RIGHT_TOO)
def test_another_right_way_is_accepted(path, edits):
    puzzle, solution = command.load(path), command.solution_of(path)
    with ExitStack() as stack:
        stack.enter_context(puzzle.filled(solution))
        for function, old, new in edits:
            stack.enter_context(edit(solution[function], old, new))
        verdict = check.check(puzzle, runs=1)
    assert verdict.solved, verdict.words


def test_every_puzzle_has_at_least_five_wrong_solutions():
    assert all(len(WRONG_SOLUTIONS[int(path.name[:2])]) >= 5 for path in FILES)


@ON_THE_EMULATOR
@pytest.mark.parametrize("path", both_parts([FILES[5], FILES[11]], FILES))
def test_a_run_has_a_picture_with_lines_in_it(path):
    puzzle = command.load(path)
    with puzzle.filled(command.solution_of(path)):
        drawn = picture.draw(puzzle, 0, "sc")
    axes = drawn.axes[0]
    assert len(axes.lines) + len(axes.collections) + len(axes.texts) > 5


@ON_THE_EMULATOR
def test_the_picture_of_a_hang_is_drawn_too(tmp_path):
    path = FILES[0]
    puzzle, solution = command.load(path), command.solution_of(path)
    with puzzle.filled(solution), edit(solution["send"], "st_release_sys_s32(flag, 1)", "pass"):
        assert picture.save(puzzle, tmp_path / "hang.png", 0, "sc")
    assert (tmp_path / "hang.png").stat().st_size > 5000


@each_puzzle
def test_advice_has_an_answer_to_whatever_comes_out(path):
    puzzle = command.load(path)
    rng = np.random.default_rng(1)
    with puzzle.filled(command.solution_of(path)):
        for kind in check.KIND_WORDS.keys() - {"wrong result"}:
            assert isinstance(puzzle.advice(Clue(puzzle, kind, "no such report")), str)
        for rank in range(puzzle.num_ranks):
            for name, expected in zip(puzzle.output_names, puzzle.answer(rank), strict=True):
                noise = rng.integers(-(2**31), 2**31, expected.shape)
                for got in (
                    np.zeros_like(expected),
                    np.full_like(expected, -1),
                    expected + 1,
                    noise.astype(expected.dtype),
                ):
                    if not np.array_equal(got, expected):
                        clue = Clue(puzzle, "wrong result", rank=rank, name=name, got=got, expected=expected)
                        assert check.explain(clue).startswith("All threads have ended")


@ON_THE_EMULATOR
def test_a_wrong_run_is_found_again_by_its_seed():
    path = FILES[0]
    puzzle, solution = command.load(path), command.solution_of(path)
    with puzzle.filled(solution), edit(solution["receive"], "ld_acquire_sys_s32(flag) != 1", "False"):
        verdict = check.check(puzzle)
        clue = check.attempt(puzzle, verdict.seed, verdict.memory_model)
        assert clue is not None
        assert check.explain(clue) == verdict.words


@ON_THE_EMULATOR
def test_a_wait_that_ends_late_is_explained_like_a_deadlock():
    """What a GPU reports: a time-out, and no deadlock."""
    path = FILES[0]
    puzzle, solution = command.load(path), command.solution_of(path)
    with puzzle.filled(solution), edit(solution["send"], "st_release_sys_s32(flag, 1)", "pass"):
        with pytest.raises(nbep.PeerTimeout) as caught:
            puzzle.run(on_deadlock="expire")
        words = one_line(check.explain(check.clue_of(puzzle, caught.value)))
    assert words.startswith("A wait timed out")
    assert "a flag that no thread raises" in words
    assert "PeerTimeout: rank 1, block 0, thread 0 waited more than 2000 ms" in words


def test_a_wait_for_a_number_that_is_over_is_named():
    puzzle = command.load(FILES[9])
    report = "DeadlockError: rank 1 waits\nIt polls tail (byte 0), expects {} and sees 4"
    assert "asks for exactly 1 and sees 4" in check.explain(Clue(puzzle, "deadlock", report.format("1")))
    for other in ("5", "anything but 4", "5 or more"):
        assert "asks for exactly" not in check.explain(Clue(puzzle, "deadlock", report.format(other)))


def test_a_file_with_a_hole_shows_its_picture_and_fails():
    done = subprocess.run([sys.executable, FILES[0]], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "rank 0: x --send--> data, flag = 1" in done.stdout
    assert "There is still a hole in `send` and `receive`" in done.stdout


@ON_THE_EMULATOR
def test_nbep_puzzle_lists_them_and_checks_one(capsys, monkeypatch):
    monkeypatch.chdir(HERE.parents[1])
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].split(maxsplit=1)[1] for line in lines if ": " in line[:40]][: len(FILES)] == [
        f"Puzzle {number}" for number in range(1, len(FILES) + 1)
    ]
    assert any(line.startswith("You have solved ") for line in lines)
    assert command.main(["8", "--solution", "--no-picture", "--runs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Solved: the only schedule, and 3 runs" in printed
    assert "What you know now: " in printed
    assert "Other solutions: " in printed
    assert command.main(["8", "--hint", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Hint 2: " in printed
    assert "Hint 3: " not in printed
    assert "--hint 3 shows one more" in printed
    assert command.main(["8"]) == 1
    with pytest.raises(SystemExit):
        command.main(["99"])


def test_what_is_solved_is_remembered_until_the_file_changes(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "puzzles"
    folder.mkdir()
    for path in (FILES[7], FILES[8]):
        (folder / path.name).write_text(path.read_text())
    path, puzzle = folder / FILES[7].name, command.load(FILES[7])
    monkeypatch.chdir(tmp_path)
    with puzzle.filled(command.solution_of(FILES[7])):
        assert command.run_file(puzzle, str(path), ["--runs", "1", "--no-picture"]) == 0
        assert f"Next: python puzzles/{FILES[8].name}" in capsys.readouterr().out
        assert command.state_of(path, puzzle) == "solved"
        path.write_text(path.read_text() + "# more\n")
        assert command.state_of(path, puzzle) == "changed"
    assert command.state_of(folder / FILES[8].name, command.load(FILES[8])) == "open"


@each_puzzle
def test_hints_are_asked_for_and_the_holes_have_none(path):
    puzzle = command.load(path)
    hints = command.solution_of(path)["HINTS"]
    assert len(hints) >= 2
    assert puzzle.learned
    assert puzzle.others
    assert not [hint for hint in hints if hint in path.read_text()]


def remark_on_the_ring(*edits):
    puzzle, solution = command.load(FILES[9]), command.solution_of(FILES[9])
    with ExitStack() as stack:
        stack.enter_context(puzzle.filled(solution))
        for function, old, new in edits:
            stack.enter_context(edit(solution[function], old, new))
        verdict = check.check(puzzle, runs=1)
    assert verdict.solved, verdict.words
    return one_line(verdict.words)


@pytest.mark.thorough
@ON_THE_EMULATOR
def test_a_ring_that_is_right_but_could_be_better_gets_a_remark():
    assert "A remark" not in remark_on_the_ring()
    assert "at most 1 of 4 slots" in remark_on_the_ring(("send", "i + 1 - NUM_SLOTS", "i"))
    assert "at most 2 of 4 slots" in remark_on_the_ring(("send", "i + 1 - NUM_SLOTS", "i - 1"))
    assert "your head is not released" in remark_on_the_ring(("receive", "st_release", "st_relaxed"))


@ON_THE_EMULATOR
def test_the_picture_of_the_ring_has_its_slots_and_the_sender_that_waits():
    puzzle = command.load(FILES[9])
    with puzzle.filled(command.solution_of(FILES[9])):
        drawn = picture.draw(puzzle, 0, "sc")
    lanes, slots = drawn.axes
    bars = [path for bars in lanes.collections for path in bars.get_paths()]
    assert any(bar.vertices[:, 1].min() > 0.5 for bar in bars), "no wait of the sender is drawn"
    assert {label.get_text() for label in lanes.get_yticklabels()} == {"sender\nrank 0", "receiver\nrank 1"}
    assert [text.get_text() for text in slots.texts] == [str(row) for row in range(10)]
    assert [label.get_text() for label in slots.get_yticklabels()] == ["slot 3", "slot 2", "slot 1", "slot 0"]
    legend = {text.get_text() for text in lanes.get_legend().get_texts()}
    assert "waits" in legend
    assert any("head" in text for text in legend)


@ON_THE_EMULATOR
def test_a_function_that_is_gone_is_named():
    puzzle = command.load(FILES[0])
    del puzzle.scope["receive"]
    verdict = check.check(puzzle)
    assert (verdict.solved, verdict.kind) == (False, "hole")
    assert "no function `receive`" in verdict.words


@ON_THE_EMULATOR
def test_a_wait_that_returns_too_early_in_some_schedule_is_refused():
    puzzle, solution = command.load(FILES[11]), command.solution_of(FILES[11])
    loop = "while not mbarrier_try_wait_parity(full, 0):\n        pass"
    with puzzle.filled(solution):
        assert check.check(puzzle).solved
        with edit(solution["add_one"], loop, "mbarrier_try_wait_parity(full, 0)"):
            verdict = check.check(puzzle)
    assert not verdict.solved
    assert "waits for a short time, and then returns False" in one_line(verdict.words)
