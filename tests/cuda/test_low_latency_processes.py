"""The low-latency mode with one process per GPU: random rounds, calls that differ, CUDA graphs,
and a process that exits.

Over ibgda and nvshmem one host holds several nodes.
"""

from pathlib import Path

import nvshmem_package
import pytest
from processes import GPU_EACH, need_gpus, run_python

pytestmark = pytest.mark.cuda

HERE = Path(__file__).parent


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_random_rounds_are_right(num_gpus):
    need_gpus(num_gpus)
    output = run_python(HERE / "low_latency_main.py", "--rounds", 100, ranks=num_gpus, **GPU_EACH)
    assert f"100 low-latency rounds on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_ranks_whose_calls_differ_report_what_both_have_passed(num_gpus):
    need_gpus(num_gpus)
    output = run_python(HERE / "differ_main.py", ranks=num_gpus, **GPU_EACH | {"NBEP_TIMEOUT_MS": "3000"})
    assert f"calls that differ on {num_gpus} GPUs: 0 wrong" in output


def over(transport, num_nvl_peers):
    """The options of the programs. Skips the test if the transport is not installed."""
    if transport == "nvshmem":
        nvshmem_package.include_folder()
    return ["--transport", transport, "--num-nvl-peers", num_nvl_peers]


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("transport", ["ibgda", "nvshmem"])
def test_random_rounds_between_nodes_are_right(transport, num_nodes, num_nvl_peers):
    network, num_gpus = over(transport, num_nvl_peers), num_nodes * num_nvl_peers
    need_gpus(num_gpus)
    output = run_python(HERE / "low_latency_main.py", "--rounds", 300, *network, ranks=num_gpus, **GPU_EACH)
    assert f"300 low-latency rounds on {num_gpus} GPUs: 0 wrong" in output


def test_nvshmem_is_set_up_and_ended_again_and_again():
    nvshmem_package.include_folder()
    need_gpus(2)
    output = run_python(HERE / "nvshmem_main.py", ranks=2, **GPU_EACH)
    assert "NVSHMEM three times on 2 GPUs: 0 wrong" in output


@pytest.mark.parametrize("options", [[], ["--hooks"]], ids=["whole", "hooks"])
@pytest.mark.parametrize("transport", ["ibgda", "nvshmem"])
def test_a_cuda_graph_between_nodes_takes_new_inputs(transport, options):
    network = over(transport, 1)
    need_gpus(2)
    output = run_python(HERE / "low_latency_graph_main.py", *options, *network, ranks=2, **GPU_EACH)
    assert "replays on 2 GPUs: 0 wrong" in output


def test_the_others_go_on_without_a_process_of_another_node():
    need_gpus(3)
    options = {"ranks": 3, "survive": True, "must_fail": True, **GPU_EACH}
    output = run_python(HERE / "shrink_main.py", *over("ibgda", 1), **options)
    assert [rank for rank in range(3) if f"rank {rank} is done" not in output] == [1]


def test_kernels_of_ones_own_run_over_queue_pairs_and_faults_end_in_errors():
    need_gpus(2)
    output = run_python(HERE / "network_main.py", ranks=2, **GPU_EACH)
    assert "6 network programs on 2 GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("options", [[], ["--hooks"]], ids=["whole", "hooks"])
def test_a_cuda_graph_of_low_latency_calls_takes_new_inputs(num_gpus, options):
    need_gpus(num_gpus)
    output = run_python(HERE / "low_latency_graph_main.py", *options, ranks=num_gpus, **GPU_EACH)
    assert f"replays on {num_gpus} GPUs: 0 wrong" in output


def test_a_cuda_graph_of_an_odd_number_of_calls_raises_and_says_why():
    need_gpus(2)
    output = run_python(HERE / "low_latency_graph_main.py", "--odd", ranks=2, **GPU_EACH)
    assert "an odd graph on 2 GPUs: 0 wrong" in output


@pytest.mark.parametrize("options", [[], ["--deduplicate"]], ids=["plain", "deduplicate"])
@pytest.mark.parametrize("num_gpus", [3, 4])
def test_the_others_go_on_when_a_process_exits(num_gpus, options):
    need_gpus(num_gpus)
    output = run_python(HERE / "shrink_main.py", *options, ranks=num_gpus, survive=True, must_fail=True, **GPU_EACH)
    assert [rank for rank in range(num_gpus) if f"rank {rank} is done" not in output] == [1]
