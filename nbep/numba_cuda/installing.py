"""Makes `numba.cuda` the emulator's, in this process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from . import args, dispatcher, memory, module, session, stubs

# Modules of Numba that work without a GPU, and are taken as they are.
SUBMODULES = (
    "random", "testing", "tests", "libdevice", "np", "types", "errors", "compiler", "utils", "extending", "core",
    "typing", "misc", "vector_types", "kernels",
)  # fmt: skip
_overridden: dict[str, Any] = {}


class Cuda(ModuleType):
    """The module. What it does not have itself is one of Numba's types, or a module of Numba's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in stubs.VECTORS:
            return stubs.VECTORS[name]
        if name == "CudaSupportError":
            return importlib.import_module("numba.cuda.cudadrv.error").CudaSupportError
        if name == "config":
            return importlib.import_module("numba.cuda.core.config")
        if name in SUBMODULES:
            return importlib.import_module(f"numba.cuda.{name}")
        import numba

        if not name.startswith("_") and hasattr(numba.types, name):
            return getattr(numba.types, name)
        raise AttributeError(f"numba.cuda.{name} is not supported on the emulator")


def _names(of: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(of).items() if not name.startswith("__")}


def _submodule(name: str, **names: Any) -> ModuleType:
    made = ModuleType(f"numba.cuda.{name}")
    made.__dict__.update(names)
    return made


def _cudadrv(path: list[str]) -> dict[str, ModuleType]:
    """What programs take from numba.cuda.cudadrv."""
    arrays = _submodule(
        "cudadrv.devicearray",
        DeviceNDArray=memory.DeviceNDArray,
        DeviceRecord=memory.DeviceRecord,
        is_cuda_ndarray=lambda value: getattr(value, "__cuda_ndarray__", False),
        auto_device=module._auto_device,
        device_array=module.device_array,
        from_array_like=lambda ary, stream=0, gpu_data=None: module.device_array_like(ary, stream),
    )
    devices = _submodule(
        "cudadrv.devices", gpus=module.gpus, get_context=module.current_context, reset=session.reset,
        require_context=module.require_context,
    )  # fmt: skip
    parts = {"devicearray": arrays, "devices": devices}
    package = _submodule("cudadrv", **parts)
    package.__path__ = [f"{one}/cudadrv" for one in path]
    return {"cudadrv": package, **{f"cudadrv.{name}": part for name, part in parts.items()}}


def install() -> None:
    """Let `numba.cuda` be the emulator's in this process, also where it has been imported already.

    Kernels that were decorated before stay what they are. Raises: ImportError without Numba
    """
    import numba

    if isinstance(sys.modules.get("numba.cuda"), Cuda):
        return
    spec = importlib.util.find_spec("numba.cuda")
    here = Cuda("numba.cuda", module.__doc__)
    here.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    here.__spec__ = spec
    here.__dict__.update(_names(stubs) | _names(module))
    here.__dict__.update(
        jit=dispatcher.jit, declare_device=dispatcher.declare_device, CUDADispatcher=dispatcher.Dispatcher, In=args.In,
        Out=args.Out, InOut=args.InOut,
    )  # fmt: skip
    for name in [one for one in sys.modules if one == "numba.cuda" or one.startswith("numba.cuda.")]:
        _overridden[name] = sys.modules.pop(name)
    sys.modules["numba.cuda"] = numba.cuda = here
    parts = {
        "cg": _submodule("cg", this_grid=stubs.cg.this_grid),  # type: ignore[attr-defined]
        "api": _submodule("api", **_names(module)),
        "args": args,
        "dispatcher": _submodule("dispatcher", CUDADispatcher=dispatcher.Dispatcher),
        "decorators": _submodule("decorators", jit=dispatcher.jit, declare_device=dispatcher.declare_device),
        "stubs": stubs,
        **_cudadrv(here.__path__),
    }
    for name, made in parts.items():
        sys.modules[f"numba.cuda.{name}"] = made
        if "." not in name and name not in ("cg", "stubs"):
            setattr(here, name, made)
    here.devicearray = parts["cudadrv.devicearray"]  # type: ignore[attr-defined]
    here.devices = parts["cudadrv.devices"]  # type: ignore[attr-defined]


def uninstall() -> None:
    """Undo `install`."""
    import numba

    for name in [one for one in sys.modules if one == "numba.cuda" or one.startswith("numba.cuda.")]:
        del sys.modules[name]
    sys.modules.update(_overridden)
    if "numba.cuda" in _overridden:
        numba.cuda = _overridden["numba.cuda"]
    elif hasattr(numba, "cuda"):
        del numba.cuda
    _overridden.clear()
