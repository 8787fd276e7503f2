"""Under `checked` the work grows with the number of atomics on a cell, not with its square."""

import pytest

from nbep.emulator import World, current_thread
from nbep.emulator.models import races, signals


def work_of(num_blocks, kernel, monkeypatch, cells=4):
    """How often two accesses were compared, and how often it was asked whether a thread knows of one."""
    asked = [0]

    def counted(function):
        def call(*args):
            asked[0] += 1
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(races.CheckingThread, "may_not_meet", counted(races.CheckingThread.may_not_meet))
        patch.setattr(signals.SignallingThread, "knows", counted(signals.SignallingThread.knows))
        world = World(1, 0, memory_model="checked")
        space = world.ranks[0].space
        cell = space.allocate(4 * cells, "cells", zero=True).address
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (cell, num_blocks), num_blocks, 32, 0, "kernel")
        stream.synchronize()
    return asked[0]


def add(cell, num_blocks):
    """Each thread counts in one of four cells that lie side by side."""
    thread = current_thread()
    thread.atomic("add", cell + 4 * (thread.thread_idx % 4), "s32", 1, "relaxed", "gpu")


def look(cell, num_blocks):
    """The last one to count looks at the counter with a weak load: it has observed all that came before it."""
    thread = current_thread()
    if thread.atomic("add", cell, "s32", 1, "relaxed", "gpu") == 32 * num_blocks - 1:
        thread.load(cell, "s32", "weak", "gpu")


@pytest.mark.parametrize("kernel", [add, look])
def test_twice_as_many_atomics_are_twice_the_work(kernel, monkeypatch):
    few, many = (work_of(num_blocks, kernel, monkeypatch) for num_blocks in (8, 16))
    assert few >= 32 * 8
    assert many < 3 * few
