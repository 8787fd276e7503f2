"""Kernels that belong to nbep, as its tools see them: see nbep.registry, "kernels"."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from nbep.device.jit import KERNELS, KernelSpec
from nbep.registry import registered

Describe = Callable[[int], str]
# What all libraries need: the software NIC's kernel, and the versions of what kernels call.
MODULES = ("nbep.device.by_type", "nbep.device.network.nic")


class KernelLibrary(NamedTuple):
    """package        whose modules, each imported, define the kernels and the versions of what they call
    names          prefixes of modules, behind nbep.device, that the names of kernels and faults leave out
    variants       a kernel -> the kernels that its launches choose from, itself among them
    checking       a kernel -> others that find more errors; tools compile them for no further network
    host_memory    kernels with versions for buffers in the host's memory -> the parameter that says so
    shared_cells   kernel's name, arguments, threads of a block, whether there are bulk copies -> what names a byte of
                   its shared memory; None for a kernel of another library
    """

    package: str
    names: Sequence[str]
    variants: Callable[[Callable], Sequence[Callable]]
    checking: Callable[[Callable], Sequence[Callable]]
    host_memory: Mapping[str, str]
    shared_cells: Callable[[str, Sequence[Any], int, bool], Describe | None]


def libraries() -> list[KernelLibrary]:
    return registered("kernels")


@cache
def own_modules() -> tuple[ModuleType, ...]:
    """All modules of the libraries' kernels, and all that they call."""
    names = [
        module.name
        for library in libraries()
        for module in pkgutil.walk_packages(importlib.import_module(library.package).__path__, f"{library.package}.")
    ]
    return tuple(map(importlib.import_module, (*names, *MODULES)))


def load_kernels() -> dict[str, KernelSpec]:
    """nbep's own kernels by name: KERNELS, complete because every module that has one is imported.

    So are the versions of what they call, for each kind of network and of peers.
    """
    own_modules()
    return KERNELS


def variants_of(kernel: Callable) -> list[Callable]:
    """The kernel, and what stands in for it in some launches, over the same network."""
    return list(dict.fromkeys((kernel, *(one for library in libraries() for one in library.variants(kernel)))))


def checking_variants_of(kernel: Callable) -> list[Callable]:
    """Those of the kernel that find more errors."""
    return [one for library in libraries() for one in library.checking(kernel)]


def describe_shared(kernel: str, args: Sequence[Any], num_threads: int, has_tma: bool) -> Describe | None:
    """What names the bytes of a block's shared memory; None for a kernel of no library here."""
    found = (library.shared_cells(kernel, args, num_threads, has_tma) for library in libraries())
    return next((describe for describe in found if describe is not None), None)
