"""Compiled kernels are kept on disk: the next process does without Numba."""

from pathlib import Path

import pytest
from processes import run_python

from nbep.device.compile import load_kernels
from nbep.device.jit import KERNELS

pytestmark = pytest.mark.cuda

PROGRAM = Path(__file__).parent / "cache_main.py"


def test_a_second_process_reads_all_kernels_from_the_cache_without_numba(tmp_path):
    load_kernels()
    assert "compiled" in run_python(PROGRAM, NBEP_CACHE_DIR=str(tmp_path))
    written = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.suffix for path in written} == {".cubin"}
    assert {path.name.partition("-")[0] for path in written} == set(KERNELS)
    assert "read from the cache" in run_python(PROGRAM, NBEP_CACHE_DIR=str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    assert "compiled" in run_python(PROGRAM, NBEP_CACHE_DIR=str(in_the_way))
