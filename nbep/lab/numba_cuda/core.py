"""What programs take from `cuda.core` besides Numba: Device, streams, events, and `launch` of Numba's kernels."""

from __future__ import annotations

import sys
from collections import namedtuple
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from . import module, session
from .dispatcher import Dispatcher
from .launch import OPT_IN_BYTES, SHARED_BYTES, SM_SHARED_BYTES
from .session import Event, Stream

ComputeCapability = namedtuple("ComputeCapability", "major minor")  # as cuda.core has it


class Device:
    """The emulated GPU. properties: attributes of it, by their names in cuda.core"""

    arch, name, device_id = "90", "nbep emulator", 0
    compute_capability = ComputeCapability(*module.Device.compute_capability)
    uuid = module.Device.uuid
    default_stream = session.DEFAULT

    def __init__(self, device_id: int = 0) -> None:
        module.select_device(device_id or 0)

    @property
    def properties(self) -> Any:
        made = SimpleNamespace(**{name.lower(): value for name, value in vars(module.Device).items() if name.isupper()})
        made.__dict__.update(
            max_shared_memory_per_block_optin=OPT_IN_BYTES, max_shared_memory_per_block=SHARED_BYTES,
            max_shared_memory_per_multiprocessor=SM_SHARED_BYTES, compute_capability_major=9,
            compute_capability_minor=0, cooperative_launch=True, multi_gpu_board=False, integrated=False,
        )  # fmt: skip
        return made

    def set_current(self, context: Any = None) -> None: ...

    def create_stream(self, obj: Any = None, options: Any = None) -> Stream:
        return Stream()

    def create_event(self, options: Any = None) -> Event:
        return Event()

    def sync(self) -> None:
        module.synchronize()


class LaunchConfig(NamedTuple):
    grid: Any = 1
    block: Any = 1
    cluster: Any = None
    shmem_size: int = 0
    cooperative_launch: bool = False


def launch(stream: Any, config: LaunchConfig, kernel: Any, *args: Any) -> None:
    """Launch a kernel of @cuda.jit."""
    if not isinstance(kernel, Dispatcher):
        raise NotImplementedError("launch: the emulator runs kernels of @cuda.jit, and no code of C++, PTX or cubins")
    if config.cluster is not None:
        raise NotImplementedError("launch: clusters are not supported on the emulator")
    kernel[config.grid, config.block, stream, config.shmem_size](*args)


def _no_machine_code(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("cuda.core: code of C++, PTX or cubins cannot run on the emulator")


NAMES = {
    "Device": Device, "Stream": Stream, "Event": Event, "LaunchConfig": LaunchConfig, "launch": launch,
    "LEGACY_DEFAULT_STREAM": session.DEFAULT, "PER_THREAD_DEFAULT_STREAM": session.DEFAULT, "Program": _no_machine_code,
    "ObjectCode": _no_machine_code, "Linker": _no_machine_code,
}  # fmt: skip


class Finder:
    """Finds `cuda.core`, installed or not, and puts these names into it."""

    HOMES = ("cuda", "cuda.core", "cuda.core.experimental")
    overridden: ClassVar[dict[int, tuple[ModuleType, dict[str, Any]]]] = {}

    @staticmethod
    def find_spec(name: str, path: Any = None, *_: Any) -> Any:
        real = PathFinder.find_spec(name, path) if name in Finder.HOMES else None
        if name not in Finder.HOMES or (name == "cuda" and real is not None):
            return None
        made = ModuleSpec(name, Finder, loader_state=real, is_package=True)  # type: ignore[arg-type]
        made.submodule_search_locations = list((real and real.submodule_search_locations) or ())
        return made

    @staticmethod
    def create_module(spec: Any) -> None: ...

    @staticmethod
    def exec_module(there: ModuleType) -> None:
        real = there.__spec__.loader_state  # type: ignore[union-attr]
        if real is not None:
            real.loader.exec_module(there)
        if there.__name__ != "cuda":
            Finder.put_into(there)

    @staticmethod
    def put_into(there: ModuleType) -> None:
        """nbep compiles with the real ones, so what makes machine code stays; `launch` refuses it."""
        names = {name: one for name, one in NAMES.items() if one is not _no_machine_code or not hasattr(there, name)}
        Finder.overridden.setdefault(
            id(there), (there, {name: one for name, one in vars(there).items() if name in NAMES})
        )
        there.__dict__.update(names)


def install() -> None:
    sys.meta_path.insert(0, Finder)
    for name in Finder.HOMES[1:]:
        if name in sys.modules:
            Finder.put_into(sys.modules[name])


def uninstall() -> None:
    if Finder in sys.meta_path:
        sys.meta_path.remove(Finder)
    for there, before in Finder.overridden.values():
        for name in NAMES:
            vars(there).pop(name, None)
        there.__dict__.update(before)
    Finder.overridden.clear()
