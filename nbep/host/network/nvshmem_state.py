"""Queue pairs of a real NIC: those that NVSHMEM has made, described as the kernels of `ibgda` want them.

 NVSHMEM: init with IBGDA --> constants of a module that is registered with it --copy--> bytes --describe--> QueuePairs

DeepEP's kernels include NVSHMEM's header and use its structures as they are. Here the host reads them once, and writes
down what a kernel needs: the same description that the software NIC's queues have. NVSHMEM must not post to these queue
pairs any more, because it would not see their heads move. So those that it made on request (nvshmemx_qp_create) are
taken where there are any, and its default ones otherwise.

It takes an mlx5 NIC, a driver that maps its registers for the GPU, and NVSHMEM_IB_ENABLE_IBGDA=1 in the environment
before NVSHMEM starts. No machine that nbep is developed on has one: what is tested is `describe`, on bytes made by the
tests, the offsets, against NVSHMEM's headers, and that each missing part is named. `read_queue_pairs` has never met a
NIC.

Source: DeepEP csrc/kernels/ibgda_device.cuh (ibgda_get_rc, ibgda_get_lkey_and_rkey); NVSHMEM 3.8
include/non_abi/device/pt-to-pt/ibgda_device.cuh (ibgda_get_rc, ibgda_get_lkey, ibgda_get_raddr_rkey)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nbep.device.network.ibgda.queue_pair import (
    COMPLETION,
    DOORBELL,
    ENTRIES,
    MAX_ENTRIES,
    MIN_ENTRIES,
    NUM_ENTRIES,
    NUM_WORDS,
    QPN,
    READY,
    RECORD,
    RESERVED,
    RESULT,
    RESULT_KEY,
)
from nbep.host.network.nvshmem_layout import (
    COMPLETION_QUEUE,
    HOST_STATE,
    IBGDA_STATE,
    KEY,
    LIBRARY_VERSION,
    MAX_CONST_KEYS,
    QUEUE_PAIR,
    TYPE_RC,
)

Read = Callable[[int, int], bytes]  # (address, num_bytes) -> what is there

NEEDS = "it takes an mlx5 NIC and NVSHMEM_IB_ENABLE_IBGDA=1 before NVSHMEM starts"
INVALID_SCALAR = 0xFFFFFFFF
NIC = 0  # of those that NVSHMEM uses for this GPU, the one whose queue pairs are taken


class QueuePairs(NamedTuple):
    """What kernels need to know of a NIC. Keys are as they go into an entry: the bytes of a big-endian word."""

    queue_pairs: np.ndarray  # [num_ranks, num_qps, NUM_WORDS] s64; zeros for this rank itself
    remote_bases: np.ndarray  # [num_ranks] s64: where each rank itself sees its buffer
    local_keys: np.ndarray  # [num_chunks] s32
    remote_keys: np.ndarray  # [num_ranks, num_chunks] s32
    log2_chunk: int
    heap_offset: int  # bytes from the start of chunk 0 to the buffer


class Images(NamedTuple):
    """The bytes of NVSHMEM's two constants, and the version of its library."""

    ibgda: bytes
    host: bytes
    library_version: tuple[int, int]


def describe(images: Images, read: Read, buffer: int, num_bytes: int) -> QueuePairs:
    """The queue pairs and keys for a buffer in the symmetric heap.

    Args:    images     see there
             read       copies memory of the GPU, to which the constants point
             buffer     its address here; num_bytes: its size
    Returns: see QueuePairs
    Raises:  RuntimeError, which names what is missing, wrong or of another version; ValueError for another buffer
    """
    if images.library_version != LIBRARY_VERSION:
        got, known = (".".join(map(str, version)) for version in (images.library_version, LIBRARY_VERSION))
        raise RuntimeError(f"NVSHMEM: got version {got}; nbep knows the queue pairs of {known} alone")
    host = HOST_STATE.read(images.host)
    check_host(host, buffer, num_bytes)
    state = IBGDA_STATE.read(images.ibgda)
    check_state(state)
    num_ranks, heap_offset = host["npes"], buffer - host["heap_base"]
    log2_chunk, num_nics = state["log2_cumem_granularity"], state["num_devices_initialized"]
    num_chunks = ((heap_offset + num_bytes - 1) >> log2_chunk) + 1
    local_keys = read_keys(state, "lkeys", read, num_chunks * num_nics).reshape(num_chunks, num_nics)
    remote_keys = read_keys(state, "rkeys", read, num_chunks * num_ranks * num_nics)
    heaps = np.frombuffer(read(host["peer_heap_base_remote"], 8 * num_ranks), np.int64)
    return QueuePairs(
        read_table(state, read, num_ranks, host["mype"]),
        heaps + heap_offset,
        np.ascontiguousarray(local_keys[:, NIC]),
        np.ascontiguousarray(remote_keys.reshape(num_chunks, num_ranks, num_nics)[:, :, NIC].T),
        log2_chunk,
        heap_offset,
    )


def check_host(host: dict[str, Any], buffer: int, num_bytes: int) -> None:
    """Raises: RuntimeError if NVSHMEM does not run, or not so that kernels can use it; ValueError for the buffer"""
    if not host["nvshmemi_is_nvshmem_initialized"]:
        raise RuntimeError("NVSHMEM is not initialised")
    if not host["ibgda_is_initialized"]:
        raise RuntimeError(f"NVSHMEM's IBGDA is not initialised: {NEEDS}")
    if host["enable_rail_opt"]:
        raise RuntimeError("NVSHMEM sends over other ranks (NVSHMEM_ENABLE_RAIL_OPT); nbep does not")
    if host["peer_heap_base_remote"] == 0:
        raise RuntimeError("NVSHMEM has no addresses of the peers' heaps")
    end = host["heap_base"] + host["heap_size"]
    if not host["heap_base"] <= buffer <= buffer + num_bytes <= end:
        heap = f"the symmetric heap, {host['heap_base']:#x} to {end:#x}"
        raise ValueError(f"buffer: got {num_bytes} bytes from {buffer:#x} on; must be in {heap}")


def check_state(state: dict[str, Any]) -> None:
    """Raises: RuntimeError if NVSHMEM has made no queue pairs, or none that kernels can use"""
    if state["num_rc_per_pe"] in (0, INVALID_SCALAR):
        raise RuntimeError(f"NVSHMEM has no reliable connections (num_rc_per_pe {state['num_rc_per_pe']}): {NEEDS}")
    if state["num_devices_initialized"] <= 0:
        raise RuntimeError(f"NVSHMEM has found no NIC for IBGDA ({state['num_devices_initialized']}): {NEEDS}")
    if state["globalmem.rcs"] == 0:
        raise RuntimeError(f"NVSHMEM has no queue pairs (globalmem.rcs is 0): {NEEDS}")
    if state["log2_cumem_granularity"] > 48:
        raise RuntimeError(
            f"NVSHMEM has not registered its heap (chunks of 2**{state['log2_cumem_granularity']} bytes)"
        )
    if state["use_async_postsend"]:
        raise RuntimeError("NVSHMEM's doorbells are rung by the CPU: it takes NVSHMEM_IBGDA_NIC_HANDLER=gpu")


def read_keys(state: dict[str, Any], name: str, read: Read, num_keys: int) -> np.ndarray:
    """The first keys of a table: some are in the constant, the others where it points to. [num_keys] s32"""
    image = state[f"constmem.{name}"][: KEY.num_bytes * num_keys]
    num_others = num_keys - MAX_CONST_KEYS
    if num_others > 0:
        if state[f"globalmem.{name}"] == 0:
            raise RuntimeError(f"NVSHMEM has {num_keys} keys, but globalmem.{name} is 0")
        image += read(state[f"globalmem.{name}"], KEY.num_bytes * num_others)
    keys = np.array([key["key"] for key in KEY.read_all(image)], np.uint32).view(np.int32)
    if (keys == -1).any():
        raise RuntimeError(f"NVSHMEM has not registered chunk {int((keys == -1).argmax())} of {name}")
    return keys


def read_table(state: dict[str, Any], read: Read, num_ranks: int, rank: int) -> np.ndarray:
    """The descriptions of the queue pairs of one NIC: those made on request, else the default ones."""
    num_nics = state["num_devices_initialized"]
    num_rows, num_default = state["num_rc_per_pe"] * num_nics, state["num_default_rc_per_pe"] * num_nics
    image = read(state["globalmem.rcs"], num_rows * num_ranks * QUEUE_PAIR.num_bytes)
    pairs = list(QUEUE_PAIR.read_all(image))
    rows = [pairs[num_ranks * row : num_ranks * (row + 1)] for row in range(num_rows)]
    chosen = [row for row in rows[num_default:] if is_of_nic(row, rank)] or [
        row for row in rows if is_of_nic(row, rank)
    ]
    if not chosen:
        raise RuntimeError(f"NVSHMEM has no queue pairs of NIC {NIC}")
    table = np.zeros((num_ranks, len(chosen), NUM_WORDS), np.int64)
    for number, row in enumerate(chosen):
        for peer, pair in enumerate(row):
            if peer != rank:
                table[peer, number] = describe_pair(pair, read, peer)
    return table


def is_of_nic(row: list[dict[str, Any]], rank: int) -> bool:
    return all(pair["dev_idx"] == NIC for peer, pair in enumerate(row) if peer != rank)


def describe_pair(pair: dict[str, Any], read: Read, peer: int) -> np.ndarray:
    """The words of one queue pair. Raises: RuntimeError if it is not one that kernels can use"""
    what = f"queue pair {pair['qpn']} to rank {peer}"
    if pair["qp_type"] != TYPE_RC or pair["qpn"] == INVALID_SCALAR:
        raise RuntimeError(f"{what} is no reliable connection: got type {pair['qp_type']}")
    names = ("tx_wq.wqe", "tx_wq.dbrec", "tx_wq.bf", "tx_wq.cq", "ibuf.buf")
    missing = [name for name in names if pair[name] == 0]
    if missing:
        raise RuntimeError(f"{what} has no {', '.join(missing)}")
    num_entries = pair["tx_wq.nwqes"]
    if not MIN_ENTRIES <= num_entries <= MAX_ENTRIES or num_entries & (num_entries - 1):
        allowed = f"a power of two from {MIN_ENTRIES} to {MAX_ENTRIES} (NVSHMEM_QP_DEPTH)"
        raise RuntimeError(f"{what} has {num_entries} entries; must be {allowed}")
    head = pair["mvars.tx_wq.resv_head"]
    if head != pair["mvars.tx_wq.ready_head"]:
        raise RuntimeError(f"{what} is in use: {head} entries are reserved, {pair['mvars.tx_wq.ready_head']} ready")
    queue = COMPLETION_QUEUE.read(read(pair["tx_wq.cq"], COMPLETION_QUEUE.num_bytes))
    if queue["cqe"] == 0:
        raise RuntimeError(f"{what} has no completion queue")
    words = np.zeros(NUM_WORDS, np.int64)
    words[ENTRIES], words[RECORD], words[DOORBELL] = pair["tx_wq.wqe"], pair["tx_wq.dbrec"], pair["tx_wq.bf"]
    words[COMPLETION], words[RESULT], words[RESULT_KEY] = queue["cqe"], pair["ibuf.buf"], pair["ibuf.lkey"]
    words[NUM_ENTRIES], words[QPN] = num_entries, pair["qpn"]
    words[RESERVED] = words[READY] = head & 0xFFFFFFFF  # the low half of the word is the counter
    return words


def read_queue_pairs(buffer: int, num_bytes: int, cc: tuple[int, int]) -> QueuePairs:
    """The same from the NVSHMEM of this process, which must run; see `nbep.host.network.nvshmem`.

    Args:    buffer  its address here, in the symmetric heap; num_bytes: its size
             cc      compute capability of the current GPU
    Raises:  RuntimeError that names what is missing: the package, the library, its constants, IBGDA, or a NIC
    """
    from cuda.bindings import driver as cu

    from nbep.device.network.nvshmem_library import compile_constants
    from nbep.host.network.nvshmem import load_library
    from nbep.host.runtime.cuda.driver import check

    def copy(address: int, size: int) -> bytes:
        values = np.empty(size, np.uint8)
        check("cuMemcpyDtoH of NVSHMEM's state", cu.cuMemcpyDtoH(values.ctypes.data, address, size))
        return values.tobytes()

    def constant(name: str) -> bytes:
        code, address, size = cu.cuModuleGetGlobal(module, name.encode())
        if code != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"NVSHMEM's device library has no symbol {name} ({code.name})")
        return copy(int(address), size)

    library = load_library()
    version = library.version()
    module = check("cuModuleLoadData", cu.cuModuleLoadData(compile_constants(cc)))
    try:
        library.register(int(module))
        try:
            images = Images(constant("nvshmemi_ibgda_device_state_d"), constant("nvshmemi_device_state_d"), version)
            return describe(images, copy, buffer, num_bytes)
        finally:
            library.unregister(int(module))
    finally:
        check("cuModuleUnload", cu.cuModuleUnload(module))
