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


LOW_LATENCY = ["--hidden", 512, "--topk", 2, "--experts", 8, "--repeat", 1, "--bf16", "--logfmt"]


def low_latency_rows(tmp_path, *options, ranks=None, **environment):
    """The clocks, by work and whether it was in a graph."""
    report = tmp_path / "report.json"
    command = ["-m", "nbep", "bench", "low-latency", *LOW_LATENCY, "--json", report, *options]
    run_python(*command, ranks=ranks, **environment)
    clocks = {}
    for row in json.loads(report.read_text())["rows"]:
        assert row["us"] > 0
        clocks.setdefault((row["work"], row["graph"]), set()).add(row["clock"])
    return clocks


WHOLE = ["dispatch", "combine", "both"]
HALVES = ["dispatch send", "dispatch receive", "combine send", "combine receive"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_low_latency_measures_virtual_ranks_by_both_clocks(num_ranks, tmp_path):
    clocks = low_latency_rows(tmp_path, "--ranks", num_ranks, "--tokens", "1,16", "--plot", tmp_path / "plot.png")
    assert clocks == {(work, False): {"kernel", "events"} for work in WHOLE + HALVES}
    assert (tmp_path / "plot.png").exists()


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py here")
def test_low_latency_measures_processes_with_and_without_graphs(tmp_path):
    environment = {"PYTORCH_CUDA_ALLOC_CONF": None, "NBEP_TIMEOUT_MS": "30000"}
    clocks = low_latency_rows(tmp_path, "--tokens", "16", ranks=2, **environment)
    assert clocks == {
        **{(work, graph): {"kernel", "events"} for work in WHOLE for graph in (False, True)},
        **{(work, False): {"kernel", "events"} for work in HALVES},
        **{(work, True): {"kernel"} for work in HALVES},
    }


NETWORK = ["--sizes", "16,65536", "--batches", "1,4", "--queues", "1,4", "--sms", 2, "--messages", 4, "--repeat", 1]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_network_measures_virtual_ranks_over_direct_and_ibgda(num_ranks, tmp_path):
    report = tmp_path / "report.json"
    run_python("-m", "nbep", "bench", "network", *NETWORK, "--ranks", num_ranks, "--json", report)
    rows = json.loads(report.read_text())["rows"]
    assert [(row["transport"], row["num_bytes"]) for row in rows] == [
        (transport, size) for transport in ("direct", *["ibgda"] * 4) for size in (16, 65536)
    ]
    assert all(row["us"] > 0 and row["of_copy"] > 0 for row in rows)


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py here")
def test_network_measures_processes(tmp_path):
    report = tmp_path / "report.json"
    environment = {"PYTORCH_CUDA_ALLOC_CONF": None, "NBEP_TIMEOUT_MS": "30000"}
    run_python("-m", "nbep", "bench", "network", *NETWORK, "--json", report, ranks=2, **environment)
    assert {row["transport"] for row in json.loads(report.read_text())["rows"]} >= {"direct", "ibgda"}


INTERNODE = ["--tokens", 64, "--hidden", 256, "--topk", 2, "--experts", 8, "--num-sms", 4, "--repeat", 1]
INTERNODE += ["--nvl-chunks", 2, "--rdma-chunks", 4]
WORKS = ["dispatch bf16", "dispatch fp8", "combine bf16"]


def internode_works(tmp_path, *options, **how):
    """(transport, work) of the rows."""
    report = tmp_path / "report.json"
    run_python("-m", "nbep", "bench", "internode", *INTERNODE, *options, "--json", report, **how)
    rows = json.loads(report.read_text())["rows"]
    assert all(row["us"] > 0 and row["of_push"] > 0 for row in rows)
    return [(row["transport"], row["work"]) for row in rows]


@pytest.mark.parametrize("num_nvl_peers", [2, 4])
def test_internode_measures_virtual_ranks_over_direct_and_ibgda(num_nvl_peers, tmp_path):
    found = internode_works(tmp_path, "--num-nvl-peers", num_nvl_peers)
    assert found == [(transport, work) for transport in ("direct", "ibgda") for work in WORKS]


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py here")
def test_internode_measures_processes(tmp_path):
    environment = {"PYTORCH_CUDA_ALLOC_CONF": None, "NBEP_TIMEOUT_MS": "30000"}
    found = internode_works(tmp_path, "--transport", "direct", ranks=4, **environment)
    assert found == [("direct", work) for work in WORKS]


def test_launch_measures_every_launcher():
    costs = json.loads(run_python("-m", "nbep", "bench", "launch", "--repeat", 1, "--json"))
    assert len(costs) == 3
    assert all(microseconds > 0 for microseconds in costs.values())
