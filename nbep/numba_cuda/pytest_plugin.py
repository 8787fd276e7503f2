"""`pytest --nbep-cuda`: tests whose `numba.cuda` is the emulator's. What a kernel does wrong fails its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

MODELS = ("checked", "sc", "delayed")


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("nbep", "Numba-CUDA kernels on nbep's emulator")
    group.addoption("--nbep-cuda", action="store_true", help="numba.cuda is nbep's emulator: no GPU is needed")
    group.addoption("--nbep-cuda-memory-model", choices=MODELS, default="checked", help="checked reports races")
    group.addoption("--nbep-cuda-seed", type=int, default=0, help="of the schedule")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before any conftest.py imports numba.cuda."""
    if early_config.known_args_namespace.nbep_cuda:
        from .installing import install

        install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[Any]:
    """Each test has a device of its own; kernels that it did not wait for run at its end."""
    config = item.config
    if not config.getoption("--nbep-cuda"):
        return (yield)
    from . import session

    model, seed = config.getoption("--nbep-cuda-memory-model"), config.getoption("--nbep-cuda-seed")
    session.reset()
    with session.options(memory_model=model, seed=seed):
        return (yield)
