"""Makes `numba.cuda` the emulator's, in this process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from . import children, core, dispatcher, launch, memory, module, session, stubs
from .code import KernelTypeError, exec_with_source
from .types import BF16

# Modules of Numba that work without a GPU, and are taken as they are.
SUBMODULES = (
    "random", "testing", "tests", "libdevice", "np", "types", "errors", "compiler", "utils", "extending", "core",
    "typing", "misc", "vector_types", "kernels",
)  # fmt: skip
_overridden: dict[str, Any] = {}


# Modules of numba-cuda's successor, installed or not, and what they are here; those behind them follow.
SUCCESSOR = {
    "numba_cuda_mlir.types": "numba.types", "numba_cuda_mlir.errors": "numba.cuda.core.errors",
    "numba_cuda_mlir.cuda": "numba.cuda", "numba_cuda_mlir.numba_cuda": "numba.cuda", "numba_cuda_mlir": "numba.cuda",
}  # fmt: skip


class Successor:
    """Finds modules of `numba_cuda_mlir`, except for nbep's own compiler, which needs the real one."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> Any:
        frame = sys._getframe(1) if name.partition(".")[0] == "numba_cuda_mlir" else None
        while frame is not None and frame.f_globals.get("__name__") != "nbep.device.compilers.numba_cuda_mlir":
            frame = frame.f_back
            if frame is None:
                return ModuleSpec(name, Successor, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: Any) -> None: ...

    @staticmethod
    def exec_module(there: ModuleType) -> None:
        name = there.__name__
        of, here = next(one for one in SUCCESSOR.items() if name == one[0] or name.startswith(f"{one[0]}."))
        if name == of == "numba_cuda_mlir":
            there.__getattr__ = lambda one: importlib.import_module(f"{name}.{one}")  # type: ignore[method-assign]
            return
        if name == "numba_cuda_mlir.cuda":
            sys.modules[name] = made = Cuda("numba.cuda")
            made.__dict__.update(sys.modules["numba.cuda"].__dict__, HAS_NUMBA=False)
            made.__dict__.update(shared_array=stubs.shared.array, local_array=stubs.local.array)  # type: ignore[attr-defined]
            made.jit = functools.partial(dispatcher.jit, successor=True)  # type: ignore[attr-defined]
            return
        try:
            found = importlib.import_module(here + name.removeprefix(of))
            is_numbas = name.endswith(".types") and not hasattr(found, "int32")  # where numba-cuda is not installed
            sys.modules[name] = importlib.import_module("numba.types") if is_numbas else found
        except ModuleNotFoundError as error:
            message = f"{name} is not supported on the emulator: {error}"
            raise ModuleNotFoundError(message, name=name) from None


class Cuda(ModuleType):
    """The module. What it does not have itself is one of Numba's types, or a module of Numba's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in stubs.VECTORS:
            return stubs.VECTORS[name]
        if name == "bfloat16":
            return importlib.import_module("numba.cuda.bf16").bfloat16
        if name == "CudaSupportError":
            return importlib.import_module("numba.cuda.cudadrv.error").CudaSupportError
        if name == "config":
            config: Any = importlib.import_module("numba.cuda.core.config")
            if not hasattr(config, "CUDA_ENABLE_NRT"):  # memory management in kernels, which is not supported
                config.CUDA_ENABLE_NRT = False
            return config
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
    driver = _submodule(
        "cudadrv.driver", driver=module.DRIVER, CudaAPIError=module.CudaAPIError, Stream=session.Stream,
        Event=session.Event, __getattr__=lambda name: _of_numba(f"{path[0]}/cudadrv/driver.py", name),
    )  # fmt: skip
    parts = {"devicearray": arrays, "devices": devices, "driver": driver}
    package = _submodule("cudadrv", **parts)
    package.__path__ = [f"{one}/cudadrv" for one in path]
    return {"cudadrv": package, **{f"cudadrv.{name}": part for name, part in parts.items()}}


@functools.cache
def _loaded(path: str) -> ModuleType:
    folder, name = Path(path).parent.name, Path(path).stem
    package = "numba.cuda" if folder == "cuda" else f"numba.cuda.{folder}"
    spec = importlib.util.spec_from_file_location(f"{package}._{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _of_numba(path: str, name: str) -> Any:
    """What a module of Numba has that the emulator's does not replace."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(_loaded(path), name)
    except ImportError as error:
        raise AttributeError(f"{name}: {error}") from None


def _vectorizers(path: str) -> ModuleType:
    """Numba's module, loaded when it is used: its ufuncs are kernels made of text, of which a copy stays."""

    def found(name: str) -> Any:
        if not name.startswith("__") and "numba.cuda.np.ufunc" not in sys.modules:
            importlib.import_module("numba.cuda.np.ufunc")  # these import each other, and only in this order
        value = _of_numba(path, name)
        sys.modules["numba.cuda.deviceufunc"].exec = exec_with_source  # type: ignore[attr-defined]
        return value

    return _submodule("vectorizers", __getattr__=found)


def _bf16(**names: Any) -> ModuleType:
    """Numba's module of bfloat16, and the one behind it, whose names are those of C."""
    parts = {name: part for name, part in vars(stubs.bf16).items() if name != "_name"}
    own = getattr(importlib.import_module("numba.cuda.types"), "bfloat16", BF16.dtype.type)
    of_c = {f"__{name}": one for name, one in parts.items()}
    return _submodule("bf16", **parts, **of_c, bfloat16=own, nv_bfloat16=own, **names)


def _no_machine_code(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError("the emulator makes no machine code")


def _taken_out() -> dict[str, ModuleType]:
    """The modules of numba.cuda and of its successor, which are not imported any more."""
    names = [name for name in sys.modules if f"{name}.".startswith(("numba.cuda.", "numba_cuda_mlir."))]
    return {name: sys.modules.pop(name) for name in names}


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
        jit=dispatcher.jit, declare_device=dispatcher.declare_device, In=launch.In, Out=launch.Out, InOut=launch.InOut
    )
    _overridden.update(_taken_out())
    sys.modules["numba.cuda"] = numba.cuda = here
    home = here.__path__[0] if here.__path__ else ""
    errors = _submodule("core.errors", TypingError=KernelTypeError)  # which the emulator's compiler raises
    errors.__getattr__ = functools.partial(_of_numba, f"{home}/core/errors.py")  # type: ignore[method-assign]
    parts = {
        "cg": _submodule("cg", this_grid=stubs.cg.this_grid),  # type: ignore[attr-defined]
        "api": _submodule("api", **_names(module)),
        "args": _submodule(
            "args", ArgHint=launch.ArgHint, In=launch.In, Out=launch.Out, InOut=launch.InOut, wrap_arg=launch.wrap_arg
        ),
        "dispatcher": _submodule("dispatcher", CUDADispatcher=dispatcher.Dispatcher),
        "decorators": _submodule("decorators", jit=dispatcher.jit, declare_device=dispatcher.declare_device),
        "stubs": stubs,
        "bf16": _bf16(),
        "_internal.cuda_bf16": _bf16(__getattr__=_no_machine_code),  # what the compiler takes of it besides
        "core.errors": errors,
        "vectorizers": _vectorizers(f"{home}/vectorizers.py"),
        **_cudadrv(here.__path__),
    }
    for name, made in parts.items():
        sys.modules[f"numba.cuda.{name}"] = made
        if "." not in name and name not in ("cg", "stubs"):
            setattr(here, name, made)
    children.follow()
    sys.meta_path.insert(0, Successor)
    core.install()
    here.devicearray = parts["cudadrv.devicearray"]  # type: ignore[attr-defined]
    here.devices = parts["cudadrv.devices"]  # type: ignore[attr-defined]


def uninstall() -> None:
    """Undo `install`, if it is done."""
    import numba

    if not isinstance(sys.modules.get("numba.cuda"), Cuda):
        return
    children.leave_alone()
    core.uninstall()
    if Successor in sys.meta_path:
        sys.meta_path.remove(Successor)
    _taken_out()
    sys.modules.update(_overridden)
    if "numba.cuda" in _overridden:
        numba.cuda = _overridden["numba.cuda"]
    elif hasattr(numba, "cuda"):
        del numba.cuda
    _overridden.clear()
