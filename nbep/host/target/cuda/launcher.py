"""Kernels, ready to launch: compiled or read from the cache once, loaded once, their parameter blocks packed in place.

 first process    source --Numba, NVVM, nvJitLink--> cubin --> cache --> module
 later processes                                     cache ------------> module        (numba is not imported)

Only nbep's own kernels are kept on disk. They call nothing outside of nbep/device, so the sources there say whether a
cubin is out of date. A kernel from elsewhere may call any module and read any global; what it is made of is known only
when Numba has gone through it, which is most of a compilation. So a process compiles it anew.

Numba's own dispatcher costs 44 to 50 us a launch with 16 to 24 arguments; packing a struct and calling the driver
costs a tenth.

Source: CUDA Driver API, cuLaunchKernelEx; DeepEP csrc/kernels/launch.cuh
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import driver as cu

import nbep.device
from nbep.device import cache, compilers
from nbep.device.by_type import IbgdaNetwork
from nbep.device.cards import SM90, ComputeCapability
from nbep.device.jit import KernelSpec
from nbep.device.protocols.peers import Bounds
from nbep.device.types import Param, param_format
from nbep.host.target.cuda.driver import check

COMPILED_BY = (
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-nvshmem-cu13",
)


def source_key() -> str:
    """A digest of everything that a cubin of an own kernel depends on, besides kernel and architecture."""
    digest = hashlib.sha256()
    folder = Path(nbep.device.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    for package in (*compilers.PACKAGES[compilers.chosen_name()], *COMPILED_BY):
        try:
            digest.update(f"{package} {metadata.version(package)}\n".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{package} absent\n".encode())
    return digest.hexdigest()[:24]


def load_cubin(spec: KernelSpec, cc: ComputeCapability, key: str) -> bytes:
    """The machine code of a kernel. One of nbep's own comes from the cache if it is there.

    Raises: as compile_kernel
    """
    name = f"{spec.label}-sm_{cc[0]}{cc[1]}-{key}.cubin"
    cubin = cache.read(name) if spec.is_own else None
    if cubin is None:
        from nbep.device.compile import compile_kernel

        cubin = compile_kernel(spec, cc).cubin
        if spec.is_own:
            cache.keep(name, cubin)
    return cubin


SUCCESS = cu.CUresult.CUDA_SUCCESS


class ParameterBlock:
    """The parameters of one launch in memory, where the driver reads them."""

    def __init__(self, params: Sequence[Param]):
        self._params = tuple(params)
        self._format = struct.Struct(param_format(self._params))
        self._bytes = ctypes.create_string_buffer(max(1, self._format.size))
        base = ctypes.addressof(self._bytes)
        offset = 0
        addresses = []
        self._offsets: list[int] = []
        for param in params:
            size = struct.calcsize(param.type.code)
            offset = -(-offset // size) * size
            addresses.append(base + offset)
            self._offsets.append(offset)
            offset += size
        self._pointers = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self.address = ctypes.addressof(self._pointers)

    def pack(self, leaves: Sequence[Any]) -> None:
        self._format.pack_into(self._bytes, 0, *leaves)

    def packer(self, num_params: int) -> Callable[..., None]:
        """A function that takes the first parameters and packs only those; the others stay as they are."""
        return partial(struct.Struct(param_format(self._params[:num_params])).pack_into, self._bytes, 0)

    def packer_of(self, index: int) -> Callable[..., None]:
        """A function that takes one parameter and packs it; the others stay as they are."""
        code = param_format(self._params[index : index + 1])
        return partial(struct.Struct(code).pack_into, self._bytes, self._offsets[index])


class SharedMemoryLimit:
    """How much dynamic shared memory launches of a function may ask for; above 48 KiB it has to be raised first.

    The threads of virtual ranks have it in common: one that sets what itself needs would lower what another has set.
    """

    def __init__(self, function: Any):
        self._function = function
        self._num_bytes = 0
        self._lock = threading.Lock()

    def raise_to(self, num_bytes: int) -> None:
        with self._lock:
            if num_bytes > self._num_bytes:
                attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self._function, attribute, num_bytes))
                self._num_bytes = num_bytes


class Card(NamedTuple):
    """The GPU that kernels are loaded on. num_ranks of this process share it: what spins must be resident for all."""

    compute_capability: ComputeCapability
    num_sms: int
    num_ranks: int


class LoadedKernel:
    """One kernel on one device. A launch copies its parameters, so one block serves all launches, one at a time.

    Threads of one rank, such as torch's for the backward pass, launch through the same one: they take turns.

    is_own: it is nbep's, and `Buffer` has checked its arguments
    spins: it takes Bounds, or queues that a NIC serves, so it waits for blocks of others, and all its blocks must be
           resident
    queues: which of its parameters is the address of such queues; -1 if none
    addresses: which of its parameters are addresses
    """

    def __init__(self, spec: KernelSpec, module: Any, card: Card, smem_limit: SharedMemoryLimit | None = None):
        self.spec = spec
        self.module = module
        self.card = card
        self.function = check("cuModuleGetFunction", cu.cuModuleGetFunction(module, spec.entry_name.encode()))
        self.is_own = spec.is_own
        self.queues = -1
        for name, hint in spec.hints.items():
            if hint is IbgdaNetwork:
                self.queues = [param.path for param in spec.params].index(f"{name}.queue_pairs")
        self.spins = Bounds in spec.hints.values() or self.queues >= 0
        self.addresses = tuple(i for i, param in enumerate(spec.params) if param.type.is_address)
        self.block = ParameterBlock(spec.params)
        self._turn = threading.Lock()
        self._smem_limit = smem_limit or SharedMemoryLimit(self.function)
        self._configs: dict[tuple[int, int, int, int], Any] = {}

    @classmethod
    def load(cls, spec: KernelSpec, card: Card, key: str) -> LoadedKernel:
        cubin = load_cubin(spec, card.compute_capability, key)
        return cls(spec, check("cuModuleLoadData", cu.cuModuleLoadData(cubin)), card)

    def for_rank(self) -> LoadedKernel:
        """The same kernel with a parameter block of its own: no virtual rank waits for another one's launches."""
        return LoadedKernel(self.spec, self.module, self.card, self._smem_limit)

    def config(self, stream: int, grid: int, block: int, smem_bytes: int) -> Any:
        """The launch configuration, made once.

        Raises: ValueError if the kernel spins and its blocks, with those of the card's other ranks, cannot be resident
        """
        config = self._configs.get((stream, grid, block, smem_bytes))
        if config is None:
            config = self._configs[stream, grid, block, smem_bytes] = self._place(stream, grid, block, smem_bytes)
        return config

    def launch(self, stream: int, grid: int, block: int, smem_bytes: int, leaves: Sequence[Any]) -> None:
        """Queue the kernel.

        Raises: ValueError as config
        """
        config = self.config(stream, grid, block, smem_bytes)
        with self._turn:
            self.block.pack(leaves)
            self.start(config, self.block)

    def start(self, config: Any, parameters: ParameterBlock) -> None:
        """Queue the kernel with parameters that are packed."""
        code = cu.cuLaunchKernelEx(config, self.function, parameters.address, 0)
        if code[0] != SUCCESS:
            check(f"launch of {self.spec.name} with {config.gridDimX} blocks of {config.blockDimX} threads", code)

    def _place(self, stream: int, grid: int, block: int, smem_bytes: int) -> Any:
        """The configuration with the first of the kernel's clusters that divides the grid and leaves room for all."""
        self._smem_limit.raise_to(smem_bytes)
        clusters = self.spec.clusters if self.card.compute_capability >= SM90 else ()
        room = 0
        for cluster in (*clusters, 1):
            if grid % cluster == 0:
                config = self._make_config(stream, grid, block, smem_bytes, cluster)
                if cluster == 1 and not self.spins:
                    return config
                room = self._room(config, block, smem_bytes, cluster) // self.card.num_ranks
                if grid <= room or (room > 0 and not self.spins):
                    return config
        name = "config: num_sms" if self.is_own else f"{self.spec.name}, grid:"
        raise ValueError(
            f"{name} {grid} with {block} threads a block; at most {room} blocks fit on a card of "
            f"{self.card.num_sms} SMs that {self.card.num_ranks} ranks share"
        )

    def _room(self, config: Any, block: int, smem_bytes: int, cluster: int) -> int:
        """How many blocks the card holds at once. Beside those that use queues an SM is left for each rank's NIC."""
        if cluster > 1:
            return cluster * check(
                "cuOccupancyMaxActiveClusters", cu.cuOccupancyMaxActiveClusters(self.function, config)
            )
        num_sms = self.card.num_sms if self.queues < 0 else self.card.num_sms - self.card.num_ranks
        return num_sms * check(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, block, smem_bytes),
        )

    def _make_config(self, stream: int, grid: int, block: int, smem_bytes: int, cluster: int) -> Any:
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = smem_bytes
        config.hStream = cu.CUstream(stream)
        names = cu.CUlaunchAttributeID
        attributes = []
        if self.spins:  # the driver, too, refuses a grid that cannot be resident at once
            value = cu.CUlaunchAttributeValue()
            value.cooperative = 1
            attributes.append(_attribute(names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
        if cluster > 1:
            value = cu.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attributes.append(_attribute(names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


def _attribute(name: Any, value: Any) -> Any:
    attribute = cu.CUlaunchAttribute()
    attribute.id = name
    attribute.value = value
    return attribute
