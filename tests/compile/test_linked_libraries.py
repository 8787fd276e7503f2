"""A kernel whose network calls a library is linked with it, and with nothing else."""

import sys
from typing import NamedTuple

import pytest

from nbep.device import jit
from nbep.device.compile import CompileError, compile_kernel, compile_to_ptx, load_kernels
from nbep.device.jit import LinkInput, by_type, external, kernel, over, spec_of
from nbep.device.layout.low_latency import DeduplicatedShape, LowLatencyShape
from nbep.device.network import direct, provide
from nbep.device.network.seam import Network
from nbep.device.primitives import st_weak_s32, st_weak_s64
from nbep.device.types import I32, Out

pytestmark = pytest.mark.compile

LIBRARY = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .func (.param .b32 sum) add_and_double(.param .b64 a, .param .b32 b)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [a];
    ld.param.u32 %r1, [b];
    cvt.u32.u64 %r2, %rd0;
    add.s32 %r3, %r1, %r2;
    st.param.b32 [sum], %r3;
    ret;
}
.visible .func nothing()
{
    ret;
}
"""


class Far(NamedTuple):
    rank: I32


class Near(NamedTuple):
    rank: I32


@external("add_and_double", returns="s32", args=("s64", "s32"))
def add_and_double(a, b):
    return 2 * (a + b)


@external("nothing")
def nothing():
    """Returns nothing, and has no arguments."""


@by_type()
def ask(network, out):
    """Write something."""


def ask_far(network, out):
    nothing()
    st_weak_s32(out, add_and_double(1 << 20, network.rank))


def ask_near(network, out):
    st_weak_s64(out, 7)


ask.versions |= {Far: jit.device_function(ask_far), Near: jit.device_function(ask_near)}


@kernel()
def asks(out: Out, network: Near):
    ask(network, out)


@pytest.fixture
def linked(monkeypatch):
    """How often the library was asked for."""
    asked = []

    def libraries(cc):
        asked.append(cc)
        return [LinkInput("library.ptx", LIBRARY, is_archive=False)]

    monkeypatch.setitem(jit.LIBRARIES, Far, libraries)
    return asked


def test_a_kernel_is_linked_with_what_its_network_calls(linked):
    compiled = compile_kernel(over(asks, Far))
    assert linked == [(9, 0)]
    assert ".extern .func  (.param .b32 func_retval0) add_and_double" in compiled.ptx
    assert "nothing" in compiled.ptx
    assert compiled.report.spill_stores == 0


def test_a_kernel_over_another_network_is_linked_with_nothing(linked):
    compiled = compile_kernel(asks)
    assert linked == []
    assert ".extern .func" not in compiled.ptx


def test_a_function_that_no_library_has_is_named():
    with pytest.raises(CompileError, match="add_and_double"):
        compile_kernel(over(asks, Far))


def test_the_emulator_calls_the_python_body():
    assert add_and_double(3, 4) == 14


def test_a_transport_says_what_it_is_linked_with(monkeypatch):
    monkeypatch.setattr(direct, "libraries", lambda cc: [], raising=False)
    monkeypatch.delitem(jit.LIBRARIES, Network, raising=False)
    provide(Network, direct)
    assert spec_of(load_kernels()["low_latency_dispatch"].function).libraries is direct.libraries
    monkeypatch.delitem(jit.LIBRARIES, Network)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [LowLatencyShape, DeduplicatedShape])
def test_kernels_over_nvshmem_call_it_where_a_peer_is_not_mapped(shape):
    if sys.platform != "linux":
        pytest.skip("NVSHMEM is Linux's")
    from nbep.device.network.nvshmem import NvshmemNetwork

    kernel = over(load_kernels()["low_latency_dispatch"].function, shape, "shape")
    ptx = compile_to_ptx(over(kernel, NvshmemNetwork).kernel_spec, (9, 0))
    for name in ("nbep_nvshmem_put_nbi_warp", "nbep_nvshmem_quiet", "nbep_nvshmem_add"):
        assert f".extern .func {name}" in ptx
        assert f"{name}," in ptx, f"{name} is declared, but not called"
    assert "cp.async.bulk.global.shared" in ptx, "mapped peers get bulk copies"
