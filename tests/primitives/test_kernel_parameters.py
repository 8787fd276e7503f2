"""Kernel signatures flatten to the leaves that CUDA packs and the emulator maps."""

import functools
import struct
from typing import NamedTuple

import pytest

from nbep.device import jit
from nbep.device.compile import load_kernels
from nbep.device.jit import KERNELS, kernel, spec_of
from nbep.device.types import (
    F32,
    I32,
    I64,
    In,
    InOut,
    Out,
    Sym,
    flatten_args,
    flatten_params,
    param_format,
    unflatten_args,
)


class Arrays(NamedTuple):
    recv_x: Out
    num_tokens: I32
    num_bytes: I64
    x: In


def signature(arrays: Arrays, buffers: Sym, scale: F32, count: InOut):
    """Only its parameters matter."""


def test_leaves_come_in_order_with_dotted_names():
    leaves = [(param.path, param.type.role) for param in flatten_params(signature)]
    assert leaves == [
        ("arrays.recv_x", "out"),
        ("arrays.num_tokens", "i32"),
        ("arrays.num_bytes", "i64"),
        ("arrays.x", "in"),
        ("buffers", "sym"),
        ("scale", "f32"),
        ("count", "inout"),
    ]


def test_addresses_know_whether_the_kernel_writes_them():
    writable = {param.path for param in flatten_params(signature) if param.type.is_writable}
    addresses = {param.path for param in flatten_params(signature) if param.type.is_address}
    assert addresses - writable == {"arrays.x"}
    assert writable <= addresses


def test_arguments_flatten_in_the_order_of_their_leaves_and_back():
    args = (Arrays(1, 2, 3, 4), 5, 6.0, 7)
    assert flatten_args(args) == [1, 2, 3, 4, 5, 6.0, 7]
    assert unflatten_args(signature, flatten_args(args)) == args


def test_parameter_block_aligns_each_leaf_to_its_size():
    params = flatten_params(signature)
    block = struct.pack(param_format(params), 1, 2, 3, 4, 5, 6.0, 7)
    # The int32 at 8 leaves 4 bytes unused, and so does the float32 at 40.
    assert struct.unpack_from("<q", block, 16) == (3,)
    assert struct.unpack_from("<f", block, 40) == (6.0,)
    assert struct.unpack_from("<q", block, 48) == (7,)
    assert len(block) == 56


def test_parameter_without_a_type_is_refused():
    def untyped(x: In, n):
        """Only its parameters matter."""

    def mistyped(x: In, n: int):
        """Only its parameters matter."""

    with pytest.raises(TypeError, match="untyped: parameters without a type: n"):
        flatten_params(untyped)
    with pytest.raises(TypeError, match="mistyped: n must be"):
        flatten_params(mistyped)


def test_a_named_tuple_in_another_is_refused():
    class Outer(NamedTuple):
        arrays: Arrays

    def nested(outer: Outer):
        """Only its parameters matter."""

    nested.__annotations__["outer"] = Outer
    with pytest.raises(TypeError, match=r"nested: outer\.arrays must be"):
        flatten_params(nested)


def test_kernel_stays_a_plain_function_that_knows_its_spec():
    @kernel(max_threads=64)
    def fill(out: Out, n: I32):
        return n

    assert fill(0, 5) == 5
    spec = spec_of(fill)
    assert (spec.name, spec.max_threads, spec.min_blocks) == ("fill", 64, 1)
    assert [param.path for param in spec.params] == ["out", "n"]
    assert not spec.is_own
    assert "fill" not in KERNELS


def test_kernels_of_one_name_are_different_kernels():
    def define(max_threads):
        @kernel(max_threads=max_threads)
        def push(out: Out):
            """Only its name matters: nbep has a kernel of this name."""

        return push

    first, again = define(32), define(64)
    assert (spec_of(first).max_threads, spec_of(again).max_threads) == (32, 64)
    own = load_kernels()["push"]
    assert own.is_own
    assert own.function not in (first, again)


def test_two_kernels_of_nbep_with_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(jit, "KERNELS", {})

    def define(module):
        def twice(out: Out):
            """Only its name matters."""

        twice.__module__ = module
        return kernel()(twice)

    define("nbep.device.kernels.one")
    again = define("nbep.device.kernels.one")
    assert jit.KERNELS["twice"].function is again
    with pytest.raises(ValueError, match=r"twice.*kernels\.one and nbep\.device\.kernels\.two"):
        define("nbep.device.kernels.two")


def test_what_is_no_kernel_says_how_to_make_one():
    def plain(out: Out):
        """Not decorated."""

    for function in (plain, functools.partial(spec_of)):
        with pytest.raises(TypeError, match=r"(plain|partial) is no kernel: decorate it with @kernel\(\)"):
            spec_of(function)
    with pytest.raises(TypeError, match=r"write @kernel\(\) .* with parentheses"):
        kernel(plain)


def test_a_function_that_wraps_a_kernel_is_none():
    @kernel()
    def fill(out: Out):
        """Only its name matters."""

    @functools.wraps(fill)
    def wrapped(out):
        """It has the attributes of the kernel."""

    with pytest.raises(TypeError, match="fill is no kernel"):
        spec_of(wrapped)
