"""Kernels of one's own over queue pairs: bytes, numbers and sums arrive, faults end in errors, and destroy works."""

import pytest
from network_programs import PROGRAMS
from target import spawn


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_wrong_on_any_rank(name):
    assert spawn(PROGRAMS[name], 2, on_deadlock="expire") == [[], []]


def in_turn(comm):
    return [PROGRAMS[name](comm) for name in ("a_bad_key", "writes", "a_lost_entry", "writes")]


def test_a_process_goes_on_after_faults():
    assert spawn(in_turn, 2, on_deadlock="expire") == [[[], [], [], []]] * 2
