"""Two GPUs, a kernel on each, and a few cells in the memory of GPU 1: what its kernel can see, and what is missing.

`send(cells)` runs on GPU 0 and `receive(cells)` on GPU 1, as blocks of so many threads. What `receive` returns is its
result; with several threads that of the last one.
"""

from typing import NamedTuple

from nbep.emulator import DataRace, World
from nbep.lang import Bounds, device_function, give_up, start_wait

CELLS = {"value": 0, "value_2": 4, "flag": 64, "flag_2": 68}
SEEDS = range(50)
TIMEOUT_NS = 10**15


class Cells(NamedTuple):
    """Addresses, as one of the GPUs sees them; and how long its waits may take."""

    value: int
    value_2: int
    flag: int
    flag_2: int
    bounds: Bounds


@device_function
def wait_for(load, cell, bounds):
    """Poll a cell with this load until it is not 0."""
    deadline = start_wait(bounds)
    while load(cell) == 0:
        if give_up(bounds, deadline):
            return


def results(send, receive, threads=1):
    """All results over 50 seeds, where stores arrive late and loads are early: an order that is missing shows."""
    found = {run(send, receive, threads, "delayed", seed) for seed in SEEDS}
    return " or ".join(map(str, sorted(found)))


def missing(send, receive, threads=1):
    """The first line of the report, where accesses that nothing orders are an error."""
    try:
        for seed in SEEDS:
            run(send, receive, threads, "checked", seed)
    except DataRace as race:
        return str(race).splitlines()[0]
    return "nothing"


def run(send, receive, threads, memory_model, seed):
    world = World(2, seed, memory_model=memory_model)
    first, second = world.ranks[0], world.ranks[1]
    names = {offset: name for name, offset in CELLS.items()}
    memory = second.space.allocate(128, "memory", zero=True, describe=lambda offset: names.get(offset & ~3, "nothing"))
    received = []

    def kernel(function, base, bounds):
        cells = Cells(*(base + offset for offset in CELLS.values()), bounds)
        result = function(cells)
        if function is receive and result is not None:
            received.append(result)

    streams = []
    for rank, function, base in ((first, send, first.space.open(memory.handle)), (second, receive, memory)):
        report = rank.space.allocate(64, "report", zero=True).address
        bounds = Bounds(TIMEOUT_NS, report, report + 16)
        streams.append(rank.create_stream("stream"))
        streams[-1].launch(kernel, (function, base.address, bounds), 1, threads, 0, function.__name__)
    for stream in streams:
        stream.synchronize()
    return received[-1]
