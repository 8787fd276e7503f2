"""`nbep compile` takes nbep's kernels, or those of a file."""

import json
import re
import subprocess
import sys

import pytest
from processes import LIMIT_S

from nbep.device.compile import main

pytestmark = pytest.mark.compile

HELPERS = """
from nbep.device.jit import kernel
from nbep.device.primitives import st_weak_s32
from nbep.device.types import Out

@kernel()
def of_another_file(out: Out):
    st_weak_s32(out, 1)
"""
KERNELS = """
from my_helpers import of_another_file
from nbep.device.jit import kernel
from nbep.device.primitives import st_weak_f32, st_weak_s32
from nbep.device.types import Out

@kernel(max_threads=96)
def push(out: Out):
    st_weak_s32(out, 1)

@kernel()
def wrong(out: Out):
    st_weak_f32(out, 1.0)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_helpers.py").write_text(HELPERS)
    file = tmp_path / "my_kernels.py"
    file.write_text(KERNELS)
    return file


def compile_in_a_process(*arguments):
    command = [sys.executable, "-m", "nbep", "compile", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, [(row["kernel"], row["max_threads"]) for row in json.loads(done.stdout)], done.stderr


@pytest.mark.thorough
def test_the_kernels_that_a_file_defines_are_compiled_and_those_that_do_not_compile_are_named(file):
    code, rows, printed = compile_in_a_process(file)
    assert (code, rows) == (1, [("push", 96)])
    assert printed.startswith("wrong for sm_90: st_weak_f32 needs float32")
    assert f"at {file}:13" in printed


@pytest.mark.thorough
def test_one_kernel_of_a_file_that_is_called_like_a_module_that_is_loaded_is_compiled(file):
    (file.parent / "copy.py").write_text(KERNELS)
    assert compile_in_a_process(file.parent / "copy.py", "--kernel", "push") == (0, [("push", 96)], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_72"], "sm_72 is too old; the lowest is sm_75"),
        (["--arch", "90"], "'90' is not an architecture such as sm_90"),
        (["--arch", "sm_999"], r"--arch: got sm_999, which nvJitLink [\d.]+ does not know"),
        (["--ptx", __file__], "--ptx: .*File exists"),
        (["--json", "my_kernels.py"], r"--json: got 'my_kernels\.py'; must be a file that ends in \.json"),
        (["--kernel", "nothing"], "no kernel nothing; there are .*combine, .*dispatch"),
        (["nowhere.py"], r"FILE: got nowhere\.py; must be a file of Python"),
        ([__file__], "FILE: got .*test_compile_command.py, which defines no kernel"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setitem(sys.modules, "test_compile_command", None)  # what is imported under this name goes again
    with pytest.raises(SystemExit):
        main(arguments)
    error = capsys.readouterr().err
    assert error.startswith("usage: nbep compile ")
    assert re.search(message, error)
