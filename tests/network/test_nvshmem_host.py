"""NVSHMEM is set up by the first buffer of a process and ended with the last, whatever fails in between.

nvshmem4py is a stand-in; ranks are threads, each of which has what a process has.
"""

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

from fake_nvshmem import MODULE, FakeComm, FakeGroup, FakeNvshmem

from nbep.device.network.nvshmem import NvshmemNetwork
from nbep.device.network.nvshmem_library import NvshmemMissing
from nbep.host.ranks.comm import CommGroup, InProcessComm
from nbep.host.target.memory import WantedMemory
from nbep.host.transport import create_transport, nvshmem
from nbep.host.transport.base import NetworkOptions, NicOptions
from nbep.host.transport.nvshmem import Library, NvshmemTransport

NUM_BYTES = 256
NUM_KERNELS = len(nvshmem.kernels_over_nvshmem())
SUCCESS = nvshmem.cu.CUresult.CUDA_SUCCESS


class ThreadsProcess(threading.local):
    """What a process knows of NVSHMEM; each thread stands for one."""

    world = None
    broken = ""


class Ranks:
    """Runs a function on all ranks, each in its own thread, the same one every time."""

    def __init__(self, machine, monkeypatch):
        self.machine = machine
        self.num_ranks = machine.num_ranks
        self.group = FakeGroup(self.num_ranks)
        self._local = threading.local()
        self._pools = [ThreadPoolExecutor(1) for _ in range(self.num_ranks)]
        self.broken_context = set()  # ranks
        self.num_gpus = self.num_ranks
        monkeypatch.setattr(nvshmem, "_process", ThreadsProcess())
        monkeypatch.setattr(nvshmem, "load_library", lambda: Library(self.nvshmem, self.nvshmem, "GPU {}".format))
        for name in ("cuMemsetD8", "cuMemcpyHtoD", "cuStreamSynchronize", "cuCtxSynchronize"):
            monkeypatch.setattr(nvshmem.cu, name, getattr(self, name))
        monkeypatch.setattr(nvshmem.cu, "cuGetErrorString", lambda code: (SUCCESS, b"the stand-in says so"))

    @property
    def nvshmem(self):
        return self._local.nvshmem

    @property
    def rank(self):
        return self._local.rank

    def cuMemsetD8(self, address, value, num_bytes):  # noqa: N802
        ctypes.memset(address, value, num_bytes)
        return (SUCCESS,)

    def cuMemcpyHtoD(self, address, source, num_bytes):  # noqa: N802
        ctypes.memmove(address, source, num_bytes)
        return (SUCCESS,)

    def cuStreamSynchronize(self, stream):  # noqa: N802
        return (SUCCESS,)

    def cuCtxSynchronize(self):  # noqa: N802
        return (nvshmem.cu.CUresult.CUDA_ERROR_LAUNCH_FAILED if self.rank in self.broken_context else SUCCESS,)

    def runtime(self, rank):
        """What a rank's runtime has, as far as NVSHMEM needs it."""
        kernels = []
        device = SimpleNamespace(make_current=lambda: None, ordinal=rank, bus_id=f"bus {rank % self.num_gpus}")
        return SimpleNamespace(
            target="cuda", device=device, load=kernels.append, module_of=lambda kernel: MODULE + kernels.index(kernel)
        )

    def start(self, function, *args):
        """The futures of function(runtime, comm, *args) on all ranks."""

        def run(rank):
            if not hasattr(self._local, "nvshmem"):
                self._local.rank, self._local.nvshmem = rank, self.machine.rank(rank)
            return function(self.runtime(rank), FakeComm(rank, self.group), *args)

        return [pool.submit(run, rank) for rank, pool in enumerate(self._pools)]

    def run(self, function, *args):
        return [future.result(120) for future in self.start(function, *args)]

    def errors(self, function, *args):
        """The errors on all ranks; the test fails if there is none on one."""
        found = [future.exception(120) for future in self.start(function, *args)]
        assert None not in found
        return found

    def calls(self, rank=0):
        """What has been called since the last time."""
        taken, self.machine.calls[rank][:] = list(self.machine.calls[rank]), []
        return taken


@pytest.fixture
def make_ranks(monkeypatch):
    for name in nvshmem.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return lambda num_ranks: Ranks(FakeNvshmem(num_ranks), monkeypatch)


def make(runtime, comm, num_nvl_peers=2, num_qps_per_rank=1, may_be_mapped=lambda rank, peer: True):
    return NvshmemTransport(runtime, comm, NUM_BYTES, num_nvl_peers, num_qps_per_rank, may_be_mapped)


def allocate(*args, **options):
    return make(*args, **options)._memory


def use(runtime, comm, *args):
    """A buffer's life; what NVSHMEM makes of it."""
    end = make(runtime, comm, *args)
    network = end.open(comm.allgather(end.handle), 64, None)
    end.end()
    return network


REGISTER = [f"cumodule_init {i}" for i in range(NUM_KERNELS)]
UNREGISTER = [f"cumodule_finalize {i}" for i in reversed(range(NUM_KERNELS))]


def life(rank, num_ranks):
    start = [f"init GPU {rank} {rank} {num_ranks}", *REGISTER, f"align 128 {NUM_BYTES}"]
    return [*start, "free", *UNREGISTER, "finalize"]


def test_calls_of_a_buffers_life_come_in_this_order(make_ranks):
    ranks = make_ranks(2)
    ranks.run(use)
    assert NUM_KERNELS >= 3
    assert [ranks.calls(rank) for rank in range(2)] == [life(0, 2), life(1, 2)]


def test_nvshmem_is_set_up_again_when_it_has_ended(make_ranks):
    ranks = make_ranks(2)
    for _ in range(3):
        ranks.run(use)
        assert ranks.calls() == life(0, 2)
    assert len(ranks.machine.worlds) == 3, "a name is used once"


def test_two_buffers_share_one_world(make_ranks):
    ranks = make_ranks(2)
    first = ranks.run(allocate)
    ranks.calls()
    second = ranks.run(allocate)
    assert ranks.calls() == [f"align 128 {NUM_BYTES}"]
    assert {memory.address for memory in first}.isdisjoint(memory.address for memory in second)
    ranks.run(lambda runtime, comm: first[comm.rank].free())
    assert ranks.calls() == ["free"]
    ranks.run(lambda runtime, comm: second[comm.rank].free())
    assert ranks.calls() == ["free", *UNREGISTER, "finalize"]


def test_memory_is_zeros_at_first_and_is_written(make_ranks):
    def main(runtime, comm):
        memory = allocate(runtime, comm)
        before = ctypes.string_at(memory.address, NUM_BYTES)
        memory.write(8, np.array([comm.rank + 5], np.int32))
        after = ctypes.string_at(memory.address, NUM_BYTES)
        memory.free()
        return before, after

    for rank, (before, after) in enumerate(make_ranks(2).run(main)):
        assert before == bytes(NUM_BYTES)
        assert after == bytes(8) + bytes([rank + 5]) + bytes(NUM_BYTES - 9)


def table_of(runtime, comm, may_be_mapped=lambda rank, peer: True):
    """A buffer's life, as NodeMemory has it; the network, its table, and where this process has all buffers."""
    end = make(runtime, comm, may_be_mapped=may_be_mapped)
    memory = end.allocate(comm, WantedMemory(NUM_BYTES, "buffer", str, "ipc", False))
    network = end.open(comm.allgather(end.handle), 64, None)
    table = np.frombuffer(ctypes.string_at(memory.address + 64, 8 * comm.size), np.int64).tolist()
    addresses = comm.allgather(memory.address)
    assert (network.buffer_ptrs, network.rank, network.num_ranks) == (memory.address + 64, comm.rank, comm.size)
    assert type(network) is end.network_type is NvshmemNetwork
    end.close()
    memory.free()
    end.end()
    return network, table, addresses


def test_kernels_reach_mapped_peers_directly(make_ranks):
    for network, table, addresses in make_ranks(4).run(table_of):
        assert table == addresses
        assert network.num_remote == 0


def test_kernels_reach_peers_that_are_not_mapped_by_nvshmems_calls(make_ranks):
    ranks = make_ranks(4)
    ranks.machine.unmapped = {(rank, pe) for rank in range(4) for pe in range(4) if rank // 2 != pe // 2}
    for rank, (network, table, addresses) in enumerate(ranks.run(table_of)):
        assert table == [a if peer // 2 == rank // 2 else 0 for peer, a in enumerate(addresses)]
        assert network.num_remote == 2


def test_mapped_peers_that_kernels_may_not_store_to_are_reached_by_nvshmems_calls(make_ranks):
    """As without NVLink. A rank's own memory is its own."""
    for rank, (network, table, addresses) in enumerate(make_ranks(4).run(table_of, lambda rank, peer: False)):
        assert table == [a if peer == rank else 0 for peer, a in enumerate(addresses)]
        assert network.num_remote == 3


def test_peers_of_other_nodes_are_reached_by_nvshmems_calls_though_they_are_mapped(make_ranks):
    found = make_ranks(4).run(table_of, lambda rank, peer: rank // 2 == peer // 2)
    assert [[at != 0 for at in table] for _, table, _ in found] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]


def test_memory_is_given_back_once(make_ranks):
    """A buffer whose construction fails ends its transport, whether or not the memory was in use by then."""
    ranks = make_ranks(2)
    ranks.run(table_of)
    assert [ranks.calls(rank).count("free") for rank in range(2)] == [1, 1]


def test_ranks_of_several_nodes_have_one_world(make_ranks):
    ranks = make_ranks(4)
    ranks.run(use)
    for rank in range(4):
        assert ranks.calls(rank) == life(rank, 4)


def test_no_room_on_the_heap_ends_nvshmem_and_the_next_buffer_starts_it_again(make_ranks):
    ranks = make_ranks(2)
    ranks.machine.no_room = True
    for error in ranks.errors(allocate):
        assert isinstance(error, RuntimeError)
        assert f"nvshmem_align of {NUM_BYTES} bytes: the symmetric heap has no room" in str(error)
    assert ranks.calls()[-1] == "finalize"
    ranks.machine.no_room = False
    ranks.run(use)


def test_a_failed_allocation_leaves_the_other_buffer_alone(make_ranks):
    ranks = make_ranks(2)
    first = ranks.run(allocate)
    ranks.machine.no_room = True
    ranks.errors(allocate)
    ranks.calls()
    ranks.run(lambda runtime, comm: first[comm.rank].free())
    assert ranks.calls() == ["free", *UNREGISTER, "finalize"]


def test_a_failure_on_the_way_ends_nvshmem_and_the_next_buffer_starts_it_again(make_ranks):
    ranks = make_ranks(4)
    ranks.machine.fails = {(rank, "cumodule_init"): RuntimeError("no symbol") for rank in range(4)}
    for error in ranks.errors(allocate):
        assert "ranks 0, 1, 2, 3: no symbol" in str(error)
    assert ranks.calls()[-1] == "finalize"
    ranks.machine.fails = {}
    ranks.run(use)


def test_a_module_that_one_rank_cannot_register_fails_on_all(make_ranks):
    ranks = make_ranks(2)
    ranks.machine.fails[1, "cumodule_init"] = RuntimeError("no symbol")
    assert [str(error) for error in ranks.errors(allocate)] == ["rank 1: no symbol"] * 2
    ranks.machine.fails = {}
    ranks.run(use)


def test_what_one_rank_lacks_fails_on_all_before_nvshmem_starts(make_ranks, monkeypatch):
    ranks = make_ranks(2)
    load = nvshmem.load_library

    def load_on_rank_0():
        if ranks.rank == 1:
            raise NvshmemMissing("nvshmem4py is not installed")
        return load()

    monkeypatch.setattr(nvshmem, "load_library", load_on_rank_0)
    for error in ranks.errors(allocate):
        assert "rank 1: transport='nvshmem': nvshmem4py is not installed: pip install '.[nvshmem]'" in str(error)
    assert ranks.machine.worlds == {}
    monkeypatch.setattr(nvshmem, "load_library", load)
    ranks.run(use)


def test_a_start_that_fails_makes_the_process_useless_for_nvshmem(make_ranks):
    ranks = make_ranks(2)
    ranks.machine.fails = {(rank, "init"): RuntimeError("no bootstrap") for rank in range(2)}
    ranks.errors(allocate)
    ranks.machine.fails = {}
    ranks.calls()
    for error in ranks.errors(allocate):
        assert "NVSHMEM cannot be used in this process any more: it did not start on all ranks" in str(error)
        assert "no bootstrap" in str(error)
    assert ranks.calls() == []


def test_an_end_that_fails_makes_the_process_useless_for_nvshmem(make_ranks):
    ranks = make_ranks(2)
    ranks.machine.fails = {(rank, "finalize"): RuntimeError("no end") for rank in range(2)}
    assert [str(error) for error in ranks.errors(use)] == ["no end"] * 2
    for error in ranks.errors(allocate):
        assert "any more: it did not end: no end" in str(error)


def test_nvshmem_is_not_asked_to_end_when_the_work_of_a_gpu_has_failed(make_ranks):
    """Its nvshmem_finalize ends the process when the device has an error."""
    ranks = make_ranks(2)
    memories = ranks.run(allocate)
    ranks.calls()
    ranks.broken_context = {1}
    for error in ranks.errors(lambda runtime, comm: memories[comm.rank].free()):
        assert "rank 1: cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED" in str(error)
    assert ranks.calls() == []
    for error in ranks.errors(allocate):
        assert "any more: the work of a GPU failed" in str(error)


def test_another_order_of_ranks_is_refused_while_nvshmem_runs(make_ranks):
    ranks, turned = make_ranks(2), FakeGroup(2)
    memories = ranks.run(allocate)
    for error in ranks.errors(lambda runtime, comm: allocate(runtime, FakeComm(1 - comm.rank, turned))):
        assert "destroy their buffers first" in str(error)
    ranks.run(lambda runtime, comm: memories[comm.rank].free())
    ranks.run(use)


def test_other_ranks_are_refused_while_nvshmem_runs(make_ranks):
    """Ranks 0 and 1 have a world of two; then all four want one."""
    ranks = make_ranks(4)
    pair = FakeGroup(2)

    def of_two(runtime, comm):
        return allocate(runtime, FakeComm(comm.rank, pair)) if comm.rank < 2 else None

    memories = ranks.run(of_two)
    for error in ranks.errors(allocate):
        assert "NVSHMEM runs in some of these processes for other ranks; destroy their buffers first" in str(error)
    ranks.run(lambda runtime, comm: memories[comm.rank].free() if comm.rank < 2 else None)
    ranks.run(use)


def test_some_of_the_ranks_are_refused_while_nvshmem_runs_for_all(make_ranks):
    ranks, pair = make_ranks(4), FakeGroup(2)
    memories = ranks.run(allocate)

    def of_two(runtime, comm):
        if comm.rank < 2:
            with pytest.raises(RuntimeError, match="destroy their buffers first"):
                allocate(runtime, FakeComm(comm.rank, pair))

    ranks.run(of_two)
    ranks.run(lambda runtime, comm: memories[comm.rank].free())


def test_the_emulator_has_no_nvshmem(make_ranks):
    def on_emulator(runtime, comm):
        return allocate(SimpleNamespace(target="emulator"), comm)

    for error in make_ranks(2).errors(on_emulator):
        assert isinstance(error, ValueError)
        assert "NVSHMEM needs GPUs" in str(error)


def test_ranks_that_share_a_process_are_refused(make_ranks, monkeypatch):
    ranks = make_ranks(1)

    def virtual(runtime, comm):
        monkeypatch.setattr(InProcessComm, "meet", lambda self, where, value: [value] * 2)
        return allocate(runtime, InProcessComm(CommGroup([0, 1]), 0, runtime))

    (error,) = ranks.errors(virtual)
    assert isinstance(error, ValueError)
    assert "one process a rank: mpiexec" in str(error)


def test_ranks_that_share_a_gpu_are_refused(make_ranks):
    ranks = make_ranks(4)
    ranks.num_gpus = 2
    for error in ranks.errors(allocate):
        assert isinstance(error, ValueError)
        assert "transport: got 'nvshmem' for ranks 0 and 2, which share GPU bus 0; must be another" in str(error)
    assert ranks.machine.worlds == {}


def test_nodes_of_different_size_are_refused(make_ranks):
    for error in make_ranks(3).errors(allocate):
        assert "num_nvl_peers: got 2; must be a divisor of the 3 ranks" in str(error)


def test_settings_of_the_user_stay(make_ranks, monkeypatch):
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "256")
    make_ranks(1).run(use)
    assert os.environ["NVSHMEM_QP_DEPTH"] == "256"
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"


@pytest.mark.parametrize("has_nic", [False, True])
def test_ibgda_is_asked_for_where_there_is_an_mlx5_nic(make_ranks, monkeypatch, tmp_path, has_nic):
    if has_nic:
        (tmp_path / "mlx5_0").mkdir()
    for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_IBGDA_NUM_RC_PER_PE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(nvshmem, "INFINIBAND", tmp_path)
    make_ranks(1).run(lambda runtime, comm: allocate(runtime, comm, num_qps_per_rank=12).free())
    assert os.environ.get("NVSHMEM_IB_ENABLE_IBGDA") == ("1" if has_nic else None)
    assert os.environ.get("NVSHMEM_IBGDA_NUM_RC_PER_PE") == ("12" if has_nic else None)


def test_a_refused_module_says_what_may_be_wrong(make_ranks, monkeypatch):
    bindings = SimpleNamespace(cumodule_init=lambda module: 7)
    with pytest.raises(RuntimeError, match=r"nvshmemx_cumodule_init: status 7; does NVSHMEM run"):
        Library(None, bindings, None).register(1)


@pytest.mark.parametrize(("transport", "nic"), [("nvshmem", NicOptions()), ("ibgda", "nvshmem")])
def test_only_nvshmem_posts_to_the_queue_pairs_of_nvshmem(make_ranks, transport, nic):
    """Create, calls, free, the next allocation, finalize: its collectives post where it believes the head to be."""
    ranks = make_ranks(2)

    def live(runtime, comm):
        options = NetworkOptions.check(transport, 1, 1, True, nic, comm.size)
        other = allocate(runtime, comm, 1)
        for _ in range(2):
            network = create_transport(runtime, comm, options, NUM_BYTES, "ipc")
            if network.network_type is NvshmemNetwork:
                ranks.nvshmem.post()
            else:  # kernels that write into the queue keep a head of their own, which begins with NVSHMEM's
                ranks.nvshmem.queue_pair.post(ranks.nvshmem.head)
            network.end()
        other.free()
        return ranks.nvshmem.head, ranks.nvshmem.queue_pair.num_served

    if nic == "nvshmem":
        for error in ranks.errors(live):
            assert isinstance(error, ValueError), error
            assert 'transport="nvshmem"' in str(error)
        assert ranks.calls() == []
    else:
        assert ranks.run(live) == [(9, 9)] * ranks.num_ranks  # 3 allocations, 2 calls, 3 times free, finalize
