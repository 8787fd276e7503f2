"""`pytest --nbep-cuda`: tests whose `numba.cuda` is the emulator's. What a kernel does wrong fails its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbep.device.extras import what_is_missing

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
        try:
            from .installing import install
        except ModuleNotFoundError as error:
            raise pytest.UsageError(f"--nbep-cuda: {what_is_missing(error) or error}") from error
        install()


@pytest.hookimpl(wrapper=True)
def _on_a_device(item: Any) -> Iterator[Any]:
    """Each test, what is set up before it and what is torn down after it have a device of their own.

    Kernels that nobody has waited for run at the end, however it ends.
    """
    if not item.config.getoption("--nbep-cuda"):
        return (yield)
    with _device(item.config):
        return (yield)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _on_a_device


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Iterator[Any]:
    """What a module launches when it is imported fails its import."""
    if not collector.config.getoption("--nbep-cuda"):
        return (yield)
    report: Any = None
    try:
        with _device(collector.config):
            report = yield
    except Exception as error:
        report.outcome, report.longrepr, report.result = "failed", f"{type(error).__name__}: {error}", []
    return report


def _device(config: Any) -> Any:
    from . import session

    model, seed = config.getoption("--nbep-cuda-memory-model"), config.getoption("--nbep-cuda-seed")
    return session.options(memory_model=model, seed=seed)
