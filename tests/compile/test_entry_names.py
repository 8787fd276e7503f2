"""What nbep's kernels are called in machine code, and so in profilers."""

import ctypes

import pytest

from nbep.device.compile import load_kernels
from nbep.device.jit import kernel, spec_of
from nbep.device.types import Out


def demangle(name):
    """What a profiler makes of a name."""
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        pytest.skip("needs the C++ library")
    function.restype = ctypes.c_char_p  # a few bytes that are never freed
    status = ctypes.c_int()
    shown = function(name.encode(), None, None, ctypes.byref(status))
    assert status.value == 0
    return shown.decode()


def test_a_profiler_shows_folder_and_name_of_nbeps_kernels():
    specs = load_kernels()
    shown = {name: demangle(spec.entry_name) for name, spec in specs.items()}
    assert shown == {name: f"{spec.full_name}()" for name, spec in specs.items()}
    assert shown["low_latency_dispatch"] == "nbep::low_latency::dispatch()"
    assert shown["internode_cached_notify"] == "nbep::internode::cached_notify()"
    assert shown["dispatch"] == "nbep::intranode::dispatch()"
    assert shown["get_dispatch_layout"] == "nbep::get_dispatch_layout()"
    assert shown["software_nic"] == "nbep::network::software_nic()"
    assert len(set(shown.values())) == len(shown)


@pytest.mark.parametrize("word", ["dispatch", "combine"])
def test_one_kernel_of_low_latency_has_the_word_in_its_name_for_which_deepeps_test_looks(word):
    """With deduplicate, too: a variant has the name of its kernel."""
    names = [spec.full_name for spec in load_kernels().values() if "::low_latency::" in spec.full_name]
    assert [name for name in names if word in name] == [f"nbep::low_latency::{word}"]


def test_a_kernel_from_elsewhere_keeps_its_own_name():
    @kernel()
    def mine(out: Out):
        pass

    assert spec_of(mine).entry_name == spec_of(mine).full_name == "mine"


@pytest.mark.compile
def test_the_entry_in_the_ptx_has_that_name():
    from nbep.device.compile import compile_kernel

    compiled = compile_kernel("query_mask_buffer")
    assert compiled.name == "query_mask_buffer"
    assert f".visible .entry {compiled.entry_name}(" in compiled.ptx
    assert compiled.entry_name.encode() in compiled.cubin
    assert compiled.entry_name == "_ZN4nbep11low_latency17query_mask_bufferEv"
