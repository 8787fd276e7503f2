"""Kernel signatures flatten to the leaves that CUDA packs and the emulator maps."""

import struct
from typing import NamedTuple

import pytest

from nbep.device import jit
from nbep.device.jit import KERNELS, kernel
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


def test_kernel_stays_a_plain_function_and_is_known_by_name(monkeypatch):
    monkeypatch.setattr(jit, "KERNELS", {})

    @kernel(max_threads=64)
    def fill(out: Out, n: I32):
        return n

    assert fill(0, 5) == 5
    spec = jit.KERNELS["fill"]
    assert (spec.name, spec.max_threads, spec.min_blocks) == ("fill", 64, 1)
    assert [param.path for param in spec.params] == ["out", "n"]
    assert "fill" not in KERNELS


def test_kernel_of_the_same_name_in_another_module_is_refused(monkeypatch):
    monkeypatch.setattr(jit, "KERNELS", {})

    def twice(out: Out):
        """Only its name matters."""

    kernel()(twice)
    kernel()(twice)

    def other(out: Out):
        """Only its name matters."""

    other.__name__, other.__module__ = "twice", "elsewhere"
    with pytest.raises(ValueError, match="elsewhere"):
        kernel()(other)
