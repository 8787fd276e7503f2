"""What a kept object depends on, and what is never loaded."""

import sys

import numpy as np
import pytest

import nbep
from nbep.device import engine
from nbep.device.cache import cache_folder
from nbep.device.jit import spec_of
from nbep.emulator.engine import MODELS
from nbep.lang import I32, I64, InOut, device_function, kernel, st_weak_s32

STEP = 3


@device_function
def helper(i):
    return i + STEP


def made(kind, more=0):
    """A kernel whose source differs by what is given."""

    def own(memory: InOut, n):
        st_weak_s32(memory, helper(n) + more)

    own.__annotations__["n"] = kind
    return kernel()(own)


def key(function):
    return engine.code_key(spec_of(function))


def test_the_same_code_has_the_same_key():
    assert key(made(I32)) == key(made(I32))


def test_a_parameter_a_constant_and_a_helper_change_the_key(monkeypatch):
    plain = made(I32)
    before = key(plain)
    assert key(made(I64)) != before
    assert key(made(I32, more=1)) != before
    monkeypatch.setattr(sys.modules[__name__], "STEP", 4)
    assert key(plain) != before
    monkeypatch.undo()
    monkeypatch.setattr(helper, "__code__", (lambda i: i - STEP).__code__)
    assert key(plain) != before
    monkeypatch.undo()
    assert key(plain) == before


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_what_others_can_write_is_not_loaded(mode, monkeypatch, tmp_path):
    """Also if it is the right object: it is compiled anew."""
    compiled = []
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(engine, "_loaded", {})

    def compile_it():
        compiled.append(1)
        return b"code", ["symbol"]

    assert engine._object_of("one", "one", compile_it) == (b"code", ["symbol"])
    assert engine._object_of("one", "one", compile_it) == (b"code", ["symbol"])
    assert len(compiled) == 1
    tmp_path.chmod(mode)
    with pytest.warns(RuntimeWarning, match="is not used"):
        engine._object_of("one", "one", compile_it)
    assert len(compiled) == 2


@kernel(max_threads=1)
def write_number(memory: InOut, n: I32):
    st_weak_s32(memory, helper(n))


def test_each_memory_model_has_code_of_its_own():
    for model in MODELS:
        engine.prefill(spec_of(write_number), model)
        assert [*cache_folder().glob(f"write_number-{model}-*.cpu")]
        assert [*cache_folder().glob(f"machine-{model}-*.cpu")]


def test_code_that_is_edited_runs_as_edited(monkeypatch):
    """As nbep check breaks steps: what was compiled before is not what runs."""

    def main(comm):
        memory = np.zeros(1, np.int32)
        stream = comm.runtime.create_stream("own")
        comm.runtime.launch(stream, write_number, 1, 1, 0, memory, 10)
        stream.synchronize()
        return int(memory[0])

    assert nbep.spawn(main, 1, "emulator", engine="compiled") == [13]
    monkeypatch.setattr(helper, "__code__", (lambda i: i - STEP).__code__)
    assert nbep.spawn(main, 1, "emulator", engine="compiled") == [7]
    monkeypatch.undo()
    assert nbep.spawn(main, 1, "emulator", engine="compiled") == [13]
