"""NumPy arrays of a test as arrays of the target, and back. On the emulator both are the same.

A GPU gets the bytes and the strides as they are, so that column-major scales stay column-major, and bf16 and FP8 need
nothing from the library but a name. Copies go over the calling rank's own stream, and no kernel of the library runs:
loading one would wait for the ranks that spin.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from target import TARGET

from nbep.host.target.libraries import numpy_dtype
from nbep.specimens.workloads.cases import use

LIBRARY = os.environ.get("NBEP_TEST_ARRAYS", "numpy" if TARGET == "emulator" else "torch")
DEVICE = "cpu" if TARGET == "emulator" else "cuda"
WARM_BYTES = 1 << 28


def to_target(value: Any) -> Any:
    """A NumPy array as an array of the target; so are those in a tuple or a list. All else stays as it is."""
    return convert(value, np.ndarray, _library().from_numpy)


def to_numpy(value: Any) -> Any:
    """An array of the target as a NumPy array; so are those in a tuple or a list. All else stays as it is."""
    return convert(value, _library().array_class(), _library().to_numpy)


def convert(value: Any, cls: type, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, cls):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(convert(item, cls, function) for item in value)
    return value


def assign(array: Any, values: np.ndarray) -> None:
    """Write a NumPy array into a contiguous array of the target."""
    _library().assign(array, values)


def assert_kind(*values: Any) -> None:
    """Every array among the values, and in their tuples, is of the library that the tests pass in."""
    for value in values:
        if isinstance(value, tuple):
            assert_kind(*value)
        elif hasattr(value, "dtype"):
            assert isinstance(value, _library().array_class()), (
                f"{type(value)} came out where {LIBRARY}'s arrays went in"
            )


def over(array: Any, dtype: str, shape: tuple[int, ...], start: int = 0) -> Any:
    """An array over the memory of a contiguous one, from an element on."""
    kind: Any = numpy_dtype(dtype)
    if LIBRARY == "torch":
        import torch

        kind = getattr(torch, dtype)
    return array.reshape(-1).view(kind)[start:][: math.prod(shape)].reshape(shape)


def array_name() -> str:
    """How the class of the target's arrays is called."""
    return _library().array_class().__name__


def warm_up() -> None:
    """Let the library do all that it does only once, before a rank's kernel spins."""
    _library().warm_up()
    assert to_numpy(to_target(np.arange(3))).tolist() == [0, 1, 2]


def span_bytes(array: np.ndarray) -> np.ndarray:
    """The memory from an array's first element to its last, as bytes."""
    strides = [stride // array.itemsize for stride in array.strides]
    if min(strides, default=0) < 0:
        raise ValueError(f"strides: got {array.strides}; only the emulator's arrays may run backwards")
    length = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    span = np.lib.stride_tricks.as_strided(array, (length,), (array.itemsize,))
    return np.array(span).view(np.uint8)


class Numpy:
    """The emulator's arrays."""

    @staticmethod
    def array_class() -> type:
        return np.ndarray

    @staticmethod
    def from_numpy(array: np.ndarray) -> np.ndarray:
        return array

    to_numpy = from_numpy

    @staticmethod
    def assign(array: np.ndarray, values: np.ndarray) -> None:
        array[...] = values

    @staticmethod
    def warm_up() -> None:
        """Nothing to do."""


TORCH_BITS = {"bfloat16": (np.int16, ml_dtypes.bfloat16), "float8_e4m3fn": (np.uint8, ml_dtypes.float8_e4m3fn)}


class Torch:
    """torch.Tensor. NumPy does not know its bf16 and FP8, so they cross as integers."""

    @staticmethod
    def array_class() -> type:
        import torch

        return torch.Tensor

    @staticmethod
    def from_numpy(array: np.ndarray) -> Any:
        import torch

        dtype = getattr(torch, array.dtype.name)
        if array.size == 0:
            return torch.empty(array.shape, dtype=dtype, device=DEVICE)
        flat = torch.from_numpy(span_bytes(array)).to(DEVICE).view(dtype)
        return flat.as_strided(array.shape, [stride // array.itemsize for stride in array.strides])

    @staticmethod
    def to_numpy(array: Any) -> np.ndarray:
        import torch

        name = str(array.dtype).removeprefix("torch.")
        if name not in TORCH_BITS:
            return array.detach().cpu().numpy()
        bits, dtype = TORCH_BITS[name]
        return array.detach().view(getattr(torch, np.dtype(bits).name)).cpu().numpy().view(dtype)

    @staticmethod
    def assign(array: Any, values: np.ndarray) -> None:
        array.copy_(Torch.from_numpy(values))

    @staticmethod
    def warm_up() -> None:
        import torch

        if DEVICE == "cpu":
            return
        torch.cuda.init()
        torch.empty(WARM_BYTES, dtype=torch.uint8, device=DEVICE)  # the pool keeps it
        torch.cuda.synchronize()


class Cupy:
    """cupy.ndarray, with the dtypes of ml_dtypes."""

    @staticmethod
    def array_class() -> type:
        import cupy

        return cupy.ndarray

    @staticmethod
    def from_numpy(array: np.ndarray) -> Any:
        import cupy

        if array.size == 0:
            return cupy.empty(array.shape, array.dtype)
        host = span_bytes(array)
        flat = cupy.empty(host.shape, np.uint8)
        flat.set(host)
        cupy.cuda.get_current_stream().synchronize()
        return cupy.ndarray(array.shape, array.dtype, memptr=flat.data, strides=array.strides)

    @staticmethod
    def to_numpy(array: Any) -> np.ndarray:
        return array.get(order="A")

    @staticmethod
    def assign(array: Any, values: np.ndarray) -> None:
        import cupy

        array.set(values)
        cupy.cuda.get_current_stream().synchronize()

    @staticmethod
    def warm_up() -> None:
        import cupy

        from nbep.host.target.cuda.driver import Device

        Device(cupy.cuda.Device().id).prepare_pool()
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)  # CuPy's own pool may wait in cudaMalloc
        cupy.empty(WARM_BYTES, np.uint8)
        cupy.cuda.Device().synchronize()


class Numba:
    """numba.cuda's DeviceNDArray. Numba copies over the default stream, which does not wait for nbep's streams."""

    @staticmethod
    def array_class() -> type:
        from numba import cuda

        return cuda.cudadrv.devicearray.DeviceNDArray

    @staticmethod
    def from_numpy(array: np.ndarray) -> Any:
        from numba import cuda

        if array.size == 0:
            return cuda.device_array(array.shape, array.dtype)
        flat = cuda.to_device(span_bytes(array))
        return Numba.array_class()(array.shape, array.strides, array.dtype, gpu_data=flat.gpu_data)

    @staticmethod
    def to_numpy(array: Any) -> np.ndarray:
        return array.copy_to_host()

    @staticmethod
    def assign(array: Any, values: np.ndarray) -> None:
        array.copy_to_device(values)

    @staticmethod
    def warm_up() -> None:
        from numba import cuda

        cuda.current_context()


class OfTarget:
    """What `nbep.specimens.workloads` takes for arrays from here on."""

    is_exact = TARGET == "emulator"
    to_target = staticmethod(to_target)
    to_numpy = staticmethod(to_numpy)
    assign = staticmethod(assign)
    assert_kind = staticmethod(assert_kind)


use(OfTarget())


def _library() -> Any:
    return {"numpy": Numpy, "torch": Torch, "cupy": Cupy, "numba": Numba}[LIBRARY]


ALLOWED = ("numpy", "torch") if TARGET == "emulator" else ("torch", "cupy", "numba")
if LIBRARY not in ALLOWED:
    raise ValueError(f"NBEP_TEST_ARRAYS: got {LIBRARY!r}; must be {' or '.join(ALLOWED)}")
