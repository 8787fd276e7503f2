"""One run on an engine, and all that two runs of one seed must have in common."""

from dataclasses import fields, is_dataclass

import numpy as np

import nbep


def run(main, num_ranks, engine, seed=0, *, may_repeat=False, **options):
    """What the ranks return, what the run has counted, and what it would draw next.

    may_repeat: compiled code may stop at a fault that is meant; Python runs all of it then
    """
    worlds = []

    def rank_main(comm):
        worlds.append(comm.runtime.world)
        return main(comm)

    results = nbep.spawn(rank_main, num_ranks, "emulator", seed=seed, engine=engine, **options)
    assert type(worlds[0]).__name__ == ("CompiledWorld" if engine == "compiled" else "World")
    assert may_repeat or len(worlds) == num_ranks, "Python has repeated the run"
    world = worlds[-1]
    return plain(results), int(world.calls), int(world.steps), int(world.parks), world.random.random()


def plain(value):
    """A result as something that compares by its bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value if isinstance(value, int | float | str | bytes | np.generic | None) else type(value).__name__
