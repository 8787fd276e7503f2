"""Arrays of other libraries: torch tensors, CuPy arrays, Numba device arrays. What comes in decides what goes out.

None of the three is imported here: a value's own class tells which library it is from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import starmap
from operator import itemgetter
from typing import Any

import ml_dtypes
import numpy as np

from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.target.arrays import ROWS, ByColumns

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
    def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=TorchArrays.dtype(dtype))

    @staticmethod
    def prepare_empty(wanted: Sequence[Any], like: Any) -> Callable[..., tuple[list[Any], list[Any]]]:
        """What makes such arrays, on the device of another one. wanted: shapes and dtypes, or None; maybe ByColumns"""
        torch, device = sys.modules["torch"], like.get_device()
        make_one = _maker_of_one(torch)
        current_device, pointer = torch._C._cuda_getDevice, torch.Tensor.data_ptr
        places, absent = [], [i for i, each in enumerate(wanted) if each is None]
        for each in wanted:
            if each is None:
                continue
            shape, dtype = each
            inner = [(*shape[i + 1 :], 1) for i in range(len(shape))]
            strides = tuple(math.prod(max(1, size) for size in sizes) for sizes in inner)
            if isinstance(each, ByColumns):
                strides = strides[0], 1, max(1, shape[1])
            places.append((shape, strides, TorchArrays.dtype(dtype)))

        numbered = [(i, ROWS - shape[0]) for i, (shape, _, _) in enumerate(places) if shape and shape[0] < 0]
        latest: Any = None  # the numbers that places have now; most calls make as many as the one before

        def make(numbers: Sequence[int] = ()) -> tuple[list[Any], list[Any]]:
            nonlocal latest
            if numbered and numbers != latest:
                for i, number in numbered:
                    shape, strides, dtype = places[i]
                    places[i] = (numbers[number], *shape[1:]), strides, dtype
                latest = numbers
            if make_one is not None and current_device() == device:
                arrays = list(starmap(make_one, places))
            else:
                arrays = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in places]
            addresses = list(map(pointer, arrays))
            for i in absent:
                arrays.insert(i, None)
                addresses.insert(i, 0)
            return arrays, addresses

        return make

    @staticmethod
    def recognizer(values: Sequence[Any], num_free: int) -> Callable[[Sequence[Any]], list[Any] | None] | None:
        """See Runtime.recognizer; the values are tensors or None. None also if they start at odd addresses.

        It is the test by which torch.compile's programs know tensors again: class, dispatch keys (of which a negative
        bit is one), dtype, device, sizes and strides of all tensors, in one call.
        """
        present = [i for i, value in enumerate(values) if value is not None]
        if not present:
            return None
        absent = [i for i, value in enumerate(values) if value is None]
        tensors, nothing = [values[i] for i in present], [0] * len(absent)
        pointer = sys.modules["torch"].Tensor.data_ptr
        check = _check_of(tensors, [i < num_free for i in present])
        if check is None or not all(address and address % VEC_BYTES == 0 for address in map(pointer, tensors)):
            return None
        pick = itemgetter(*present) if len(present) > 1 else itemgetter(slice(present[0], present[0] + 1))
        is_last = absent and absent[0] == len(present)

        def recognize(values: Sequence[Any]) -> list[Any] | None:
            for i in absent:
                if values[i] is not None:
                    return None
            tensors = pick(values)
            if not check(*tensors):
                return None
            try:
                found = list(map(pointer, tensors))
            except (RuntimeError, ValueError):  # of a tensor with a flaw
                return None
            for address in found:
                if not address or address % VEC_BYTES:
                    return None
            if is_last:
                found += nothing
            else:
                for i in absent:
                    found.insert(i, 0)
            return found

        return recognize

    @staticmethod
    @cache
    def dtype(name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    @staticmethod
    def let_current_stream_use(arrays: list[Any]) -> bool:
        torch = sys.modules["torch"]
        stream = _stream_of(torch, *torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))
        for array in arrays:
            array.record_stream(stream)
        return True


def _check_of(tensors: Sequence[Any], is_free: Sequence[bool]) -> Callable[..., bool] | None:
    """torch's own test whether tensors are such as these, or None if it has none. is_free: with any number of rows"""
    try:
        guards = sys.modules["torch"]._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[
                [None if free and i == 0 else int(size) for i, size in enumerate(tensor.shape)]
                for tensor, free in zip(tensors, is_free, strict=True)
            ],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        as_asked = guards.check(*tensors) and not guards.check(*[tensor[None] for tensor in tensors])
        return guards.check if as_asked else None
    except (AttributeError, TypeError, RuntimeError, AssertionError):  # it is not for others to call, and may change
        return None


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


class InterfaceArrays:
    """What CuPy's and Numba's arrays have in common."""

    @staticmethod
    def is_contiguous(array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    @staticmethod
    def dtype_name(array: Any) -> str:
        return native_name(array.dtype)

    @staticmethod
    def strides(array: Any) -> tuple[int, ...]:
        return tuple(stride // (array.dtype.itemsize or 1) for stride in array.strides)

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
    pointer = _pointer_of_class.get(type(array))
    if pointer is None:
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


def on_stream(handle: int, ordinal: int) -> AbstractContextManager[None]:
    """Make a stream of a device the current one of the libraries that are loaded."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if cupy is None and torch is not None and torch.cuda.is_initialized() and torch._C._cuda_getDevice() == ordinal:
        return TorchStream(torch, handle, ordinal)
    return _on_stream(torch, cupy, handle, ordinal)


class TorchStream:
    """A stream of the current device as torch's current one, without the objects that torch makes for streams."""

    __slots__ = ("_before", "_ordinal", "_stream", "_torch")

    def __init__(self, torch: Any, handle: int, ordinal: int):
        self._torch = torch
        self._ordinal = ordinal
        self._stream = _external_stream(torch, handle, ordinal)

    def __enter__(self) -> None:
        self._before = self._torch._C._cuda_getCurrentStream(self._ordinal)
        _set_stream(self._torch, self._stream)

    def __exit__(self, *exc_info: object) -> None:
        _set_stream(self._torch, self._before)


def _set_stream(torch: Any, stream: tuple[int, int, int]) -> None:
    torch._C._cuda_setStream(stream_id=stream[0], device_index=stream[1], device_type=stream[2])


@contextmanager
def _on_stream(torch: Any, cupy: Any, handle: int, ordinal: int) -> Iterator[None]:
    """The same, also for CuPy, and for a device that is not the current one."""
    with nullcontext() if cupy is None else cupy.cuda.ExternalStream(handle):
        if torch is None or not torch.cuda.is_initialized():
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=ordinal)):
                yield


@cache
def _external_stream(torch: Any, handle: int, ordinal: int) -> tuple[int, int, int]:
    """What torch knows a stream of somebody else by."""
    stream = torch.cuda.ExternalStream(handle, device=ordinal)
    return stream.stream_id, stream.device_index, stream.device_type


@cache
def _stream_of(torch: Any, stream_id: int, device_index: int, device_type: int) -> Any:
    """The object for a stream, made once."""
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


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
