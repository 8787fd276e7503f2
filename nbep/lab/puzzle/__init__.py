"""Puzzles: kernels with a hole, and a check that says in words what is wrong. The puzzles are in the folder puzzles/.

Read in this order: frame, advice, check, picture, command.
"""

from nbep.lab.puzzle.advice import RELEASES, arguments_of, order_advice, stores_to
from nbep.lab.puzzle.command import main, run_file
from nbep.lab.puzzle.frame import Clue, Puzzle, hole

__all__ = [
    "RELEASES",
    "Clue",
    "Puzzle",
    "arguments_of",
    "hole",
    "main",
    "order_advice",
    "run_file",
    "stores_to",
]
