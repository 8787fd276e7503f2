"""The Python body of each memory primitive asks the emulator for the order, scope and kind in its name."""

import sys

import pytest
from primitive_promises import promise_of
from processes import run_python

from nbep.device import primitives
from nbep.device.jit import PRIMITIVES

ADDRESS, OPERAND, COMPARE = object(), object(), object()
MEMORY = [name for name in primitives.__all__ if name in PRIMITIVES and promise_of(name).method]


class Recorder:
    """Stands in for the emulator's thread and keeps the one call made on it."""

    def __getattr__(self, method):
        def record(*args):
            self.call = (method, args)
            return "old"

        return record


def recorded(monkeypatch, name, *args):
    function = getattr(primitives, name)
    recorder = Recorder()
    monkeypatch.setattr(sys.modules[function.__module__], "current_thread", lambda: recorder)
    return function(*args), recorder.call


@pytest.mark.parametrize("name", MEMORY)
def test_body_asks_for_what_the_name_says(monkeypatch, name):
    promise = promise_of(name)
    if promise.method.startswith("load"):
        result, call = recorded(monkeypatch, name, ADDRESS)
        assert call == (promise.method, (ADDRESS, *promise.args))
        assert result == "old"
    elif promise.method.startswith("store"):
        kind, *order = promise.args
        result, call = recorded(monkeypatch, name, ADDRESS, OPERAND)
        assert call == (promise.method, (ADDRESS, kind, OPERAND, *order))
        assert result is None
    elif promise.method.startswith("atomic"):
        op, kind, *order = promise.args
        given = (ADDRESS, COMPARE, OPERAND) if op == "cas" else (ADDRESS, OPERAND)
        result, call = recorded(monkeypatch, name, *given)
        assert call == (promise.method, (op, ADDRESS, kind, OPERAND, *order, *given[1:-1]))
        assert result == "old"
    else:
        assert recorded(monkeypatch, name)[1] == (promise.method, promise.args)


def test_every_public_name_is_a_documented_function_or_the_mask():
    for name in primitives.__all__:
        if name == "FULL_MASK":
            continue
        assert getattr(primitives, name).__doc__, name
        if name in PRIMITIVES and name != "has_tma":
            assert promise_of(name) is not None


def test_importing_the_package_does_not_import_numba():
    code = "import sys, nbep, nbep.device.primitives, nbep.device.compile; assert 'numba' not in sys.modules"
    run_python("-c", code)
