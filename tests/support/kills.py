"""What the ranks of tests/mpi/killed_main.py said when one of them was killed or stopped, and what they left behind."""

import re
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "mpi" / "killed_main.py"
NUM_RANKS = 4
LONGEST_MS = 1000  # of the calls, until a rank is killed
MPICH_FILE = "mpich_shm_"  # its own, in /dev/shm: it stays after any job that is killed


def last_words(output: str) -> dict[int, str]:
    """What each rank said at its end, if it ended by itself."""
    return {int(rank): text for rank, text in re.findall(r"ends: rank (\d): (.*)", output)}


def who_does_not_name(victim: int, words: dict[int, str]) -> list[int]:
    """The survivors who said nothing, or nothing of the victim."""
    survivors = set(range(NUM_RANKS)) - {victim}
    return sorted(rank for rank in survivors if not re.search(rf"\branks? (\d, )*{victim}\b", words.get(rank, "")))
