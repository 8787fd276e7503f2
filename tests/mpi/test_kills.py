"""A rank that is killed or stopped: the others end in time and name it, nothing stays behind.

All parts together kill thirty ranks and stop ten.
"""

import random
import tempfile
from pathlib import Path

import pytest
from kills import LONGEST_MS, NUM_RANKS, PROGRAM, last_words, who_does_not_name
from parts import both_parts
from processes import ROOT, run_python, surviving_mpirun

pytestmark = pytest.mark.mpi
NUM_STEPS = 10  # two rounds of killed_main.py: a buffer is made, used and destroyed in each; later rounds are the same


def run_until_one_is_gone(victim: int, signal: str, kind: str, when: str, number: int) -> dict[int, str]:
    """What each rank said at its end, if it ended by itself."""
    arguments = victim, signal, kind, when, number
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        environment = {"NBEP_TARGET": "emulator", "NBEP_TIMEOUT_MS": "2000", "TMPDIR": folder}
        output = run_python(PROGRAM, *arguments, ranks=NUM_RANKS, survive=True, must_fail=True, **environment)
        assert not list(Path(folder).iterdir())
    words = last_words(output)
    assert set(range(NUM_RANKS)) - {victim} <= words.keys(), output
    return words


def test_the_page_on_debugging_has_the_command_that_these_tests_start_ranks_with():
    mpiexec, *rest = surviving_mpirun(4)
    page = (ROOT / "docs" / "debugging.md").read_text()
    options = [f"'{word}'" if " " in word else word for word in [rest[0], "-n", "4", *rest[3:]]]
    assert f"\nmpiexec {' '.join(options)} python program.py\n" in page, mpiexec


def check_named(victim: int, words: dict[int, str]) -> None:
    assert not who_does_not_name(victim, words), (victim, words)


@pytest.mark.parametrize("seed", both_parts([], thorough=[0], long=range(1, 27)))
def test_survivors_name_a_rank_that_is_killed(seed):
    rng = random.Random(seed)
    victim = rng.randrange(NUM_RANKS)
    step = rng.randrange(5 * seed, 5 * seed + 5) if seed < 3 else rng.randrange(NUM_STEPS)
    check_named(victim, run_until_one_is_gone(victim, "KILL", "intranode", "step", step))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["intranode", "nodes", "internode"])
def test_survivors_name_a_rank_that_is_killed_at_any_moment(kind):
    rng = random.Random(kind)
    victim = rng.randrange(NUM_RANKS)
    check_named(victim, run_until_one_is_gone(victim, "KILL", kind, "after", rng.randrange(LONGEST_MS)))


@pytest.mark.parametrize(
    ("kind", "seed"),
    both_parts(
        [],
        thorough=[("nodes", 3)],
        long=[("intranode", seed) for seed in (1, 2, 4, 5, 6, 7)] + [("nodes", seed) for seed in (8, 9, 10)],
    ),
)
def test_survivors_name_a_rank_that_is_stopped_and_it_ends_too_when_it_goes_on(kind, seed):
    rng = random.Random(seed)
    victim = rng.randrange(NUM_RANKS)
    words = run_until_one_is_gone(victim, "STOP", kind, "step", rng.randrange(NUM_STEPS))
    check_named(victim, words)
    assert victim in words


@pytest.mark.parametrize(
    ("name", "said"),
    both_parts(
        [], thorough=[("STOP", "atomic, peer 1: rank {}: waited more than 1000 ms")], long=[("KILL", "has added")]
    ),
)
def test_a_rank_that_stops_inside_an_atomic_is_named_and_one_that_is_killed_there_holds_up_none(name, said):
    program = Path(__file__).parent / "holder_main.py"
    environment = {"NBEP_TARGET": "emulator", "NBEP_TIMEOUT_MS": "1000"}
    words = last_words(run_python(program, name, ranks=3, survive=True, must_fail=True, **environment))
    assert words.keys() == {0, 2}
    for rank in words:
        assert words[rank].startswith(said.format(rank)), words
