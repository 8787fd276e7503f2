"""Litmus tests: small programs whose outcomes tell memory models apart.

    programs   the classic shapes, with and without the orders and scopes that they need
    axioms     which outcomes the PTX memory model allows
    runs       which outcomes the emulator shows, and what `checked` says; all of it side by side: nbep litmus

The page records/litmus.md explains the table.
"""

from nbep.lab.litmus.axioms import Verdict, allowed
from nbep.lab.litmus.programs import PROGRAMS, Program
from nbep.lab.litmus.runs import is_race, outcomes

__all__ = ["PROGRAMS", "Program", "Verdict", "allowed", "is_race", "outcomes"]
