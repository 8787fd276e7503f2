"""One run on an engine, and all that two runs of one seed must have in common."""

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

import nbep
from nbep.device.engine import Code
from nbep.emulator import EmulatorError, World
from nbep.emulator.engine import Stopped
from nbep.emulator.engine.world import CompiledWorld
from nbep.host.spawn import _compiled_world


def run(main, num_ranks, engine, seed=0, *, may_repeat=False, **options):
    """What the ranks return, what the run has counted, and what it would draw next.

    may_repeat: compiled code may stop at a fault that is meant; Python runs all of it then
    """
    worlds = []

    def rank_main(comm):
        worlds.append(comm.runtime.world)
        return main(comm)

    results = nbep.spawn(rank_main, num_ranks, "emulator", seed=seed, engine=engine, **options)
    assert isinstance(worlds[0], CompiledWorld) == (engine == "compiled")
    assert may_repeat or len(worlds) == num_ranks, "Python has repeated the run"
    world = worlds[-1]
    return plain(results), int(world.calls), counts(world)


def counts(world):
    """Counts of a run that is over, and what it would draw next."""
    signals = int(world.signals) if world.memory_model == "checked" else 0
    late = (int(world.moment), world.early.random()) if world.memory_model == "delayed" else None
    return int(world.steps), int(world.parks), signals, late, world.random.random()


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


class Ended(NamedTuple):
    """error: its name; for compiled code the reason of its stop; None if nothing has ended the run before its time

    at: in primitive calls, up to there; left: what the run gives, if nothing has ended it, and its counts
    """

    error: str | None
    at: int
    left: Any = None


def end_of(act, num_ranks, engine, seed=0, memory_model="checked", **options):
    """How a run ends on an engine that the other one does not help out. act: runs in a world"""
    options["memory_model"] = memory_model
    if engine == "python":
        world = World(num_ranks, seed, **options)
    else:
        world = _compiled_world(memory_model)(num_ranks, seed, code=Code(model=memory_model), **options)
    try:
        left = act(world)
    except Stopped as stopped:
        return Ended(str(stopped), int(world.calls + world.tables.run["granted"] - world.tables.run["left"]))
    except EmulatorError as error:
        return Ended(type(error).__name__, world.step if hasattr(world.current, "left") else world.calls)
    return Ended(None, int(world.calls), (plain(left), counts(world)))
