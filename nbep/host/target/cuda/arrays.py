"""Arrays on a GPU: torch tensors, CuPy arrays and Numba device arrays. What comes in decides what goes out.

None of the three is imported here: a value's own class tells which library it is from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import starmap
from typing import Any

import ml_dtypes
import numpy as np

from nbep.host.target.new_arrays import ROWS, ByColumns

NUMPY_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


def native_name(dtype: Any) -> str:
    """NumPy's name of a NumPy dtype; one in the other order of bytes has another name than any that nbep takes."""
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of that name, ml_dtypes' included."""
    return NUMPY_DTYPES.get(name) or np.dtype(name)


_torch_dtype_names: dict[Any, str] = {}


def torch_says(error: Exception) -> str:
    """A flaw of a tensor, as torch words it."""
    return f" of which torch says {str(error).strip().partition(chr(10))[0]!r}"


class TorchArrays:
    """torch.Tensor on a CUDA device."""

    @staticmethod
    def is_array(value: Any) -> bool:
        return value.is_cuda

    @staticmethod
    def flaw(tensor: Any) -> str:
        """Why a tensor is no plain memory, which is all that a kernel can take; "" if it is."""
        try:
            address, _ = tensor.data_ptr(), tensor.stride()
            if tensor.is_neg() or tensor.is_conj():
                return " with torch's negative or conjugate bit set, which resolve_neg() or resolve_conj() takes off"
            return "" if address or tensor.numel() == 0 else " without memory"
        except Exception as error:
            return torch_says(error)

    @staticmethod
    def pointer(array: Any) -> int:
        return array.data_ptr()

    @staticmethod
    def dtype_name(array: Any) -> str:
        dtype = array.dtype
        name = _torch_dtype_names.get(dtype)
        if name is None:
            name = _torch_dtype_names[dtype] = str(dtype).removeprefix("torch.")
        return name

    @staticmethod
    def strides(array: Any) -> tuple[int, ...]:
        return tuple(array.stride())

    @staticmethod
    def is_contiguous(array: Any) -> bool:
        return array.is_contiguous()

    @staticmethod
    def is_writeable(array: Any) -> bool:
        return True

    @staticmethod
    def fits(array: Any, dtype: str, shape: tuple[int, ...]) -> bool:
        wanted = TorchArrays.dtype(dtype)
        return array.dtype is wanted and array.shape == shape and array.is_contiguous()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=TorchArrays.dtype(dtype))

    @staticmethod
    def empty_by_columns(shape: tuple[int, int, int], dtype: str, like: Any) -> Any:
        _, rows, columns = shape
        return like.new_empty_strided(shape, (rows * columns, 1, rows), dtype=TorchArrays.dtype(dtype))

    @staticmethod
    def prepare_empty(wanted: Sequence[tuple[tuple[int, ...], str]]) -> Callable[[Any], tuple[list[Any], list[Any]]]:
        """What makes such arrays, on the device of another one. wanted: shapes and dtypes; maybe ByColumns"""
        torch = sys.modules["torch"]
        make_one = _maker_of_one(torch)
        current_device, pointer = torch._C._cuda_getDevice, torch.Tensor.data_ptr
        places = []
        for each in wanted:
            shape, dtype = each
            inner = [(*shape[i + 1 :], 1) for i in range(len(shape))]
            strides = tuple(math.prod(max(1, size) for size in sizes) for sizes in inner)
            if isinstance(each, ByColumns):
                strides = strides[0], 1, max(1, shape[1])
            places.append((shape, strides, TorchArrays.dtype(dtype)))

        has_rows = any(shape[:1] == (ROWS,) for shape, _, _ in places)

        def make(like: Any, num_rows: int = 0) -> tuple[list[Any], list[Any]]:
            wanted_now = places
            if has_rows:
                wanted_now = [
                    ((num_rows, *shape[1:]) if shape[0] == ROWS else shape, strides, dtype)
                    for shape, strides, dtype in places
                ]
            if make_one is not None and like.get_device() == current_device():
                arrays = list(starmap(make_one, wanted_now))
            else:
                arrays = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in wanted_now]
            return arrays, list(map(pointer, arrays))

        return make

    @staticmethod
    @cache
    def dtype(name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    @staticmethod
    def let_current_stream_use(arrays: list[Any]) -> bool:
        stream = sys.modules["torch"].cuda.current_stream()
        for array in arrays:
            array.record_stream(stream)
        return True


@cache
def _maker_of_one(torch: Any) -> Any:
    """A function (shape, strides, dtype) of torch that goes around its dispatcher, or None if this torch has none.

    It is what the programs call that torch compiles. It takes the current device.
    """
    try:
        make_one = torch._C._dynamo.guards._empty_strided_cuda
        array = make_one((2, 3), (1, 2), torch.int64)
        as_asked = tuple(array.shape) == (2, 3) and tuple(array.stride()) == (1, 2) and array.dtype is torch.int64
        return make_one if as_asked and array.is_cuda else None
    except (AttributeError, TypeError, RuntimeError):  # it is not for others to call, and may change
        return None


class NumpyLike:
    """What the arrays of NumPy, CuPy and Numba have in common."""

    @staticmethod
    def is_contiguous(array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    @staticmethod
    def dtype_name(array: Any) -> str:
        return native_name(array.dtype)

    @staticmethod
    def strides(array: Any) -> tuple[int, ...]:
        return tuple(stride // array.dtype.itemsize for stride in array.strides)

    @classmethod
    def fits(cls, array: Any, dtype: str, shape: tuple[int, ...]) -> bool:
        return array.shape == shape and native_name(array.dtype) == dtype and cls.is_contiguous(array)


class InterfaceArrays(NumpyLike):
    """What CuPy's and Numba's arrays have in common."""

    @staticmethod
    def is_array(value: Any) -> bool:
        return True

    @staticmethod
    def is_writeable(array: Any) -> bool:
        return not array.__cuda_array_interface__["data"][1]

    dtype = staticmethod(numpy_dtype)

    @staticmethod
    def let_current_stream_use(arrays: list[Any]) -> bool:
        return False  # CuPy's pool knows of one stream, on which the memory was handed out; Numba's memory has none


class CupyArrays(InterfaceArrays):
    """cupy.ndarray."""

    @staticmethod
    def pointer(array: Any) -> int:
        return array.data.ptr

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return sys.modules["cupy"].empty(shape, numpy_dtype(dtype))

    @staticmethod
    def empty_by_columns(shape: tuple[int, int, int], dtype: str, like: Any) -> Any:
        return CupyArrays.empty((shape[0], shape[2], shape[1]), dtype, like).transpose(0, 2, 1)


class NumbaArrays(InterfaceArrays):
    """numba.cuda's DeviceNDArray, with ml_dtypes' types too: nbep's kernels only see addresses."""

    @staticmethod
    def pointer(array: Any) -> int:
        return array.__cuda_array_interface__["data"][0] or 0

    @staticmethod
    def is_contiguous(array: Any) -> bool:
        return array.is_c_contiguous()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        cuda = sys.modules["numba.cuda"]
        return cuda.device_array(shape, numpy_dtype(dtype))

    @staticmethod
    def empty_by_columns(shape: tuple[int, int, int], dtype: str, like: Any) -> Any:
        _, rows, columns = shape
        kind = numpy_dtype(dtype)
        strides = (rows * columns * kind.itemsize, kind.itemsize, rows * kind.itemsize)
        return sys.modules["numba.cuda"].device_array(shape, kind, strides=strides)


LIBRARIES: dict[str, Any] = {"torch": TorchArrays, "cupy": CupyArrays, "numba": NumbaArrays, "numba_cuda": NumbaArrays}
known_libraries: dict[type, Any] = {}


def library_of(value: Any) -> Any:
    """The adapter for a value's class, or None if it is no GPU array."""
    cls = type(value)
    if cls not in known_libraries:
        found = None
        for base in cls.__mro__:
            root = base.__module__.partition(".")[0]
            if root in LIBRARIES and (root == "torch") == (base.__name__ == "Tensor"):
                found = LIBRARIES[root]
                break
        if found is not None and found is not TorchArrays and not hasattr(value, "__cuda_array_interface__"):
            found = None
        known_libraries[cls] = found
    return known_libraries[cls]


def pointer_of(array: Any) -> int:
    """Where an array starts; its library is known to be one of these."""
    return _pointer_of_class.get(type(array), _find_pointer)(array)


def _find_pointer(array: Any) -> int:
    pointer = library_of(array).pointer
    if library_of(array) is TorchArrays:
        pointer = type(array).data_ptr  # without a function around it
    _pointer_of_class[type(array)] = pointer
    return pointer(array)


_pointer_of_class: dict[type, Any] = {}


def arguments_of(leaves: Iterable[Any]) -> list[int]:
    """What the driver gets for arrays, addresses and None."""
    return [leaf if leaf.__class__ is int else 0 if leaf is None else pointer_of(leaf) for leaf in leaves]


class DeviceSpan:
    """Bytes of device memory as an object that other libraries can wrap. Their arrays keep it alive, and so `owner`."""

    def __init__(self, address: int, num_bytes: int, owner: object):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def as_array(address: int, num_bytes: int, dtype: Any, owner: object) -> Any:
    """Device memory as a 1-D array: of torch for a torch dtype, else of CuPy if it is loaded, else of Numba.

    A last part that is smaller than an element is left out. owner: stays while somebody holds the array
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(dtype, torch.dtype):
        itemsize = dtype.itemsize
        span = DeviceSpan(address, num_bytes // itemsize * itemsize, owner)
        return torch.as_tensor(span, device=torch.device("cuda", torch.cuda.current_device())).view(dtype)
    dtype = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    span = DeviceSpan(address, num_bytes // dtype.itemsize * dtype.itemsize, owner)
    if cupy is not None:
        return cupy.asarray(span).view(dtype)
    from numba import cuda

    return cuda.as_cuda_array(span).view(dtype)


@contextmanager
def on_stream(handle: int, ordinal: int) -> Iterator[None]:
    """Make a stream of a device the current one of the libraries that are loaded."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    with nullcontext() if cupy is None else cupy.cuda.ExternalStream(handle):
        if torch is None or not torch.cuda.is_initialized():
            yield
        elif torch.cuda.current_device() != ordinal:
            with torch.cuda.stream(_external_stream(torch, handle, ordinal)):
                yield
        else:  # as torch.cuda.stream does, without a look at other devices
            before = torch.cuda.current_stream()
            torch.cuda.set_stream(_external_stream(torch, handle, ordinal))
            try:
                yield
            finally:
                torch.cuda.set_stream(before)


@cache
def _external_stream(torch: Any, handle: int, ordinal: int) -> Any:
    return torch.cuda.ExternalStream(handle, device=ordinal)


_torch_streams: dict[Any, tuple[Any, Any]] = {}  # how torch says which stream is current, once it uses a GPU


def current_stream_handle() -> int:
    """The stream on which the caller's own work runs: torch's or CuPy's current one, else the default stream."""
    torch = sys.modules.get("torch")
    if torch is not None:
        found = _torch_streams.get(torch)
        if found is not None:
            raw_stream, device = found
            return raw_stream(device())
        if torch.cuda.is_initialized():  # and it stays so
            # torch.cuda.current_stream() makes an object around this number, ten times slower.
            _torch_streams[torch] = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
            return current_stream_handle()
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return cupy.cuda.get_current_stream().ptr
    return 0
