"""Puzzles: kernels with a hole, and a check that says in words what is wrong. The puzzles are in the folder puzzles/.

Read in this order: kernels, frame, mistakes, advice, schedules, check, picture, command.
"""

from nbep.puzzle.advice import RELEASES, arguments_of, order_advice, stores_to
from nbep.puzzle.command import main, run_file
from nbep.puzzle.frame import Clue, Puzzle
from nbep.puzzle.kernels import give_up, hole, wait_at_least

__all__ = [
    "RELEASES",
    "Clue",
    "Puzzle",
    "arguments_of",
    "give_up",
    "hole",
    "main",
    "order_advice",
    "run_file",
    "stores_to",
    "wait_at_least",
]
