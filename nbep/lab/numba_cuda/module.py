"""What `numba.cuda` offers to the host, on the emulator; `install` makes a module of it."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from . import launch
from . import session as _session
from .dispatcher import Dispatcher
from .launch import to_device as _copy
from .memory import DeviceNDArray, DeviceRecord, HostArray, PinnedArray, as_device, host_array
from .session import Event, Stream

HAS_NUMBA = True
implementation = "nbep"
per_thread_default_stream = legacy_default_stream = default_stream = lambda: _session.DEFAULT
CUDADispatcher = Dispatcher


class CudaAPIError(RuntimeError):
    """A call of the driver has failed."""


class KernelRuntimeError(RuntimeError):
    """A kernel has failed."""


def to_device(obj: Any, stream: Any = 0, copy: bool = True, to: Any = None) -> DeviceNDArray:
    """A copy of an array in memory of the device."""
    if isinstance(obj, DeviceNDArray) and to is None:
        return obj
    if isinstance(obj, np.void) and to is None:
        there = _copy(np.array([obj], obj.dtype))
        return DeviceRecord.of(there._memory, there._nd[0, ...], None)
    if to is not None:
        to.copy_to_device(obj, stream)
        return to
    made = _copy(np.asarray(obj)) if copy else device_array_like(np.asarray(obj))
    made.stream = stream
    return made


def device_array(
    shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C", stream: Any = 0
) -> DeviceNDArray:
    """An array of the device, in which nothing is written."""
    made = DeviceNDArray.new(shape, dtype, order, strides)
    made.stream = stream
    return made


def _like(array: Any) -> dict[str, Any]:
    """Shape, type and layout of an array, without its gaps."""
    is_c, is_f = array.flags["C_CONTIGUOUS"], array.flags["F_CONTIGUOUS"]
    if array.ndim == 0 or is_c or is_f:
        return {"shape": array.shape, "dtype": array.dtype, "order": "F" if is_f and not is_c else "C"}
    strides, size = [0] * array.ndim, np.dtype(array.dtype).itemsize
    for axis in sorted(range(array.ndim), key=lambda axis: (abs(array.strides[axis]), -axis)):
        strides[axis] = size
        size *= array.shape[axis]
    return {"shape": array.shape, "dtype": array.dtype, "strides": tuple(strides)}


def device_array_like(ary: Any, stream: Any = 0) -> DeviceNDArray:
    return device_array(**_like(ary), stream=stream)


def pinned_array(shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C") -> Any:
    """An array of the host to which copies go while the host goes on."""
    return host_array(PinnedArray, shape, dtype, strides, order)


def pinned_array_like(ary: Any) -> Any:
    return pinned_array(**_like(ary))


def mapped_array(
    shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C", stream: Any = 0, portable: bool = False,
    wc: bool = False, attach_global: bool = True,
) -> Any:  # fmt: skip
    """An array of the host that kernels see, too."""
    return host_array(HostArray, shape, dtype, strides, order, stream)


managed_array = mapped_array


def mapped_array_like(ary: Any, stream: Any = 0, portable: bool = False, wc: bool = False) -> Any:
    return mapped_array(**_like(ary))


def from_cuda_array_interface(desc: Any, owner: Any = None, sync: bool = True) -> DeviceNDArray:
    return as_device(type("Given", (), {"__cuda_array_interface__": desc}), sync)


def as_cuda_array(obj: Any, sync: bool = True) -> DeviceNDArray:
    if not is_cuda_array(obj):
        raise TypeError("*obj* doesn't implement the cuda array interface.")
    return as_device(obj, sync)


def is_cuda_array(obj: Any) -> bool:
    return hasattr(obj, "__cuda_array_interface__")


def _auto_device(ary: Any, stream: Any = 0, copy: bool = True) -> tuple[DeviceNDArray, bool]:
    if isinstance(ary, DeviceNDArray):
        return ary, False
    return to_device(ary, stream, copy), True


def pinned(*arrays: Any) -> Any:
    """Meanwhile these arrays are pinned."""
    return contextlib.nullcontext()


defer_cleanup = profiling = pinned


@contextlib.contextmanager
def mapped(*arrays: Any, **_: Any) -> Iterator[Any]:
    """Arrays of the host as the device sees them meanwhile."""
    devices = [_copy(one) for one in arrays]
    yield devices[0] if len(devices) == 1 else devices
    synchronize()
    for one, device in zip(arrays, devices, strict=True):
        device._read_into(one)


stream, event = Stream, Event


def external_stream(ptr: Any) -> Stream:
    if isinstance(ptr, Stream):
        return ptr
    there = Stream.of_number.get(int(ptr))
    if there is None:
        raise NotImplementedError("external_stream: streams of other libraries cannot be emulated")
    return there.as_external()


def event_elapsed_time(start: Event, end: Event) -> float:
    return start.elapsed_time(end)


def synchronize() -> None:
    """Block until all that was queued is done."""
    session = _session.current(create=False)
    if session is not None:
        session.synchronize()


is_available = is_supported_version = is_float16_supported = is_bfloat16_supported = lambda: True
cuda_error = profile_start = profile_stop = lambda: None
close = _session.reset


def is_fp8_supported() -> bool:
    return False


def detect() -> bool:
    print("Found 1 CUDA devices\nid 0      b'nbep emulator'                              [SUPPORTED]")
    return True


class Device(contextlib.AbstractContextManager):
    """The emulated GPU."""

    id = 0
    name = b"nbep emulator"
    compute_capability = (9, 0)
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    WARP_SIZE = 32
    MULTIPROCESSOR_COUNT = launch.NUM_SMS
    MAX_THREADS_PER_BLOCK = launch.MAX_THREADS
    MAX_BLOCK_DIM_X, MAX_BLOCK_DIM_Y, MAX_BLOCK_DIM_Z = launch.MAX_BLOCK
    MAX_GRID_DIM_X, MAX_GRID_DIM_Y, MAX_GRID_DIM_Z = launch.MAX_GRID
    MAX_SHARED_MEMORY_PER_BLOCK = launch.SHARED_BYTES
    supports_float16 = supports_bfloat16 = True
    supports_fp8 = False

    def __exit__(self, *_: object) -> None: ...

    def reset(self) -> None:
        _session.reset()

    def get_primary_context(self) -> Context:
        return CONTEXT


class Context(contextlib.AbstractContextManager):
    """The context of the emulated GPU."""

    id = 0
    deallocations: ClassVar[list[Any]] = []  # nothing waits to be freed

    def __init__(self, device: Device):
        self.device = device

    def __exit__(self, *_: object) -> None: ...

    def reset(self) -> None:
        _session.reset()

    def synchronize(self) -> None:
        synchronize()

    def get_memory_info(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def push(self) -> None: ...

    def pop(self) -> None: ...


DEVICE = Device()
CONTEXT = Context(DEVICE)


class _Devices(list):
    """The devices there are: one."""

    lst = property(list)
    current: Any = DEVICE


gpus = _Devices([DEVICE])


class Driver:
    """What programs ask of the driver."""

    get_device = staticmethod(lambda number=0: gpus[number])
    get_device_count = staticmethod(lambda: len(gpus))
    get_version = staticmethod(lambda: (12, 0))


DRIVER = Driver()


def list_devices() -> Any:
    return gpus


def get_current_device() -> Device:
    return DEVICE


def current_context(device_id: Any = None) -> Context:
    return CONTEXT


def require_context(function: Any) -> Any:
    return function


def literal_unroll(values: Any) -> Any:
    return values


def select_device(device_id: int) -> Device:
    if device_id != 0:
        raise RuntimeError(f"device {device_id}: the emulator has one device, 0")
    return DEVICE


def _no_machine_code(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the emulator makes no machine code")


compile = compile_ptx = compile_all = compile_for_current_device = _no_machine_code  # noqa: A001 - Numba's names
compile_ptx_for_current_device = set_memory_manager = _no_machine_code


def vectorize(*args: Any, **options: Any) -> Any:
    """A ufunc of the device: Numba makes a kernel of it."""
    return importlib.import_module("numba.cuda.np.ufunc").vectorize(*args, **options)


def guvectorize(*args: Any, **options: Any) -> Any:
    """A generalized ufunc of the device: Numba makes a kernel of it."""
    return importlib.import_module("numba.cuda.np.ufunc").guvectorize(*args, **options)


class LinkableCode:
    """Code of C, C++ or PTX: who links it to a kernel hears that the emulator cannot run it."""

    def __init__(self, *_: Any, **__: Any): ...


CUSource = PTXSource = Cubin = Fatbin = Archive = Object = LTOIR = LinkableCode


class Reduce:
    """A reduction by a function of two values: `reduce = cuda.Reduce(lambda a, b: a + b)`."""

    def __init__(self, functor: Any):
        self.functor = getattr(functor, "py_func", functor)

    def __call__(self, arr: Any, size: Any = None, res: Any = None, init: Any = 0, stream: Any = 0) -> Any:
        values = arr.copy_to_host() if isinstance(arr, DeviceNDArray) else np.asarray(arr)
        if values.ndim != 1:
            raise TypeError("only support 1D array")
        if res is not None and values.size == 0:
            raise ValueError("the array is empty")
        values = values if size is None else values[:size]
        if values.size == 0:
            return init
        total = functools.reduce(self.functor, values[1:], values[0])
        total = self.functor(total, values.dtype.type(init)) if init is not None else total
        if res is None:
            return values.dtype.type(total)
        res[:1] = np.array([total], values.dtype)
        return None


reduce = Reduce
