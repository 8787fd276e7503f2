"""Checks of a launch, the same on every target: what a GPU cannot run is refused on the emulator, too."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from nbep.device.by_type import HostNetwork, HostPeers
from nbep.device.compiler_hints import is_size
from nbep.device.jit import KernelSpec
from nbep.device.types import Param, flatten_args
from nbep.host.arguments import integer, refuse
from nbep.host.target.base import Runtime

MAX_GRID = (1 << 31) - 1
INTEGER_BITS = {"i": 32, "q": 64}


def check_launch(runtime: Runtime, spec: KernelSpec, grid: int, block: int, smem_bytes: int, args: tuple) -> list[Any]:
    """The leaves of the arguments: arrays and addresses as they are, None as 0, numbers of the parameters' types.

    Raises: TypeError if there are too few arguments or too many; ValueError, with the parameter's name, for a value
            that the parameter cannot take, an array with gaps, a read-only one that the kernel writes, a grid without
            blocks, a block of more than max_threads threads, or more shared memory than a GPU has
    """
    leaves = flatten_args(args)
    if (len(args), len(leaves)) != (len(spec.hints), len(spec.params)):
        raise TypeError(
            f"{spec.name} takes {_count(len(spec.hints), len(spec.params))}; got {_count(len(args), len(leaves))}: "
            f"its parameters are {', '.join(param.path for param in spec.params)}"
        )
    if not spec.is_own:
        # What says that memory is the host's is not taken for its like: that kernel would add to cells there.
        for (name, hint), value in zip(spec.hints.items(), args, strict=True):
            kind = type(value)
            if kind in (HostNetwork, HostPeers) and hint is not kind:
                made = f"over({spec.name}, {kind.__name__}, {name!r})"
                refuse(f"{spec.name}, {name}", kind.__name__, f"{hint.__name__}, or the kernel {made}")
    grid, block, smem_bytes = (
        integer(f"{spec.name}, {name}", value)
        for name, value in (("grid", grid), ("block", block), ("smem_bytes", smem_bytes))
    )
    if not 1 <= grid <= MAX_GRID:
        refuse(f"{spec.name}, grid", grid, f"1 to {MAX_GRID} blocks")
    if not 1 <= block <= spec.max_threads:
        refuse(f"{spec.name}, block", block, f"1 to {spec.max_threads} threads, its max_threads")
    if not 0 <= smem_bytes <= runtime.max_smem_bytes:
        refuse(f"{spec.name}, smem_bytes", smem_bytes, f"0 to {runtime.max_smem_bytes}, what a block can have")
    return [check_leaf(runtime, spec, param, value) for param, value in zip(spec.params, leaves, strict=True)]


def check_leaf(runtime: Runtime, spec: KernelSpec, param: Param, value: Any) -> Any:
    """One of them, as `check_launch`."""
    name = f"{spec.name}, {param.path}"
    if not param.type.is_address:
        number = _number(name, param, value)
        if spec.is_own and is_size(param) and number < 0:
            raise AssertionError(f"{name}: got {number}; the compiler takes it for a number that is not negative")
        return number
    if value is None:
        return 0
    view = runtime.view(value)
    if view.flaw:
        refuse(name, f"{type(value).__name__}{view.flaw}", f"{runtime.array_kinds}, with memory that torch gives out")
    if not view.is_array:
        try:
            return operator.index(value)
        except TypeError:
            refuse(name, type(value).__name__, f"{runtime.array_kinds}, an address (an int) or None")
    if param.type.is_writable and not view.is_writeable:
        refuse(name, "a read-only array", "writeable: the kernel writes it")
    # nbep's own kernels take the strides of scales; Buffer checks their arrays.
    if not spec.is_own and not view.is_contiguous:
        shape = ", ".join(map(str, value.shape))
        refuse(name, f"a strided array [{shape}]", "row-major without gaps: kernels know no strides")
    return value


def _number(name: str, param: Param, value: Any) -> Any:
    if param.type.code == "f":
        if not isinstance(value, (int, float, np.integer, np.floating)):
            refuse(name, type(value).__name__, "a number")
        return np.float32(value)
    bits = INTEGER_BITS[param.type.code]
    try:
        number = operator.index(value)
    except TypeError:
        refuse(name, f"{type(value).__name__} {value!r}", f"an integer of {bits} bits")
    if not -1 << (bits - 1) <= number < 1 << (bits - 1):
        refuse(name, number, f"an integer of {bits} bits, with sign")
    return number


def _count(num_args: int, num_leaves: int) -> str:
    fields = "" if num_args == num_leaves else f" with {num_leaves} values"
    return f"{num_args} argument{'s' * (num_args != 1)}{fields}"
