"""Which words go with a fact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..machine.errors import EmulatorError
from ..machine.faults import AccessFault, Diverged, LaneLeft, NeverFull, NoSegment
from ..models.checked import Race
from ..models.host import HostRace
from ..schedule.scheduler import Stuck
from .collectives import diverged, lane_left, never_full
from .deadlock import deadlock_error
from .faults import access_fault, no_segment
from .race import host_race, race

WORDS: dict[type, Callable[[Any], EmulatorError]] = {
    AccessFault: access_fault,
    NoSegment: no_segment,
    Diverged: diverged,
    LaneLeft: lane_left,
    NeverFull: never_full,
    Race: race,
    HostRace: host_race,
    Stuck: deadlock_error,
}


def error_of(fact: Any) -> EmulatorError:
    """The error that says what a fact means."""
    return WORDS[type(fact)](fact)
