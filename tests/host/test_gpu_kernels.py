"""Which kernels a GPU's runtime loads, and when; without a GPU, and with a compiler and a driver that only count."""

import os
import sys
from types import SimpleNamespace

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
import no_gpu

from nbep.device import cache
from nbep.device.cards import has_bulk_copies, max_smem_bytes
from nbep.device.compile import CompileError, for_host_memory, load_kernels
from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.combine import combine_smem_bytes
from nbep.device.layout.low_latency import shape_of
from nbep.device.primitives import st_weak_s32
from nbep.device.protocols.peers import Bounds, HostPeers
from nbep.device.types import Out
from nbep.host.block_sizes import low_latency_threads
from nbep.host.config import Sizes
from nbep.host.node import NodeMemory
from nbep.host.target.cuda import launcher
from nbep.host.target.cuda import runtime as cuda_runtime
from nbep.host.target.cuda.runtime import CudaRuntime, SharedDevice
from nbep.host.transport import mapped_transport
from nbep.host.transport.base import NetworkOptions, NicOptions


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that were compiled so far; `broken` does not compile."""
    names = []

    def load_cubin(spec, cc, key):
        names.append(spec.name)
        if spec.name == "broken":
            raise CompileError("broken")
        return spec.name.encode()

    device = SimpleNamespace(compute_capability=(9, 0), ordinal=0, num_sms=132, make_current=lambda: None)
    device.max_smem_bytes = 227 << 10
    monkeypatch.setattr(cuda_runtime, "Device", lambda ordinal: device)
    monkeypatch.setattr(launcher, "load_cubin", load_cubin)
    success = launcher.cu.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(launcher.cu, "cuModuleLoadData", lambda cubin: (success, cubin))
    monkeypatch.setattr(launcher.cu, "cuModuleGetFunction", lambda module, name: (success, (module, name)))
    return names


def define(name="mine"):
    def mine(out: Out):
        st_weak_s32(out, 1)

    mine.__name__ = name
    return kernel()(mine)


def test_a_runtime_loads_nbeps_kernels_and_no_other(compiled):
    define()
    SharedDevice(0)
    assert sorted(compiled) == sorted(load_kernels())


def test_a_users_kernel_is_compiled_once_for_all_ranks_of_the_card(compiled):
    shared = SharedDevice(0, num_ranks=2)
    own, ranks = len(compiled), [CudaRuntime(shared, rank) for rank in range(2)]
    mine = define()
    for runtime in ranks * 2:
        runtime.load(mine)
    assert compiled[own:] == ["mine"]
    blocks = [runtime._kernels[mine].block for runtime in ranks]
    assert blocks[0] is not blocks[1], "each rank packs its own parameters"


def test_a_kernel_that_is_defined_again_is_another_one(compiled):
    runtime = CudaRuntime(SharedDevice(0), 0)
    own = len(compiled)
    for _ in range(2):
        runtime.load(define())
    runtime.load(define("push"))
    assert compiled[own:] == ["mine", "mine", "push"]
    nbeps = load_kernels()["push"]
    assert runtime._kernels[nbeps.function].spec is nbeps


def test_a_kernel_that_does_not_compile_leaves_the_others_alone(compiled):
    broken = define("broken")
    runtime = CudaRuntime(SharedDevice(0), 0)
    for _ in range(2):
        with pytest.raises(CompileError):
            runtime.load(broken)
    runtime.load(define())


def test_what_is_no_kernel_is_not_loaded(compiled):
    runtime = CudaRuntime(SharedDevice(0), 0)
    with pytest.raises(TypeError, match="test_what_is_no_kernel_is_not_loaded is no kernel"):
        runtime.load(test_what_is_no_kernel_is_not_loaded)


def test_arguments_of_a_users_kernel_are_checked_and_those_of_nbeps_are_not(compiled, monkeypatch):
    launched = []

    def launch_kernel(config, function, parameters, extra):
        launched.append((function[0].decode(), config.gridDimX, config.blockDimX))
        return (launcher.cu.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(launcher.cu, "cuLaunchKernelEx", launch_kernel)
    runtime = CudaRuntime(SharedDevice(0), 0)
    stream = cuda_runtime.CudaStream(0, "stream", 0)
    mine = define()
    runtime.launch(stream, mine, 3, 32, 0, 1 << 40)
    assert launched == [("mine", 3, 32)]
    assert int.from_bytes(runtime._kernels[mine].block._bytes.raw[:8], sys.byteorder) == 1 << 40
    with pytest.raises(TypeError, match="mine takes 1 argument; got 2 arguments"):
        runtime.launch(stream, mine, 3, 32, 0, 0, 0)
    with pytest.raises(ValueError, match="mine, out: got list; must be an array of torch, CuPy or Numba"):
        runtime.launch(stream, mine, 3, 32, 0, [0])
    with pytest.raises(TypeError, match="is no kernel"):
        runtime.launch(stream, launch_kernel, 3, 32, 0)

    own = load_kernels()["get_dispatch_layout"]
    monkeypatch.setattr(cuda_runtime, "check_launch", None)
    runtime.launch(stream, own.function, 1, 256, 0, *range(len(own.params)))
    assert launched[1:] == [("get_dispatch_layout", 1, 256)]


def test_a_kernel_with_bounds_spins_whatever_they_are_called(compiled):
    @kernel()
    def waits(out: Out, limits: Bounds):
        """Only its parameters matter."""

    shared = SharedDevice(0)
    assert shared.load(waits).spins
    assert not shared.load(define()).spins


COOPERATIVE, CLUSTER_DIMENSION = "COOPERATIVE", "CLUSTER_DIMENSION"


@pytest.fixture
def launched(compiled, monkeypatch):
    """The attributes of the launches so far. An SM holds one block; 128 of the 132 SMs can take clusters."""
    configs = []

    def launch_kernel(config, function, parameters, extra):
        attributes = {}
        for attribute in config.attrs[: config.numAttrs]:
            name = attribute.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_")
            attributes[name] = attribute.value.cooperative if name == COOPERATIVE else attribute.value.clusterDim.x
        configs.append(attributes)
        return (launcher.cu.CUresult.CUDA_SUCCESS,)

    def max_clusters(function, config):
        sizes = [attribute.value.clusterDim.x for attribute in config.attrs if CLUSTER_DIMENSION in attribute.id.name]
        return launcher.cu.CUresult.CUDA_SUCCESS, 128 // sizes[0]

    success = launcher.cu.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(launcher.cu, "cuLaunchKernelEx", launch_kernel)
    monkeypatch.setattr(launcher.cu, "cuOccupancyMaxActiveClusters", max_clusters)
    monkeypatch.setattr(launcher.cu, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *_: (success, 1))
    return configs


def launch_kinds(num_ranks=1, compute_capability=(9, 0)):
    """Launch kernels that want clusters, one that spins and one that does not, with a grid."""

    @kernel(clusters=(4, 5, 2))
    def spins(bounds: Bounds):
        """Only its parameters matter."""

    @kernel(clusters=(4, 5, 2))
    def ends(out: Out):
        """Likewise."""

    shared = SharedDevice(0, num_ranks)
    shared._card = shared._card._replace(compute_capability=compute_capability)
    runtime = CudaRuntime(shared, 0)
    stream = cuda_runtime.CudaStream(0, "stream", 0)

    def launch(grid):
        runtime.launch(stream, spins, grid, 32, 0, Bounds(0, 0, 0))
        runtime.launch(stream, ends, grid, 32, 0, 0)

    return launch


@pytest.mark.parametrize(("grid", "cluster"), [(16, 4), (128, 4), (20, 4), (10, 5), (18, 2), (132, 1), (9, 1), (1, 1)])
def test_blocks_are_launched_in_the_first_clusters_that_divide_the_grid_and_fit(launched, grid, cluster):
    launch_kinds()(grid)
    clusters = {} if cluster == 1 else {CLUSTER_DIMENSION: cluster}
    assert launched[0] == {COOPERATIVE: 1, **clusters}
    assert launched[1] == ({CLUSTER_DIMENSION: 4} if grid % 4 == 0 else clusters), "it need not fit at once"


def test_a_kernel_runs_without_clusters_where_the_card_can_place_none(launched, monkeypatch):
    success = launcher.cu.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(launcher.cu, "cuOccupancyMaxActiveClusters", lambda *_: (success, 0))
    launch_kinds()(16)
    assert launched == [{COOPERATIVE: 1}, {}]


def test_there_are_no_clusters_before_sm_90(launched):
    launch_kinds(compute_capability=(8, 0))(16)
    assert launched == [{COOPERATIVE: 1}, {}]


def test_all_ranks_of_a_card_must_fit_at_once(launched):
    launch = launch_kinds(num_ranks=8)
    launch(16)
    with pytest.raises(ValueError, match=r"spins, grid: 17 .*at most 16 blocks fit on a card of 132 SMs that 8 ranks"):
        launch(17)


def test_a_cluster_is_one_that_every_card_can_place():
    with pytest.raises(ValueError, match=r"clusters: got \(4, 16\); must be sizes of 2 to 8 blocks"):
        kernel(clusters=(4, 16))


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_cache_that_cannot_be_written_gets_no_half_files(step, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path))
    compiled = SimpleNamespace(cubin=b"machine code")
    monkeypatch.setattr("nbep.device.compile.compile_kernel", lambda spec, cc: compiled)
    if step == "replace":
        monkeypatch.setattr(cache.Path, "replace", fail)
    else:
        monkeypatch.setattr(cache.os, "fdopen", lambda handle, mode: os.close(handle) or fail())
    assert launcher.load_cubin(load_kernels()["push"], (9, 0), "key") == b"machine code"
    assert list(tmp_path.iterdir()) == []


def test_kernels_for_memory_of_the_host_are_loaded_before_one_of_them_waits(monkeypatch):
    fake_gpu.install(monkeypatch)
    runtime = CudaRuntime(SharedDevice(0), 0)
    runtime.device.bus_id = ""
    loaded = set(runtime._kernels)
    options = NetworkOptions.check("direct", fake_gpu.NUM_RANKS, 1, True, NicOptions(), fake_gpu.NUM_RANKS)
    ends = [mapped_transport(runtime, 0, options, "host") for _ in range(2)]
    sizes = Sizes(1 << 20, "host", num_rdma_bytes=1 << 20, low_latency_mode=True)
    memory = NodeMemory(no_gpu.SameOnAll(fake_gpu.NUM_RANKS), runtime, sizes, 1000.0, ends[0], rdma_transport=ends[1])
    new = {kernel.kernel_spec.label for kernel in runtime._kernels.keys() - loaded}
    assert new == {*for_host_memory(), "update_mask_buffer-HostNetwork"}
    assert type(memory.peers) is HostPeers


CARDS = [((7, 5), 7 * 32), ((8, 0), 384), ((8, 6), 384), ((12, 0), 384), ((9, 0), 512)]


@pytest.mark.parametrize(("cc", "threads"), CARDS)
def test_blocks_of_low_latency_combine_fit_into_the_cards_shared_memory(cc, threads):
    assert low_latency_threads(has_bulk_copies(cc), max_smem_bytes(cc))[1] == threads
    shape = shape_of(8, 288, 128, 7168, 8, 0, 1, 0)
    assert combine_smem_bytes(shape, threads) <= max_smem_bytes(cc)
