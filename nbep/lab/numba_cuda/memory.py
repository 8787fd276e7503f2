"""Memory of the device as the host sees it: DeviceNDArray, and arrays of the host that the device sees."""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nbep.emulator.machine.errors import DataRace
from nbep.emulator.machine.kinds import Views
from nbep.emulator.machine.memory import Allocation

from .arrays import KArray, Space, flag_type, names_of_elements
from .session import Session, Stream, current, stream_of
from .types import BF16, dtype_of

POISON = 0xCB  # what the host sees where nothing was written


class Memory:
    """Bytes of the device. shadow: a flag for each byte that somebody has written; None if all are."""

    def __init__(self, nbytes: int, written: bool, buffer: Any = None):
        self.buffer = np.zeros(max(nbytes, 1), np.uint8) if buffer is None else buffer
        self.nbytes = nbytes
        self.shadow = None if written else bytearray(nbytes)
        if not written:
            self.buffer[:] = POISON
        self.session: Session | None = None
        self.allocation: Any = None
        self.describe: Any = None

    def in_session(self, session: Session, name: str) -> Allocation:
        """Its allocation in the world that runs now."""
        if self.session is not session:
            bytes_there: Any = memoryview(self.buffer)[: self.nbytes]  # type: ignore[arg-type]
            number = session.space.new_number()
            allocation = Allocation(0, name, bytes_there, number, describe=self.describe)
            if self.shadow is not None:
                allocation.shadow = self.shadow
                allocation.loads = Views(bytes_there, self.shadow, storing=False)
                allocation.stores = Views(bytes_there, self.shadow, storing=True)
            session.space.segments[number] = allocation
            self.allocation, self.session = allocation, session
            weakref.finalize(self, session.space.segments.pop, number, None)
        self.allocation.name = name
        return self.allocation

    def views(self, shape: Any, dtype: np.dtype, offset: int, strides: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """NumPy's view of an array that lies there, and of its flags."""
        nd = np.ndarray(shape, dtype, self.buffer, offset, strides)
        return nd, None if self.shadow is None else np.ndarray(shape, flag_type(dtype), self.shadow, offset, strides)

    def host_reads(self, begin: int, end: int) -> None:
        """The host is about to read bytes: with "checked" it must have waited for who has stored them."""
        self._of_host(begin, end, lambda cpu: cpu.read(self.allocation, begin, end - begin, False))

    def host_writes(self, begin: int, end: int) -> None:
        self._of_host(begin, end, lambda cpu: cpu.write(self.allocation, begin, end - begin))

    def _of_host(self, begin: int, end: int, access: Callable[[Any], Any]) -> None:
        if self.session is not None and self.session is current(create=False) and end > begin:
            self.session.is_mixed = bool(self.session.unseen)
            with self.session.guarded():
                access(self.session.world.cpu)


class Pointer:
    """Where the elements of an array of the device begin. offset: in bytes of its memory"""

    def __init__(self, array: DeviceNDArray):
        self._memory = array._memory
        self.device_pointer = array._nd.ctypes.data
        self.offset = self.device_pointer - array._memory.buffer.ctypes.data if array.size else 0
        self.size = array._memory.nbytes - self.offset

    def __int__(self) -> int:
        return int(self.device_pointer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pointer) and self.device_pointer == other.device_pointer

    def __hash__(self) -> int:
        return hash(self.device_pointer)


class DeviceNDArray:
    """An array in memory of the device."""

    __cuda_memory__ = True
    __cuda_ndarray__ = True

    def __init__(self, shape: Any, strides: Any, dtype: Any, stream: Any = 0, gpu_data: Pointer | None = None):
        shape, strides = shape_of(shape), shape_of(strides)
        if len(shape) != len(strides):
            raise ValueError("strides not match ndim")
        made = DeviceNDArray.new(shape, dtype, strides=strides)
        if gpu_data is not None and made.size:
            memory = gpu_data._memory
            made = DeviceNDArray.of(memory, *memory.views(shape, made.dtype, gpu_data.offset, strides))
        self._set(made._memory, made._nd, made._flags, stream)

    def _set(self, memory: Memory, nd: np.ndarray, flags: np.ndarray | None, stream: Any) -> None:
        self._memory = memory
        self._nd = nd
        self._flags = flags
        self.stream = stream

    @classmethod
    def of(cls, memory: Memory, nd: np.ndarray, flags: np.ndarray | None, stream: Any = 0) -> Any:
        """An array of memory that is there. nd: NumPy's view of it; flags: of what is written, None if all is"""
        made = cls.__new__(cls)
        made._set(memory, nd, flags, stream)
        return made

    @classmethod
    def new(cls, shape: Any, dtype: Any, order: Any = "C", strides: Any = None, written: bool = False) -> DeviceNDArray:
        shape, dtype = shape_of(shape), dtype_of(dtype)
        if strides is None:
            layout = np.ndarray(shape, dtype, order=order, buffer=None) if math.prod(shape) else np.zeros(shape, dtype)
            strides = layout.strides
            nbytes = layout.nbytes
        else:
            strides = shape_of(strides)
            nbytes = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            nbytes = nbytes if math.prod(shape) else 0
        memory = Memory(nbytes, written)
        memory.describe = names_of_elements(shape, strides)
        if nbytes:
            return cls.of(memory, *memory.views(shape, dtype, 0, strides))
        flags = None if memory.shadow is None else np.zeros(shape, flag_type(dtype), order)
        return cls.of(memory, np.zeros(shape, dtype, order), flags)

    dtype = property(lambda self: self._nd.dtype)
    shape = property(lambda self: self._nd.shape)
    strides = property(lambda self: self._nd.strides)
    ndim = property(lambda self: self._nd.ndim)
    size = property(lambda self: self._nd.size)
    nbytes = property(lambda self: self._nd.nbytes)
    itemsize = property(lambda self: self._nd.itemsize)
    alloc_size = property(lambda self: self._memory.nbytes)
    flags = property(lambda self: {"C_CONTIGUOUS": self.is_c_contiguous(), "F_CONTIGUOUS": self.is_f_contiguous()})
    T = property(lambda self: self.transpose())
    gpu_data = property(lambda self: Pointer(self))
    device_ctypes_pointer = property(lambda self: ctypes.c_void_p(self._nd.ctypes.data))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        given = self._nd.__array_interface__
        strides = None if self.is_c_contiguous() else self.strides
        pointer = given["data"][0] if self.size else 0
        return {
            "shape": self.shape, "strides": strides, "data": (pointer, False), "typestr": self.dtype.str,
            "stream": int(self.stream) or None, "version": 3, "descr": given["descr"], "nbep": self,
        }  # fmt: skip

    def is_c_contiguous(self) -> bool:
        return self._nd.flags.c_contiguous

    def is_f_contiguous(self) -> bool:
        return self._nd.flags.f_contiguous

    def bind(self, stream: Any = 0) -> DeviceNDArray:
        return DeviceNDArray.of(self._memory, self._nd, self._flags, stream)

    def _changed(self, change: Callable[[np.ndarray], np.ndarray]) -> DeviceNDArray:
        """Another view of its memory, and of the flags of that."""
        flags = None if self._flags is None else change(self._flags)
        return DeviceNDArray.of(self._memory, change(self._nd), flags, self.stream)

    def _uncopied(self, what: str, change: Callable[[np.ndarray], np.ndarray]) -> DeviceNDArray:
        made = self._changed(change)
        if made.size and not np.shares_memory(made._nd, self._nd):
            raise NotImplementedError(f"{what} would require copy")
        return made

    @property
    def _range(self) -> tuple[int, int]:
        """The bytes of its memory that it may cover."""
        from nbep.emulator.machine.arrays import extent

        if not self.size:
            return 0, 0
        start = self._memory.buffer.__array_interface__["data"][0]
        low, high = extent(self._nd)
        return low - start, high - start

    # --- copies -----------------------------------------------------------------------------------------------------

    def copy_to_host(self, ary: Any = None, stream: Any = 0) -> np.ndarray:
        """A copy in memory of the host. It waits for the stream, except with a pinned array."""
        if any(one < 0 for one in self.strides):
            raise NotImplementedError(f"D->H copy not implemented for negative strides: {self.strides}")
        if ary is None:
            ary = np.empty(
                self.shape, self.dtype, order="F" if not self.is_c_contiguous() and self.is_f_contiguous() else "C"
            )
        elif ary.dtype != self.dtype:
            raise TypeError(f"incompatible dtype: {ary.dtype} vs. {self.dtype}")
        elif tuple(ary.shape) != self.shape and ary.size != self.size:
            raise ValueError(f"incompatible shape: {ary.shape} vs. {self.shape}")
        there = stream_of(stream or self.stream)
        if isinstance(ary, PinnedArray) and stream:
            there.copies.append((ary, self))
            ary._arrives = there
            return ary
        there.synchronize()
        self._read_into(ary)
        return ary

    def _read_into(self, ary: np.ndarray) -> None:
        self._memory.host_reads(*self._range)
        plain = ary.view(np.ndarray)
        plain[...] = self._nd if plain.shape == self.shape else self._nd.reshape(plain.shape)

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        """Overwrite it with an array of the host or of the device. The stream has done before what it has to do."""
        if ary.size == 0 and self.size == 0:
            return
        stream_of(stream or self.stream).synchronize()
        if isinstance(ary, DeviceNDArray):
            ary._memory.host_reads(*ary._range)
            ary = ary._nd
        ary = np.asarray(ary)
        if ary.dtype != self.dtype:
            raise TypeError(f"incompatible dtype: {ary.dtype} vs. {self.dtype}")
        if ary.shape != self.shape:
            raise ValueError(f"incompatible shape: {self.shape} vs. {ary.shape}")
        self._memory.host_writes(*self._range)
        self._nd[...] = ary
        self._mark_written()

    def _mark_written(self) -> None:
        if self._flags is not None:
            mark_written(self._flags)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        result = self.copy_to_host()
        return result if dtype is None else result.astype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.getitem(index)

    def getitem(self, index: Any, stream: Any = 0) -> Any:
        part = self._nd[index]
        if isinstance(part, np.ndarray) and (part.ndim or _has_ellipsis(index)):
            return self._changed(lambda nd: nd[index])
        there = _part(self._nd, index)
        result = DeviceNDArray.of(self._memory, there, None, self.stream).copy_to_host(stream=stream)
        if there.dtype.names:
            return DeviceRecord.of(self._memory, there, None if self._flags is None else _part(self._flags, index))
        return result[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.setitem(index, value)

    def setitem(self, index: Any, value: Any, stream: Any = 0) -> None:
        stream_of(stream or self.stream).synchronize()
        if isinstance(value, DeviceNDArray):
            value = value.copy_to_host()
        self._memory.host_writes(*self._range)
        target = _part(self._nd, index)
        given = np.asarray(value, dtype=target.dtype)
        if given.ndim > target.ndim:
            raise ValueError(f"Can't assign {given.ndim}-D array to {target.ndim}-D self")
        for wanted, has in zip(reversed(target.shape), reversed(given.shape), strict=False):
            if has not in (1, wanted):
                raise ValueError(f"Can't copy sequence with size {has} to array axis with dimension {wanted}")
        if target.size == 0:
            return
        target[...] = given
        if self._flags is not None:
            mark_written(_part(self._flags, index))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    # --- shapes -----------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, **options: Any) -> DeviceNDArray:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        order = options.get("order", "C")
        return self._uncopied("reshape", lambda nd: nd.reshape(shape, order=order))

    def ravel(self, order: Any = "C", stream: Any = 0) -> DeviceNDArray:
        return self._uncopied("ravel", lambda nd: nd.ravel(order))

    def transpose(self, axes: Any = None) -> DeviceNDArray:
        """A transposed copy, as Numba makes it: what is stored to it does not come here."""
        if axes and tuple(axes) == tuple(range(self.ndim)):
            return self
        if self.ndim != 2:
            raise NotImplementedError("transposing a non-2D DeviceNDArray isn't supported")
        if axes is not None and set(axes) != {0, 1}:
            raise ValueError(f"invalid axes list {axes!r}")
        stream_of(self.stream).synchronize()
        self._memory.host_reads(*self._range)
        made = DeviceNDArray.new(self.shape[::-1], self.dtype, written=self._flags is None)
        made._nd[...] = self._nd.T
        if made._flags is not None and self._flags is not None:
            made._flags[...] = self._flags.T
        made.stream = self.stream
        return made

    def squeeze(self, axis: Any = None, stream: Any = 0) -> DeviceNDArray:
        return self._changed(lambda nd: nd.squeeze(axis))

    def view(self, dtype: Any) -> DeviceNDArray:
        dtype = dtype_of(dtype)
        flags = None if self._flags is None else self._flags.view(flag_type(dtype))
        return DeviceNDArray.of(self._memory, self._nd.view(dtype), flags, self.stream)

    def split(self, section: int, stream: Any = 0) -> Iterator[DeviceNDArray]:
        for begin in range(0, self.size, section):
            yield self[begin : begin + section]

    def in_kernel(self, session: Session, name: str) -> KArray:
        """It as a kernel has it."""
        allocation = self._memory.in_session(session, name)
        return KArray(
            self._nd,
            self._flags,
            Space(session.world, allocation, False, session.is_fast),
            name,
            not self._nd.flags.writeable,
        )


class DeviceRecord(DeviceNDArray):
    """One record in memory of the device."""

    is_record = True


def _part(nd: np.ndarray, index: Any) -> np.ndarray:
    """What an index means, or a name of a field, as a view; also of one element."""
    return nd[index] if isinstance(index, str) else nd[(*_as_tuple(index), Ellipsis)]


def mark_written(flags: np.ndarray) -> None:
    """Count all elements as written."""
    if flags.dtype.names is not None:
        for name in flags.dtype.names:
            mark_written(flags[name])
        return
    flags[...] = np.frombuffer(b"\1" * 16, flags.dtype, 1)[0]


class HostArray(np.ndarray):
    """An array of the host that kernels see, too: mapped or managed. With "checked", reads need a synchronize."""

    _device: DeviceNDArray | None = None

    def __array_finalize__(self, other: Any) -> None:
        self._device = getattr(other, "_device", None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device is None:
            raise AttributeError("__cuda_array_interface__")
        return self._device.__cuda_array_interface__

    def _looks(self) -> None:
        if self._device is not None:
            self._device._memory.host_reads(*self._device._range)

    def __getitem__(self, index: Any) -> Any:
        self._looks()
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._device is not None:
            self._device._memory.host_writes(*self._device._range)
        super().__setitem__(index, value)
        if self._device is not None:
            self._device._mark_written()

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*_plain(inputs), **_plain(kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(*_plain(args), **_plain(kwargs))


def _plain(one: Any) -> Any:
    """What NumPy computes with in place of such arrays, which the host looks at."""
    if isinstance(one, dict):
        return {name: _plain(value) for name, value in one.items()}
    if isinstance(one, (list, tuple)):
        return type(one)(map(_plain, one))
    if not isinstance(one, HostArray):
        return one
    one._looks()
    return one.view(np.ndarray)


class PinnedArray(HostArray):
    """An array of the host to which copies may be under way."""

    _arrives: Stream | None = None

    def __array_finalize__(self, other: Any) -> None:
        super().__array_finalize__(other)
        self._arrives = getattr(other, "_arrives", None)

    def _looks(self) -> None:
        there = self._arrives
        if there is not None and any(ary is self or np.shares_memory(ary, self) for ary, _ in there.copies):
            raise DataRace(
                "the host reads a pinned array while copy_to_host still copies to it: call `stream.synchronize()` of "
                f"{there!r} before"
            )


def host_array(
    kind: type[HostArray], shape: Any, dtype: Any, strides: Any = None, order: str = "C", stream: Any = 0
) -> Any:
    """Memory of the host; the device sees it if it is mapped or managed."""
    device = DeviceNDArray.new(shape, dtype, order, strides, written=True)
    device.stream = stream
    array = device._nd.view(kind)
    if kind is HostArray:
        array._device = device
    return array


def shape_of(shape: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, shape)) if isinstance(shape, (tuple, list)) else (operator.index(shape),)


def _as_tuple(index: Any) -> tuple:
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(one for one in parts if one is not Ellipsis) if parts and parts[-1] is Ellipsis else parts


def _has_ellipsis(index: Any) -> bool:
    return any(one is Ellipsis for one in (index if isinstance(index, tuple) else (index,)))


def as_device(value: Any, sync: bool = True) -> DeviceNDArray:
    """An object with the CUDA array interface as an array of the device: one of this process's emulated device.

    Its stream is waited for, as the interface demands: sync and NUMBA_CUDA_ARRAY_INTERFACE_SYNC can forbid that.
    """
    if isinstance(value, DeviceNDArray):
        return value
    interface = value.__cuda_array_interface__
    own = interface.get("nbep")
    stream = Stream.of_number.get(interface.get("stream") or 0, None)
    if stream is not None:
        stream = stream.as_external()
        from numba.cuda.core import config

        if sync and getattr(config, "CUDA_ARRAY_INTERFACE_SYNC", True):
            stream.synchronize()
    if own is None:
        raise TypeError(f"{type(value).__name__}: its memory is on a GPU, which the emulator cannot reach")
    if interface.get("version", 0) >= 1 and interface.get("mask") is not None:
        raise NotImplementedError("Masked arrays are not supported")
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V" and own.dtype != BF16.dtype:
        dtype = np.dtype(interface.get("descr", own.dtype.descr))
    if (shape, dtype) == (own.shape, own.dtype) and strides in (None, own.strides):
        return own.bind(stream or 0)
    start = interface["data"][0] - own._memory.buffer.__array_interface__["data"][0]
    nd, flags = own._memory.views(shape, dtype, start, strides)
    return DeviceNDArray.of(own._memory, nd, flags, stream or 0)
