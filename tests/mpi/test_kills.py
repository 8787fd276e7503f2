"""A rank that is killed or stopped: the others end in time and name it, nothing stays behind."""

import random
import re
import tempfile
from pathlib import Path

import pytest
from parts import both_parts
from processes import run_python

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "killed_main.py"
NUM_RANKS = 4
LONGEST_MS = 1000  # of the calls, until a rank is killed


def leftovers() -> list[str]:
    """What nbep has made and that outlives a process."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return [str(path) for folder in folders if folder.is_dir() for path in folder.glob("*nbep*")]


def run_until_one_is_gone(victim: int, signal: str, kind: str, when: str, number: int) -> dict[int, str]:
    """What each rank said at its end, if it ended by itself."""
    before = leftovers()
    environment = {"NBEP_TARGET": "emulator", "NBEP_TIMEOUT_MS": "500"}
    arguments = victim, signal, kind, when, number
    output = run_python(PROGRAM, *arguments, ranks=NUM_RANKS, survive=True, must_fail=True, **environment)
    assert leftovers() == before
    told = re.findall(r"^(?:nbep\.host\.faults\.PeerTimeout|RuntimeError): rank (\d): (.*)", output, re.MULTILINE)
    survivors = set(range(NUM_RANKS)) - {victim}
    assert survivors <= {int(rank) for rank, _ in told}, output
    return {int(rank): text for rank, text in told}


def check_named(victim: int, told: dict[int, str]) -> None:
    for survivor in set(range(NUM_RANKS)) - {victim}:
        assert re.search(rf"\branks? (\d, )*{victim}\b", told[survivor]), (victim, told)


@pytest.mark.parametrize("seed", both_parts([0, 1], thorough=range(2, 9)))
def test_survivors_name_a_rank_that_is_killed(seed):
    rng = random.Random(seed)
    victim = rng.randrange(NUM_RANKS)
    step = rng.randrange(5 * seed, 5 * seed + 5) if seed < 3 else rng.randrange(20)
    check_named(victim, run_until_one_is_gone(victim, "KILL", "intranode", "step", step))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["intranode", "nodes", "internode"])
def test_survivors_name_a_rank_that_is_killed_at_any_moment(kind):
    rng = random.Random(kind)
    victim = rng.randrange(NUM_RANKS)
    check_named(victim, run_until_one_is_gone(victim, "KILL", kind, "after", rng.randrange(LONGEST_MS)))


@pytest.mark.parametrize(("kind", "seed"), both_parts([("intranode", 1)], thorough=[("intranode", 2), ("nodes", 3)]))
def test_survivors_name_a_rank_that_is_stopped_and_it_ends_too_when_it_goes_on(kind, seed):
    rng = random.Random(seed)
    victim = rng.randrange(NUM_RANKS)
    told = run_until_one_is_gone(victim, "STOP", kind, "step", rng.randrange(10))
    check_named(victim, told)
    assert victim in told
