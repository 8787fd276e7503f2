"""`pytest --nbep-cuda`: tests whose `numba.cuda` is the emulator's. What a kernel does wrong fails its test.

Options stand in pyproject.toml under [tool.nbep], those of the command line come before: see docs/numba_cuda.md.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

MODELS = ("checked", "sc", "delayed")
DEFAULTS: dict[str, Any] = {"memory_model": "checked", "seeds": 1, "num_sms": None, "max_calls": None, "engine": None}
OPTIONS = pytest.StashKey[dict[str, Any]]()
SEED = pytest.StashKey[int]()
LAUNCHES: Counter[str] = Counter()  # of each kernel, in xdist's workers


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("nbep", "Numba-CUDA kernels on nbep's emulator")
    group.addoption("--nbep-cuda", action="store_true", help="numba.cuda is nbep's emulator: no GPU is needed")
    group.addoption("--nbep-cuda-memory-model", choices=MODELS, help="checked reports races (checked)")
    group.addoption("--nbep-cuda-seeds", type=int, metavar="N", help="each test under the schedules 0 to N - 1 (1)")
    group.addoption("--nbep-cuda-seed", type=int, metavar="S", help="each test under schedule S alone")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before any conftest.py imports numba.cuda."""
    if early_config.known_args_namespace.nbep_cuda:
        from .installing import install

        install()


def pytest_configure(config: Any) -> None:
    if not config.getoption("--nbep-cuda"):
        return
    file = config.rootpath / "pyproject.toml"
    table = tomllib.loads(file.read_text()).get("tool", {}).get("nbep", {}) if file.is_file() else {}
    for name in set(table) - set(DEFAULTS):
        raise pytest.UsageError(f"{file}: [tool.nbep] has no {name!r}; it has {', '.join(DEFAULTS)}")
    line = {name: config.getoption(f"--nbep-cuda-{name.replace('_', '-')}", None) for name in DEFAULTS}
    chosen = {**DEFAULTS, **table, **{name: value for name, value in line.items() if value is not None}}
    seed = config.getoption("--nbep-cuda-seed")
    chosen["seeds"] = range(chosen["seeds"]) if seed is None else range(seed, seed + 1)
    config.stash[OPTIONS] = chosen


def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool | None:
    """A test under several schedules: it passes if it passes under each."""
    seeds = item.config.stash[OPTIONS]["seeds"] if item.config.getoption("--nbep-cuda") else ()
    if len(seeds) <= 1:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for seed in seeds:
        item.stash[SEED] = seed
        if seed:
            item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not all(one.passed for one in reports):
            break
    for one in reports:
        item.ihook.pytest_runtest_logreport(report=one)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def _on_a_device(item: Any) -> Iterator[Any]:
    """Each test, what is set up before it and what is torn down after it have a device of their own.

    Kernels that nobody has waited for run at the end, however it ends.
    """
    if not item.config.getoption("--nbep-cuda"):
        return (yield)
    with _device(item.config, item.stash.get(SEED, None)):
        return (yield)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _on_a_device


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """A finding is shown by the test's own lines, not by the emulator's."""
    if item.config.getoption("--nbep-cuda") and call.excinfo is not None:
        from nbep.emulator import EmulatorError

        from .code import KernelTypeError

        here = str(Path(__file__).parents[2])
        entry = call.excinfo.tb if isinstance(call.excinfo.value, (EmulatorError, KernelTypeError)) else None
        while entry is not None:
            while entry.tb_next is not None and entry.tb_next.tb_frame.f_code.co_filename.startswith(here):
                entry.tb_next = entry.tb_next.tb_next
            entry = entry.tb_next


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


def _device(config: Any, seed: int | None = None) -> Any:
    from . import session

    chosen = {name: value for name, value in config.stash[OPTIONS].items() if name != "seeds"}
    return session.options(**chosen, seed=config.stash[OPTIONS]["seeds"][0] if seed is None else seed)


def pytest_sessionfinish(session: Any) -> None:
    if session.config.getoption("--nbep-cuda"):
        from .session import launched

        LAUNCHES.update(launched)
        getattr(session.config, "workeroutput", {})["nbep"] = dict(LAUNCHES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LAUNCHES.update(getattr(node, "workeroutput", {}).get("nbep", {}))


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if config.getoption("--nbep-cuda"):
        options, seeds = config.stash[OPTIONS], config.stash[OPTIONS]["seeds"]
        each = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
        ran = f"{LAUNCHES.total()} launches of {len(LAUNCHES)} kernels" if LAUNCHES else "no kernel was launched"
        terminalreporter.write_line(f"nbep: {ran}, memory model {options['memory_model']}, {each}")
