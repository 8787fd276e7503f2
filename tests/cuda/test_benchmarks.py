"""The benchmarks run on virtual ranks and in processes, small and short."""

import json
from importlib.util import find_spec

import pytest
from processes import run_python

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_soak_finds_bf16_and_fp8_rounds_right(num_ranks):
    output = run_python("-m", "nbep", "bench", "soak", "--ranks", num_ranks, "--rounds", 12)
    assert f"12 rounds on {num_ranks} ranks, all right" in output


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py here")
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_soak_finds_rounds_right_with_as_many_gpus_as_there_are(num_ranks):
    environment = {"PYTORCH_CUDA_ALLOC_CONF": None, "NBEP_TIMEOUT_MS": "30000"}
    output = run_python("-m", "nbep", "bench", "soak", "--rounds", 6, ranks=num_ranks, **environment)
    assert f"6 rounds on {num_ranks} ranks, all right" in output


def test_intranode_measures_with_a_single_repetition(tmp_path):
    shape = ["--tokens", 64, "--hidden", 256, "--topk", 2, "--experts", 8]
    report = tmp_path / "report.json"
    tried = ["--sms", "4", "--chunks", "4", "--repeat", 1, "--json", report]
    run_python("-m", "nbep", "bench", "intranode", *shape, *tried)
    rows = json.loads(report.read_text())["rows"]
    assert [row["work"] for row in rows] == ["dispatch bf16", "dispatch fp8", "combine bf16"]
    assert all(row["us"] > 0 for row in rows)


def test_launch_measures_every_launcher():
    costs = json.loads(run_python("-m", "nbep", "bench", "launch", "--repeat", 1, "--json"))
    assert len(costs) == 3
    assert all(microseconds > 0 for microseconds in costs.values())
