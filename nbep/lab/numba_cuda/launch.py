"""What a launch does: its arguments come to the device, its threads find their arrays and who they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nbep.emulator.machine import errors
from nbep.emulator.machine.faults import error_at
from nbep.emulator.machine.thread import current_thread

from . import ops
from .arrays import KArray, Space, flag_type, names_of_elements
from .code import KernelTypeError
from .device import BlockState, Who
from .memory import DeviceNDArray, DeviceRecord, HostArray, as_device
from .session import Session
from .types import Num, Tup
from .unit import Unit

# What an H100 has; see "Compute Capabilities" in the CUDA C++ Programming Guide. How many registers a kernel takes is
# not known without machine code: on a GPU it may be fewer blocks that an SM holds.
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
NUM_SMS = 132
SHARED_BYTES = 48 << 10  # of a block: numba-cuda does not ask for more
OPT_IN_BYTES = 227 << 10  # its successor does
SM_WARPS, SM_BLOCKS, SM_SHARED_BYTES = 64, 32, 228 << 10
RESERVED_BYTES = 1 << 10  # of each block's shared memory


class Run:
    """One launch: what each of its threads calls, and what they have together."""

    def __init__(self, session: Session, unit: Unit, compiled: Any, configured: Any, keep: list, types: tuple):
        """keep: its arguments; arrays of the device live until the kernel is done"""
        self.session, self.unit, self.made, self.code = session, unit, compiled, compiled.run
        self.grid, self.block, self.dynamic = configured.griddim, configured.blockdim, configured.sharedmem
        self.keep, self.types = keep, types
        self.blocks: dict[int, BlockState] = {}
        self.constants: dict[int, KArray] = {}
        self.together: dict[Any, Any] = {}
        self.returned: dict[int, set[int]] = {}  # of blocks, the lines of `return` by which threads have left
        self.grid_cell: Any = None
        self.entry: int | None = None  # of its machine code, if it has some
        self.__name__ = compiled.name
        self.places, self.smem_bytes = places_of(unit.sites, self.dynamic)
        check_shared(compiled.name, places_of(unit.sites, 0)[1], self.dynamic, unit.successor)
        sms = session.options["num_sms"]
        self.most_blocks = (
            blocks_at_once(math.prod(self.block), self.smem_bytes, unit.successor) if sms is None else sms
        )
        self.num_warps = -(-math.prod(self.block) // 32) * math.prod(self.grid)

    def __call__(self, *args: Any) -> None:
        thread = current_thread()
        line = self.code(thread, Who(thread, self), *args)
        if line is not None:
            self.returned.setdefault(thread.block_idx, set()).add(line)
        if thread.block.live == 1:
            del self.blocks[thread.block.serial]

    def state_of(self, block: Any) -> BlockState:
        return self.blocks.setdefault(block.serial, BlockState())

    def describe_shared(self, offset: int) -> str:
        for site, begin in self.places.items():
            array = np.empty(site.shape, site.dtype)
            if begin <= offset < begin + array.nbytes:
                return (site.name or "shared array") + names_of_elements(array.shape, array.strides, begin)(offset)
        views = (site for site in self.unit.sites if site.shape in ((0,), None) and site.name)
        elements = " or ".join(f"{site.name}[{offset // site.dtype.itemsize}]" for site in views)
        byte = f"byte {offset} of dynamic shared memory"
        return f"{elements} ({byte})" if elements else byte

    def shared_array(self, thread: Any, site: Any, block: BlockState, sizes: tuple[int, ...]) -> KArray:
        """A block's array for one call of cuda.shared.array.

        Dynamic ones all lie at the same place; with the successor, each lies behind those of a size known at run time.
        """
        allocation = thread.block.shared
        space = Space(self.session.world, allocation, True, self.session.is_fast)
        if sizes:
            shape, begin = sizes, block.dynamic
            block.dynamic += math.prod(sizes) * site.dtype.itemsize
            if block.dynamic > self.dynamic:
                what = f"shared array of shape {sizes}: takes {block.dynamic} dynamic bytes"
                raise error_at(thread, errors.OutOfBounds, f"{what}; the launch has {self.dynamic}")
        elif site.shape == (0,):
            begin = block.dynamic
            shape = ((self.dynamic - begin) // site.dtype.itemsize,)
        else:
            shape, begin = site.shape, self.places[site]
        nd = np.ndarray(shape, site.dtype, allocation.memory if allocation.nbytes else b"", begin)
        flags = None
        if allocation.shadow is not None:
            flags = np.ndarray(shape, flag_type(site.dtype), allocation.shadow if allocation.nbytes else b"", begin)
        return KArray(nd, flags, space, site.name or "shared array")

    def constant(self, array: np.ndarray, name: str) -> KArray:
        if id(array) not in self.constants:
            self.constants[id(array)] = KArray(array, None, Space(self.session.world, None), name, True)
        return self.constants[id(array)]

    def captured(self, value: Any) -> KArray:
        """An array of the device that is a global of the kernel."""
        return as_device(value).in_kernel(self.session, "captured array")


def places_of(sites: list[Any], dynamic: int) -> tuple[dict[Any, int], int]:
    """Where the arrays of a block begin in its shared memory, behind the dynamic part, and where it ends."""
    places, end = {}, dynamic
    for site in sites:
        if site.shape not in ((0,), None):
            align = max(site.alignment, 16)
            places[site] = -(-end // align) * align
            end = places[site] + math.prod(site.shape) * site.dtype.itemsize
    return places, end


def blocks_at_once(threads: int, shared_bytes: int, opts_in: bool) -> int:
    """How many blocks the card holds at once, that is also the most of a cooperative launch."""
    if shared_bytes > (OPT_IN_BYTES if opts_in else SHARED_BYTES):
        return 0
    by_shared = SM_SHARED_BYTES // (shared_bytes + RESERVED_BYTES)
    return NUM_SMS * min(SM_BLOCKS, SM_WARPS // -(-threads // 32), by_shared)


def check_shared(name: str, static: int, dynamic: int, opts_in: bool = False) -> None:
    """Raises: ValueError for dynamic shared memory that no launch can have; KernelTypeError for static"""
    if static > SHARED_BYTES:
        raise KernelTypeError(f"{name}: {static} bytes of static shared memory; there are {SHARED_BYTES}")
    most = (OPT_IN_BYTES if opts_in else SHARED_BYTES) - static
    if not 0 <= dynamic <= most:
        beside = f", beside {static} bytes of static shared memory" if static else ""
        raise ValueError(f"{name}: {dynamic} bytes of dynamic shared memory{beside}; must be 0 to {most}")


def prepare(value: Any, back: list[Callable[[], None]]) -> Any:
    """An argument as the device can have it: arrays of the host are copied there, and back when the kernel is done."""
    if isinstance(value, ArgHint):
        return value.prepare(back)
    if isinstance(value, DeviceNDArray):
        return value
    if isinstance(value, HostArray) and value._device is not None:
        return DeviceNDArray.of(value._device._memory, value.view(np.ndarray), None)
    if isinstance(value, np.ndarray):
        return copied(value, back, value.flags.writeable)
    if isinstance(value, np.void):
        device = copied(np.array([value], dtype=value.dtype), back, False)
        record = device._changed(lambda nd: nd[0, ...])
        back.append(lambda: _write_record(value, record))
        return DeviceRecord.of(record._memory, record._nd, record._flags)
    if isinstance(value, tuple):
        parts = [prepare(one, back) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if hasattr(value, "__cuda_array_interface__"):
        return as_device(value)
    return value


def _write_record(value: np.void, record: Any) -> None:
    there = record._nd[()]
    for name in value.dtype.names or ():
        value[name] = there[name]


def copied(value: np.ndarray, back: list[Callable[[], None]], returns: bool) -> DeviceNDArray:
    device = to_device(value)
    if not value.flags.writeable:
        device._nd.flags.writeable = False
    if returns:
        back.append(lambda: device._read_into(value))
    return device


def to_device(value: Any) -> DeviceNDArray:
    """A copy on the device, of the same layout."""
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"an array of type {array.dtype} cannot be on the device")
    if array.dtype == np.dtype("f2").newbyteorder():
        raise TypeError("the byte order of the array is not the device's")
    strides, order = None, "C"
    if array.size and not array.flags.c_contiguous:
        core = array[tuple(0 if stride == 0 else slice(None) for stride in array.strides)]  # of a broadcast array
        if array.flags.f_contiguous:
            order = "F"
        elif core.ndim < array.ndim and core.flags.c_contiguous:
            strides = array.strides
        else:
            raise ValueError(
                "Array contains non-contiguous buffer and cannot be transferred as a single memory region. Please "
                "ensure contiguous buffer with numpy .ascontiguousarray()"
            )
    device = DeviceNDArray.new(array.shape, array.dtype, order, strides, written=True)
    device._nd[...] = array
    return device


def in_kernel(value: Any, t: Any, session: Session, name: str) -> Any:
    """An argument as the kernel's code takes it."""
    if isinstance(value, DeviceNDArray):
        return value.in_kernel(session, name)
    if isinstance(t, Tup):
        pairs = enumerate(zip(value, t.items, strict=True))
        return tuple(in_kernel(one, of, session, f"{name}[{i}]") for i, (one, of) in pairs)
    if isinstance(t, Num):
        return ops.from_numpy(ops.to_numpy(value, t), t.dtype)
    return value


# --- In, Out and InOut: which way an array of the host is copied ------------------------------------------------------
class ArgHint:
    """What says which way an array goes; where nothing else is said, both."""

    def __init__(self, value: Any):
        self.value = value

    def prepare(self, back: list[Callable[[], None]]) -> Any:
        return copied(self.value, back, True)


def wrap_arg(value: Any, default: Any = None) -> ArgHint:
    """The hint of an argument: InOut if it has none."""
    return value if isinstance(value, ArgHint) else (default or InOut)(value)


class In(ArgHint):
    """An array that kernels read."""

    def prepare(self, back: list[Callable[[], None]]) -> Any:
        return copied(np.asarray(self.value), back, False)


class Out(ArgHint):
    """An array that kernels write: what was in it does not come to them."""

    def prepare(self, back: list[Callable[[], None]]) -> Any:
        order = "F" if self.value.flags.f_contiguous and not self.value.flags.c_contiguous else "C"
        device = DeviceNDArray.new(self.value.shape, self.value.dtype, order)
        back.append(lambda: device._read_into(self.value))
        return device


class InOut(ArgHint):
    """An array that goes both ways."""
