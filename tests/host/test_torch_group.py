"""A process group of torch.distributed as the communicator: what DeepEP's users have."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cases import make_case
from intranode import round_trip, run
from processes import run_python

import nbep
from nbep.emulator.machine.memory import OFFSET_BITS, AddressSpace
from nbep.host.ranks import comm, roll_call
from nbep.host.ranks.comm import TorchComm, is_torch_group
from nbep.host.ranks.roll_call import RollCall
from nbep.host.target import process
from nbep.host.target.base import current_runtime
from nbep.host.target.memory import WantedMemory
from nbep.host.target.torchrun import SharedMemory

NUM_RANKS = 4
MISSING_PROGRAM = Path(__file__).parent / "torch_missing_main.py"
GLOO_PROGRAM = Path(__file__).parent / "gloo_main.py"


class ProcessGroup:
    """Stands in for torch's: rank and size are methods."""

    __module__ = "torch._C._distributed_c10d"

    def __init__(self, comm):
        self.comm = comm

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size


@pytest.fixture
def torch_without_torch(monkeypatch):
    """torch.distributed with the functions that nbep calls."""

    def all_gather_object(object_list, obj, group=None):
        object_list[:] = group.comm.allgather(obj)

    torch, distributed = ModuleType("torch"), ModuleType("torch.distributed")
    torch.distributed, distributed.all_gather_object = distributed, all_gather_object
    distributed.get_world_size = lambda: NUM_RANKS  # it is only compared with that of other ranks
    monkeypatch.setattr(comm, "meet_torch_group", lambda *_: None)  # it is about the store of real processes
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)


@pytest.fixture
def ranks_of_a_spawn(torch_without_torch, monkeypatch):
    """A process group's ranks are not processes of their own."""
    monkeypatch.setattr(process, "process_runtime", lambda comm: current_runtime())


emulator_only = pytest.mark.emulator_only("a stand-in for torch would be in torch's way")


def test_only_torchs_groups_count_as_torch():
    assert is_torch_group(ProcessGroup(None))
    assert is_torch_group(type("ProcessGroupOfSomebody", (ProcessGroup,), {})(None))
    assert not is_torch_group(type("ProcessGroup", (), {"__module__": "elsewhere"})())


@emulator_only
@pytest.mark.usefixtures("ranks_of_a_spawn")
def test_ranks_of_a_process_group_agree_with_the_reference():
    def main(comm, case, options):
        return round_trip(ProcessGroup(comm), case, options)

    run(make_case(1, num_ranks=4, num_tokens=(5, 0, 7, 1)), fn=main)


@emulator_only
@pytest.mark.usefixtures("ranks_of_a_spawn")
def test_a_buffer_keeps_the_group_that_it_was_given():
    def main(comm):
        group = ProcessGroup(comm)
        buffer = nbep.Buffer(group, num_nvl_bytes=256)
        assert (buffer.group, buffer.rank, buffer.group_size) == (group, comm.rank, 2)
        buffer.destroy()

    nbep.spawn(main, 2, "emulator")


@emulator_only
@pytest.mark.usefixtures("torch_without_torch")
def test_collectives_are_those_of_a_communicator():
    def main(comm):
        group = TorchComm(ProcessGroup(comm))
        group.barrier()
        return group.rank, group.size, group.allgather(10 * group.rank)

    assert nbep.spawn(main, 3, "emulator") == [(rank, 3, [0, 10, 20]) for rank in range(3)]


class TorchsStore(dict):
    """Stands in for torch's: what was set can be got, as bytes."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@emulator_only
@pytest.mark.usefixtures("torch_without_torch")
def test_reports_of_all_ranks_reach_rank_0_through_torchs_store(monkeypatch):
    store = TorchsStore()
    monkeypatch.setattr(roll_call, "default_store", lambda: store)

    def main(comm):
        calls = [RollCall(TorchComm(ProcessGroup(comm))) for _ in range(2)]  # of two buffers, which do not mix
        if comm.rank > 0:
            assert calls[1].reports(f"from {comm.rank}") == []
        comm.barrier()
        return [call.reports("from 0") for call in calls] if comm.rank == 0 else []

    monkeypatch.setattr(roll_call, "REPORTS_S", 0.01)
    assert nbep.spawn(main, 3, "emulator")[0] == [["from 0"], ["from 0", "from 1", "from 2"]]


@emulator_only
@pytest.mark.usefixtures("torch_without_torch")
def test_a_store_that_is_gone_does_not_hide_what_a_rank_raises(monkeypatch):
    def gone():
        raise RuntimeError("connection closed")

    monkeypatch.setattr(roll_call, "default_store", gone)
    monkeypatch.setattr(roll_call, "REPORTS_S", 0.01)

    def main(comm):
        return RollCall(TorchComm(ProcessGroup(comm))).reports(f"from {comm.rank}")

    assert nbep.spawn(main, 2, "emulator") == [["from 0"], []]


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
def test_two_processes_under_gloo_agree_with_the_reference():
    """On the emulator, with torch's tensors on the CPU."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    output = run_python(
        *launcher, GLOO_PROGRAM, NBEP_TARGET="emulator", NBEP_TEST_TARGET="emulator", NBEP_TEST_ARRAYS="torch"
    )
    for rank in range(2):
        assert f"rank {rank} is done" in output


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
def test_a_process_that_does_not_come_to_make_or_to_destroy_a_buffer_is_named_in_time():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    output = run_python(*launcher, MISSING_PROGRAM, NBEP_TARGET="emulator", NBEP_TIMEOUT_MS="500")
    for rank in range(2):
        what = "did not come to make, or to destroy, a Buffer in 1000 ms"
        assert output.count(f"rank {rank}: rank {1 - rank} {what} ({rank}, {1 - rank}, construction)") == 2
        assert f"rank {rank} is done" in output


def test_processes_map_each_others_memory():
    """Without torch: two threads stand for the processes, whose address spaces share nothing else."""
    wanted = WantedMemory(64, "memory", str, "ipc", zero=False)
    memories = [SharedMemory(AddressSpace(rank), SimpleNamespace(rank=rank, size=2), wanted) for rank in range(2)]
    handles = [memory.handle for memory in memories]
    with ThreadPoolExecutor(2) as ranks:
        opened = list(ranks.map(lambda rank: memories[rank].open_peers(handles, rank), range(2)))
    for rank, memory in enumerate(memories):
        assert opened[rank][rank] == memory.address
        seen_by_peer = memories[1 - rank].space.segments[opened[1 - rank][rank] >> OFFSET_BITS]
        memory.write(8, np.array([rank + 7], np.int64))
        assert seen_by_peer.array(np.int64, 8, 1).tolist() == [rank + 7]
        assert seen_by_peer.shared
    for memory in memories:
        memory.close_peers()
        memory.free()
