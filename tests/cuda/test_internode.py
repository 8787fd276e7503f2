"""The mode between nodes on GPUs: virtual ranks of one card, and a process with a GPU for each rank."""

from pathlib import Path

import nvshmem_package
import pytest
from internode import TRANSPORTS
from internode_rounds import Sizes, num_bytes, wrong_rounds
from processes import GPU_EACH, need_gpus, run_python
from target import spawn

import nbep

pytestmark = pytest.mark.cuda

HERE = Path(__file__).parent
SIZES = Sizes(hiddens=(8, 128, 1024), most_channels=4)


def run_rounds(comm, transport: str, num_nodes: int, num_rounds: int) -> list[str]:
    """What is wrong on one rank."""
    num_nvl_peers = comm.size // num_nodes
    sizes = num_bytes(num_nodes, num_nvl_peers, SIZES)
    buffer = nbep.Buffer(comm, **sizes, transport=transport, num_nvl_peers=num_nvl_peers)
    wrong = wrong_rounds(buffer, num_nodes, 1, num_rounds, SIZES)
    buffer.destroy()
    return wrong


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), [(2, 2), (2, 4)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_rounds_of_virtual_ranks_are_right(transport, num_nodes, num_nvl_peers):
    num_ranks = num_nodes * num_nvl_peers
    assert spawn(run_rounds, num_ranks, (transport, num_nodes, 100)) == [[]] * num_ranks


@pytest.mark.parametrize("transport", [*TRANSPORTS, "nvshmem"])
def test_random_rounds_of_four_gpus_as_two_nodes_are_right(transport):
    if transport == "nvshmem":
        nvshmem_package.include_folder()
    need_gpus(4)
    arguments = ["--rounds", 100, "--transport", transport]
    output = run_python(HERE / "internode_main.py", *arguments, ranks=4, **GPU_EACH)
    assert "100 rounds between 2 nodes of 2 GPUs: 0 wrong" in output
