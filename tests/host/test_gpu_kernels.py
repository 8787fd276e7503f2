"""Which kernels a GPU's runtime loads, and when; without a GPU, and with a compiler and a driver that only count."""

import sys
from types import SimpleNamespace

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

from nbep.device.compile import CompileError, load_kernels
from nbep.device.jit import kernel
from nbep.device.primitives import st_weak_s32
from nbep.device.protocols.peers import Bounds
from nbep.device.types import Out
from nbep.host.runtime.cuda import launcher
from nbep.host.runtime.cuda import runtime as cuda_runtime
from nbep.host.runtime.cuda.runtime import CudaRuntime, SharedDevice


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


def test_a_kernel_with_bounds_spins_whatever_they_are_called(compiled):
    @kernel()
    def waits(out: Out, limits: Bounds):
        """Only its parameters matter."""

    shared = SharedDevice(0)
    assert shared.load(waits).spins
    assert not shared.load(define()).spins
