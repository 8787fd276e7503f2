"""Settings for all tests. Helpers that tests import are in tests/support.

NBEP_TEST_TARGET=cuda runs tests/intranode, tests/host and tests/cuda on a GPU, with the bodies that the emulator runs.
"""

import gc
import os
import sys

import pytest
import target
from hypothesis import HealthCheck, settings
from parts import both_parts

pytest_plugins = ["quarters", "held_reports"]

# Runs are deterministic: the same commit gives the same result, also where the database of examples is not kept.
settings.register_profile("nbep", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nbep")

target.set_environment()


def pytest_configure(config):
    if sys.dont_write_bytecode:  # each process of a test would compile all of nbep: keep it, but not beside the sources
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(config.rootpath / ".pytest_cache" / "bytecode")
        sys.dont_write_bytecode = False
    if target.TARGET != "cuda":
        return
    reason = target.unusable_reason()
    if reason is not None:
        raise pytest.UsageError(f"NBEP_TEST_TARGET: got cuda; no GPU can be used here: {reason}")
    import arrays

    arrays.warm_up()


@pytest.fixture(params=both_parts([1], thorough=[], long=[2]) if target.TARGET == "emulator" else [2])
def channels(request, monkeypatch):
    """What `Options` of the test have if they say no config. With one channel a run takes little more than half."""
    import intranode

    monkeypatch.setitem(intranode.DEFAULTS, "num_channels", request.param)


@pytest.fixture(params=both_parts([1], thorough=[], long=[2]) if target.TARGET == "emulator" else [2])
def blocks(request, monkeypatch):
    """How many blocks of the emulator a low-latency call has. With one a run takes little more than half."""
    from nbep.host.target.emulator import EmulatorRuntime

    monkeypatch.setattr(EmulatorRuntime, "resident_blocks", lambda *_: request.param)


@pytest.fixture(scope="module", autouse=True)
def real_numba():
    """Other files compile: what a plain program has installed goes, too."""
    yield
    if installing := sys.modules.get("nbep.lab.numba_cuda.installing"):
        installing.uninstall()


def pytest_collection_finish():
    """Thousands of collected tests stay until the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    gpu_reason = None
    if any(item.get_closest_marker("cuda") for item in items):
        gpu_reason = target.unusable_reason()
        if gpu_reason is None and target.TARGET != "cuda":
            gpu_reason = "NBEP_TEST_TARGET is not cuda"
    for item in items:
        emulator_only = item.get_closest_marker("emulator_only")
        if emulator_only is not None and target.TARGET != "emulator":
            item.add_marker(pytest.mark.skip(reason=f"on the emulator only: {emulator_only.args[0]}"))
        if item.get_closest_marker("cuda") is not None and gpu_reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {gpu_reason}"))
