"""One process per rank: peers' memory comes through handles of every type, and calls go into CUDA graphs."""

from pathlib import Path
from typing import get_args

import pytest
from cases import make_case
from intranode import Options, run
from processes import GPU_EACH, need_gpus, run_python, surviving_mpirun

from nbep.host.target.memory import HandleType

pytestmark = pytest.mark.cuda

HERE = Path(__file__).parent
HANDLE_TYPES = get_args(HandleType)


def fabric_refusal() -> str | None:
    """What the driver answers to a wish for fabric handles, None if it has them."""
    from nbep.host.target.cuda.driver import Device, current_ordinal
    from nbep.host.target.cuda.memory import FabricMemory

    try:
        FabricMemory(Device(current_ordinal() or 0), 1, "probe").free()
    except RuntimeError as error:
        if "does not offer it" not in str(error):
            raise
        return str(error)
    return None


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("handle_type", HANDLE_TYPES)
def test_every_rank_gets_what_the_reference_says(handle_type, num_gpus):
    need_gpus(num_gpus)
    if handle_type == "fabric" and (reason := fabric_refusal()):
        pytest.skip(reason)
    output = run_python(HERE / "mpi_main.py", handle_type, ranks=num_gpus, **GPU_EACH)
    assert f"{handle_type} rounds on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("handle_type", HANDLE_TYPES)
def test_processes_read_and_write_each_others_memory_or_all_say_why_not(handle_type, num_ranks):
    need_gpus(1)
    output = run_python(HERE / "handles_main.py", handle_type, ranks=num_ranks, **GPU_EACH)
    outcome = "not offered: " if handle_type == "fabric" and fabric_refusal() else "all right"
    assert f"{handle_type} handles between {num_ranks} processes: {outcome}" in output


@pytest.mark.parametrize("handle_type", HANDLE_TYPES)
def test_virtual_ranks_get_what_the_reference_says_or_raise_and_say_why(handle_type):
    case, options = make_case(1, num_ranks=4, num_tokens=9), Options(handle_type=handle_type)
    if handle_type == "fabric" and fabric_refusal():
        wanted = r"ranks 0, 1, 2, 3: handle_type: got fabric; GPU \S+ does not offer it.*(SUPPORTED is 0|IMEX channel)"
        with pytest.raises(RuntimeError, match=wanted):
            run(case, options)
    else:
        run(case, options)


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_everything_goes_through_the_hosts_memory_where_gpus_do_not_reach_each_other(num_gpus):
    need_gpus(num_gpus)
    output = run_python(HERE / "host_main.py", ranks=num_gpus, **GPU_EACH)
    assert f"memory of the host on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_ranks_of_a_torch_process_group_get_what_the_reference_says(num_gpus):
    need_gpus(num_gpus)
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_gpus, HERE / "torch_main.py"]
    output = run_python(*program, **GPU_EACH)
    assert f"rounds on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 8])
@pytest.mark.parametrize(
    "options", [[], ["--async"], ["--zero-copy"], ["--async", "--zero-copy"]], ids=lambda options: " ".join(options)
)
def test_a_cuda_graph_of_dispatch_and_combine_takes_new_inputs(num_gpus, options):
    need_gpus(num_gpus)
    output = run_python(HERE / "graph_main.py", *options, ranks=num_gpus, **GPU_EACH)
    assert f"replays on {num_gpus} GPUs: 0 wrong" in output


@pytest.mark.parametrize("num_gpus", [2, 8])
@pytest.mark.parametrize("options", [[], ["--expand"], ["--shared"]], ids=lambda options: " ".join(options))
def test_a_cuda_graph_of_elastic_calls_takes_new_inputs(num_gpus, options):
    need_gpus(num_gpus)
    output = run_python(HERE / "elastic_graph_main.py", *options, ranks=num_gpus, **GPU_EACH)
    assert f"replays on {num_gpus} GPUs: 0 wrong" in output


def test_survivors_of_a_process_that_is_killed_or_stopped_name_its_rank():
    need_gpus(4)
    surviving_mpirun(4)
    output = run_python(HERE / "kills_main.py", "--kills", 6, "--stops", 2, "--at-once", 4, **GPU_EACH)
    assert "6 kills and 2 stops of 4 processes: 0 wrong" in output
