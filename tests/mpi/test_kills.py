"""A rank that is killed: the others end in time and name it, nothing stays behind, and the run can be started again."""

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


def leftovers() -> list[str]:
    """What nbep has made and that outlives a process."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return [str(path) for folder in folders if folder.is_dir() for path in folder.glob("*nbep*")]


@pytest.mark.parametrize("seed", both_parts(range(3), thorough=range(3, 12)))
def test_survivors_name_a_rank_that_is_killed(seed):
    rng = random.Random(seed)
    victim, before = rng.randrange(NUM_RANKS), leftovers()
    step = rng.randrange(5 * seed, 5 * seed + 5) if seed < 3 else rng.randrange(20)
    environment = {"NBEP_TARGET": "emulator", "NBEP_TIMEOUT_MS": "500"}
    output = run_python(PROGRAM, victim, step, ranks=NUM_RANKS, survive=True, must_fail=True, **environment)
    for survivor in set(range(NUM_RANKS)) - {victim}:
        told = re.search(rf"^nbep\.host\.faults\.PeerTimeout: rank {survivor}: .*", output, re.MULTILINE)
        assert told, output
        assert re.search(rf"rank {victim}\b", told[0]), (victim, step, told[0])
    assert leftovers() == before
