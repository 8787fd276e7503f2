"""One process per GPU: peers' memory comes through CUDA IPC, and calls go into CUDA graphs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python
from target import unusable_reason

pytestmark = pytest.mark.cuda

HERE = Path(__file__).parent
# torch's own allocator: the other one is for ranks that share a card.
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": None, "NBEP_TIMEOUT_MS": None}


def need(num_gpus: int) -> None:
    """Skip the test if there are fewer GPUs, or no torch or mpi4py."""
    for library in ("torch", "mpi4py"):
        if find_spec(library) is None:
            pytest.skip(f"no {library} here")
    from nbep.host.runtime.cuda.driver import num_devices

    if unusable_reason() is None and num_devices() < num_gpus:
        pytest.skip(f"{num_devices()} of {num_gpus} GPUs")


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_every_rank_gets_what_the_reference_says(num_gpus):
    need(num_gpus)
    output = run_python(HERE / "mpi_main.py", ranks=num_gpus, **ENVIRONMENT)
    assert f"rounds on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_ranks_of_a_torch_process_group_get_what_the_reference_says(num_gpus):
    need(num_gpus)
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_gpus, HERE / "torch_main.py"]
    output = run_python(*program, **ENVIRONMENT)
    assert f"rounds on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 8])
@pytest.mark.parametrize("options", [[], ["--async"]], ids=["blocking", "async"])
def test_a_cuda_graph_of_dispatch_and_combine_takes_new_inputs(num_gpus, options):
    need(num_gpus)
    output = run_python(HERE / "graph_main.py", *options, ranks=num_gpus, **ENVIRONMENT)
    assert f"replays on {num_gpus} GPUs: 0 wrong" in output
