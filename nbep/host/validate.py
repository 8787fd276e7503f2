"""Checks of what the user passes, all before anything is launched or allocated.

Every failure is a ValueError that says which argument it is, what came and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from nbep.device.layout.internode import MAX_RDMA_RANKS
from nbep.device.layout.intranode import (
    MAX_LOCAL_EXPERTS,
    MAX_TOPK,
    TRAILER_BYTES,
)
from nbep.device.layout.low_latency import MAX_RANKS
from nbep.device.layout.low_latency import trailer_bytes as rdma_trailer_bytes
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.arguments import flags, integer, refuse
from nbep.host.config import Sizes
from nbep.host.events import EventOverlap, handle_of
from nbep.host.handles import ArraysHandle
from nbep.host.internode.memory import check_nodes
from nbep.host.node import NodeMemory
from nbep.host.ranks.comm import Communicator, is_mpi_comm
from nbep.host.shared_memory import symmetric_bytes
from nbep.host.target.arrays import View
from nbep.host.target.base import Array, Runtime
from nbep.host.target.memory import SymmetricMemory

INTRANODE_RANKS = (2, 4, 8)
AnyHandle = TypeVar("AnyHandle", bound=ArraysHandle)


def array(
    name: str,
    view: View,
    dtypes: str | tuple[str, ...],
    shape: tuple[int | str, ...],
    contiguous: bool = True,
    aligned: bool = False,
) -> None:
    """An array of one of the dtypes. An int in shape is a size that must be; a str names a size that is free.

    aligned: rows move 16 bytes at a time; a hidden size that fits keeps them aligned if the first one is
    """
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    if not view.is_array:
        value = view.array
        where = f" on {value.device}" if hasattr(value, "device") else ""  # the wrong one, for this target
        refuse(
            name, f"{type(value).__name__}{where}{view.flaw}", f"an array of {_describe(' or '.join(dtypes), shape)}"
        )
    dtype, sizes = view.dtype_name, view.shape
    fits = (isinstance(wanted, str) or size == wanted for size, wanted in zip(sizes, shape, strict=False))
    if dtype not in dtypes or len(sizes) != len(shape) or not all(fits):
        refuse(name, _describe(dtype, sizes), _describe(" or ".join(dtypes), shape))
    if contiguous and not view.is_contiguous:
        refuse(name, f"a strided {_describe(dtype, sizes)}", "row-major without gaps")
    past = view.address % VEC_BYTES
    if aligned and past:
        refuse(name, f"an array that starts {past} bytes past a multiple of {VEC_BYTES}", f"{VEC_BYTES}-byte aligned")


def output(name: str, view: View, dtype: str, shape: tuple[int | str, ...], aligned: bool = False) -> None:
    """An array that a kernel writes: read-only memory would end the process, or change what must stay as it is."""
    array(name, view, dtype, shape, aligned=aligned)
    if not view.is_writeable:
        refuse(name, f"a read-only {_describe(dtype, view.shape)}", "writeable: the call writes it")


def apart(outputs: Mapping[str, View], inputs: Mapping[str, View]) -> None:
    """No memory that a call writes is that of another of its arrays, which are row-major without gaps."""
    spans = [
        (name, view.address, view.address + view.num_bytes)
        for name, view in (*inputs.items(), *outputs.items())
        if view.is_array
    ]
    for i, (name, begin, end) in enumerate(spans):
        for other, its_begin, its_end in spans[:i]:
            if name in outputs and begin < its_end and its_begin < end:
                allowed = "in memory of its own: the call writes it"
                refuse(name, f"memory that {other} lies in too", allowed)


def overlap(addresses: Sequence[int], num_bytes: Sequence[int], first_output: int) -> bool:
    """Whether an output, if it is given, lies over another array; see `apart`."""
    for i in range(first_output, len(addresses)):
        begin = addresses[i]
        if begin:
            end = begin + num_bytes[i]
            for j in range(i):
                if begin < addresses[j] + num_bytes[j] and addresses[j] < end:
                    return True
    return False


def outside(memory: NodeMemory, views: Mapping[str, View], symmetric: SymmetricMemory, num_bytes: int) -> None:
    """No array that a call reads or writes lies in the part of the buffer through which it sends.

    On a GPU it is not checked: it costs as much as all else that is checked.
    """
    if not memory.runtime.host_reads_arrays:
        return
    begin, end = symmetric.span(num_bytes)
    for name, view in views.items():
        if view.is_array and begin < view.address + view.num_bytes and view.address < end:
            refuse(name, "memory of the buffer through which the call sends", "in memory of its own")


def _describe(dtype: str, shape: tuple[int | str, ...]) -> str:
    return f"{dtype} [{', '.join(map(str, shape))}]"


# Construction


def sizes(runtime: Runtime, given: Sizes) -> Sizes:
    """The same, with the numbers of bytes as int."""
    names = "num_nvl_bytes", "num_rdma_bytes", "num_zero_copy_bytes"
    numbers: dict[str, Any] = {
        name: symmetric_memory(runtime, name, getattr(given, name), 0, given.handle_type) for name in names
    }
    numbers["low_latency_num_sms"] = integer("low_latency_num_sms", given.low_latency_num_sms, 0)
    checked = given._replace(**numbers)
    if checked.num_zero_copy_bytes > 0:
        total = checked.num_nvl_bytes + checked.num_zero_copy_bytes
        symmetric_memory(runtime, "num_nvl_bytes + num_zero_copy_bytes", total, 0, "ipc")
    if checked.low_latency_mode and checked.num_rdma_bytes == 0:
        refuse("num_rdma_bytes", 0, "positive with low_latency_mode; see get_low_latency_rdma_size_hint")
    if checked.enable_shrink and not checked.low_latency_mode:
        refuse("enable_shrink", True, "False without low_latency_mode")
    if checked.low_latency_num_sms > 0 and not checked.low_latency_mode:
        refuse("low_latency_num_sms", checked.low_latency_num_sms, "0 without low_latency_mode")
    return checked


def nodes(comm: Communicator, runtime: Runtime, sizes: Sizes, num_nvl_peers: int) -> None:
    """The number of ranks fits the modes that the buffer is for, and what is between nodes has its buffers."""
    num_ranks = comm.size
    num_nodes = num_ranks // num_nvl_peers
    if sizes.num_zero_copy_bytes > 0 and num_nodes > 1:
        refuse("num_zero_copy_bytes", sizes.num_zero_copy_bytes, f"0 between {num_nodes} nodes")
    hint = "; start the script under mpiexec" if num_ranks == 1 and is_mpi_comm(comm) else ""
    if sizes.low_latency_mode and num_ranks not in range(2, MAX_RANKS + 1):
        refuse("group", f"{num_ranks} ranks", f"a group of 2 to {MAX_RANKS} ranks{hint}")
    if sizes.num_nvl_bytes == 0 and sizes.low_latency_mode:
        return
    if num_nodes == 1:
        if num_ranks not in INTRANODE_RANKS:
            refuse("group", f"{num_ranks} ranks", f"a group of 2, 4 or 8 ranks{hint}")
    elif num_nodes > MAX_RDMA_RANKS:
        refuse("group", f"{num_nodes} nodes of {num_nvl_peers} ranks", f"at most {MAX_RDMA_RANKS} nodes")
    elif sizes.num_rdma_bytes == 0:
        allowed = f"positive between {num_nodes} nodes; see Config.get_rdma_buffer_size_hint"
        refuse("num_rdma_bytes", 0, allowed)
    else:
        check_nodes(runtime, num_nodes)


def host_memory(sizes: Sizes, transport: str, num_nodes: int) -> None:
    """What does without atomics between GPUs, as memory of the host asks for: see docs/architecture.md."""
    if sizes.handle_type != "host":
        return
    if transport != "direct":
        refuse("transport", transport, 'direct with handle_type="host"')
    if num_nodes > 1 and sizes.num_nvl_bytes > 0:
        refuse("handle_type", "host", f"another one between {num_nodes} nodes, but for the low-latency mode alone")
    if sizes.num_zero_copy_bytes > 0:
        allowed = '0 with handle_type="host": its arrays would lie there'
        refuse("num_zero_copy_bytes", sizes.num_zero_copy_bytes, allowed)
    if sizes.enable_shrink:
        because = "who masks a rank changes cells that this rank may change, which takes atomics between GPUs"
        refuse("enable_shrink", True, f'False with handle_type="host": {because}')


def symmetric_memory(runtime: Runtime, name: str, num_bytes: Any, fewest: int, handle_type: object) -> int:
    """The bytes of a rank as an int."""
    return symmetric_bytes(
        runtime, name, num_bytes, fewest, handle_type, max(TRAILER_BYTES, rdma_trailer_bytes(MAX_RANKS))
    )


def dtype(runtime: Runtime, name: str, value: Any) -> Any:
    """A dtype of torch as it is, or one of NumPy; of numbers, in the machine's order of bytes."""
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return value
    try:
        found = None if value is None else np.dtype(value)
    except (TypeError, ValueError, SyntaxError):
        found = None
    is_extended = found is not None and found.kind == "V" and found.type is not np.void  # of ml_dtypes, as bfloat16 is
    if found is None or found.itemsize == 0 or not found.isnative or not (found.kind in "biufc" or is_extended):
        refuse(name, repr(value), "a dtype of numbers in this machine's order of bytes")
    return found


def shape(name: str, value: Any) -> tuple[int, ...]:
    """The value as a tuple of int."""
    try:
        lengths = tuple(value)
    except TypeError:
        refuse(name, repr(value), "a shape, or None")
    return tuple(integer(f"{name}[{i}]", length, 0) for i, length in enumerate(lengths))


# Streams and events


def stream_options(previous_event: object, async_finish: Any, allocate_on_comm_stream: Any) -> None:
    if async_finish.__class__ is not bool or allocate_on_comm_stream.__class__ is not bool:
        flags(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
    if previous_event is None and not allocate_on_comm_stream:
        return
    event = handle_of(previous_event)
    if allocate_on_comm_stream and (event is None or not async_finish):
        raise ValueError(
            "allocate_on_comm_stream: got True without previous_event and async_finish; must come with both"
        )


def may_read(memory: NodeMemory, previous_event: EventOverlap | None) -> bool:
    """Whether the contents of the arguments can be checked: they are in reach, and no queued work will write them.

    What an earlier call of this buffer returns may be passed on before it is written: the comm stream runs in order.
    """
    if not memory.runtime.host_reads_arrays:
        return False  # and no event is asked: one that a CUDA graph captures cannot be
    if memory.latest_event is not None and not memory.latest_event.done:
        return False
    event = handle_of(previous_event)
    return event is None or event.done


# Routing


def num_experts(num_ranks: int, value: Any, name: str = "num_experts") -> int:
    """The value as an int."""
    value = integer(name, value, 1)
    if value % num_ranks != 0 or value // num_ranks > MAX_LOCAL_EXPERTS:
        refuse(name, value, f"a multiple of {num_ranks} (ranks) of at most {MAX_LOCAL_EXPERTS * num_ranks}")
    return value


def topk_size(name: str, num_topk: int) -> None:
    if not 1 <= num_topk <= MAX_TOPK:
        refuse(name, f"{num_topk} choices a token", f"1 to {MAX_TOPK} choices a token")


def expert_indices(topk_idx: Array, num_experts: int) -> None:
    """The contents of topk_idx; only if `may_read`."""
    wrong = (topk_idx < -1) | (topk_idx >= num_experts)
    if wrong.any():
        token, choice = (int(i[0]) for i in wrong.nonzero())
        refuse(
            f"topk_idx[{token}, {choice}]",
            int(topk_idx[token, choice]),
            f"-1 (unused) or an expert below {num_experts}",
        )


def hidden_size(name: str, hidden: int, multiple: int) -> None:
    if hidden == 0 or hidden % multiple != 0:
        refuse(f"hidden size of {name}", hidden, f"a positive multiple of {multiple}")


def own_handle(memory: NodeMemory, value: Any, kind: type[AnyHandle], made_by: str, num_arrays: int) -> AnyHandle:
    """A handle of this buffer. A tuple or list of its arrays is taken too, but its buffer is not known."""
    if not isinstance(value, kind) and isinstance(value, (tuple, list)) and len(value) == num_arrays:
        value = kind(*value)
    if not isinstance(value, kind):
        count = {6: "six", 10: "ten"}[num_arrays]
        refuse("handle", type(value).__name__, f"the handle that {made_by} returned, or a tuple of its {count} arrays")
    if value.owner is not None and value.owner is not memory.identity:
        refuse("handle", "the handle of another buffer", f"a handle that this buffer made on rank {memory.rank}")
    return value
