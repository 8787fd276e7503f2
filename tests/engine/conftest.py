"""What the tests of the engine need: numba, and a machine that has a switch of stacks."""

import pytest

from nbep.emulator.engine.switch import why_not

collect_ignore_glob = [] if why_not() is None else ["test_*.py"]


@pytest.fixture
def python(monkeypatch):
    """Nothing else says which engine is meant."""
    monkeypatch.delenv("NBEP_ENGINE", raising=False)
