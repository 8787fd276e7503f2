"""Runs of nbep's own scenarios, as `nbep check` makes them: small ones, each with one fault by name or by an edit."""

import contextlib
import io
from collections.abc import Callable
from functools import partial
from types import FunctionType

import nbep
from nbep.lab.check import broken
from nbep.lab.check.scenario import accepted
from nbep.lab.notebook import edit
from nbep.specimens.scenarios import SCENARIOS


def scenario(name: str, **parameters: int) -> Callable[..., None]:
    """A run of a scenario, with these of its parameters changed."""
    plain = SCENARIOS[name]
    values = {**plain.parameters, **parameters}

    def run(seed: int, memory_model: str = "sc") -> None:
        main = partial(plain.main, **accepted(plain.main, values))
        nbep.spawn(main, values["ranks"], "emulator", seed=seed, memory_model=memory_model)

    return run


def with_fault(fault: str, run: Callable[..., None]) -> Callable[[int], None]:
    """The run under `checked`, with a fault of nbep's catalogue."""

    def attempt(seed: int) -> None:
        with broken(fault):
            run(seed, "checked")

    return attempt


def with_edit(function: FunctionType, old: str, new: str, run: Callable[..., None]) -> Callable[..., None]:
    """The run with another text in the source of one function."""

    def attempt(seed: int, **arguments: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()), edit(function, old, new):
            run(seed, **arguments)

    return attempt
