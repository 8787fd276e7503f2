"""Arrays in the CPU's memory, as the emulator takes them: NumPy's, and torch's tensors, each as one of NumPy.

torch is not imported here: a value's own class tells that it is a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbep.host.target.libraries import TorchArrays, library_of, numpy_dtype, torch_says

CARRIERS = {1: "uint8", 2: "int16"}  # for dtypes that torch and NumPy do not both know: as many bytes


class CpuTensors(TorchArrays):
    """torch.Tensor on the CPU."""

    @staticmethod
    def is_array(value: Any) -> bool:
        return library_of(value) is TorchArrays and value.device.type == "cpu"

    @staticmethod
    def flaw(tensor: Any) -> str:
        """As of TorchArrays; also why NumPy cannot take it."""
        flaw = TorchArrays.flaw(tensor)
        if flaw:
            return flaw
        try:
            CpuTensors.view(tensor)
        except Exception as error:  # of a dtype that NumPy does not know, say
            return torch_says(error)
        return ""

    @staticmethod
    def name_of(dtype: Any) -> str:
        """NumPy's name of a dtype of torch."""
        return str(dtype).removeprefix("torch.")

    @staticmethod
    def view(tensor: Any) -> np.ndarray:
        """A NumPy array of the tensor's memory."""
        name, tensor = TorchArrays.dtype_name(tensor), tensor.detach()
        if not _is_extended(name):
            return tensor.numpy()
        return tensor.view(TorchArrays.dtype(CARRIERS[tensor.dtype.itemsize])).numpy().view(numpy_dtype(name))

    @staticmethod
    def wrap(array: np.ndarray, name: str) -> Any:
        """A tensor of an array's memory. name: of its dtype"""
        torch = sys.modules["torch"]
        if not _is_extended(name):
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(CARRIERS[array.itemsize])).view(TorchArrays.dtype(name))


def _is_extended(name: str) -> bool:
    """Whether NumPy has the dtype from ml_dtypes, and torch its own."""
    return numpy_dtype(name).isbuiltin != 1


def is_torch_dtype(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


@contextmanager
def own_modes() -> Iterator[None]:
    """Ranks that take turns in one thread each keep what torch has for a thread: gradients, and torch.compile.

    Nothing is compiled meanwhile: other ranks and their kernels run.
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "_C"):
        yield
        return
    is_enabled = torch.is_grad_enabled()
    set_compiler = torch._C._dynamo.eval_frame.set_eval_frame if "torch._dynamo" in sys.modules else lambda _: None
    compiler = set_compiler(None)
    try:
        yield
    finally:
        torch._C._set_grad_enabled(is_enabled)
        set_compiler(compiler)
