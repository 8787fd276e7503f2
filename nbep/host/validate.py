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
    RingShape,
    num_nvl_bytes_needed,
)
from nbep.device.layout.low_latency import MAX_RANKS
from nbep.device.layout.low_latency_host import trailer_bytes as rdma_trailer_bytes
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host import handle_contents
from nbep.host.arguments import ROW_DTYPES, flags, integer, refuse
from nbep.host.config import Config, Sizes
from nbep.host.events import EventOverlap, handle_of
from nbep.host.handles import ArraysHandle
from nbep.host.internode.memory import check_nodes
from nbep.host.intranode.direct import DirectMemory
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.node import Node
from nbep.host.ranks.comm import Communicator, is_mpi_comm
from nbep.host.ranks.timeouts import timeout_ms as timeout_ms
from nbep.host.shared_memory import symmetric_bytes
from nbep.host.target.base import Array, Runtime
from nbep.host.target.memory import SymmetricMemory
from nbep.host.target.views import NO_ARRAY, View

INTRANODE_RANKS = (2, 4, 8)
MAX_SCALES = 1024
MAX_RING_THREADS = 768
AnyHandle = TypeVar("AnyHandle", bound=ArraysHandle)


def array(
    name: str, view: View, dtypes: str | tuple[str, ...], shape: tuple[int | str, ...], contiguous: bool = True
) -> None:
    """An array of one of the dtypes. An int in shape is a size that must be; a str names a size that is free."""
    if isinstance(dtypes, str) and contiguous and view.fits(dtypes, shape):  # type: ignore[arg-type]
        return
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


def output(name: str, view: View, dtype: str, shape: tuple[int | str, ...]) -> None:
    """An array that a kernel writes: read-only memory would end the process, or change what must stay as it is."""
    array(name, view, dtype, shape)
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


def outside(memory: Node, views: Mapping[str, View], symmetric: SymmetricMemory, num_bytes: int) -> None:
    """No array that a call reads or writes lies in the part of the buffer through which it sends.

    On a GPU it is not checked: it costs as much as all else that is checked.
    """
    if not memory.runtime.host_reads_arrays:
        return
    begin, end = symmetric.span(num_bytes)
    for name, view in views.items():
        if view.is_array and begin < view.address + view.num_bytes and view.address < end:
            refuse(name, "memory of the buffer through which the call sends", "in memory of its own")


def outside_rings(memory: Node, views: Mapping[str, View]) -> None:
    """The same of the rings."""
    outside(memory, views, memory.symmetric, memory.num_nvl_bytes)
    if memory.internode is not None:
        outside(memory, views, memory.internode.rdma.symmetric, memory.internode.rdma.num_rdma_bytes)


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
    if found is None or found.itemsize == 0 or not found.isnative or not (found.kind in "biufc" or is_extended(found)):
        refuse(name, repr(value), "a dtype of numbers in this machine's order of bytes")
    return found


def is_extended(found: np.dtype) -> bool:
    """Whether it is one of ml_dtypes, such as bfloat16."""
    return found.kind == "V" and found.type is not np.void


def shape(name: str, value: Any) -> tuple[int, ...]:
    """The value as a tuple of int."""
    try:
        lengths = tuple(value)
    except TypeError:
        refuse(name, repr(value), "a shape, or None")
    return tuple(integer(f"{name}[{i}]", length, 0) for i, length in enumerate(lengths))


ARGUMENTS = {"num_qps": "num_qps_per_rank", "use_nvlink": "allow_nvlink_for_low_latency_mode"}  # of NetworkOptions


def same_on_all_ranks(name: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        refuse(ARGUMENTS.get(name, name), f"{values} on ranks 0 to {len(values) - 1}", "the same on all ranks")


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


def may_read(memory: Node, previous_event: EventOverlap | None) -> bool:
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


def token_counts(num_tokens_per_rank: Array, is_token_in_rank: Array) -> None:
    """The counts agree with the membership that they sum up; only if `may_read`."""
    handle_contents.membership("is_token_in_rank", is_token_in_rank)
    counted = is_token_in_rank.sum(axis=0)
    if (counted != num_tokens_per_rank).any():
        refuse("num_tokens_per_rank", num_tokens_per_rank.tolist(), f"{counted.tolist()}, as is_token_in_rank says")


def routing(topk_idx: Array, is_token_in_rank: Array, num_tokens_per_expert: Array) -> None:
    """Membership and counts agree with the choices, which are `expert_indices`; only if `may_read`."""
    num_ranks, num_experts = is_token_in_rank.shape[1], len(num_tokens_per_expert)
    owners = topk_idx // (num_experts // num_ranks)  # -1 where unused
    chosen = (owners[:, :, None] == np.arange(num_ranks)).any(axis=1)
    wrong = chosen != is_token_in_rank
    if wrong.any():
        token, rank = (int(i[0]) for i in wrong.nonzero())
        refuse(
            f"is_token_in_rank[{token}, {rank}]",
            is_token_in_rank[token, rank],
            f"{chosen[token, rank]}, as topk_idx[{token}] says: {topk_idx[token].tolist()}",
        )
    counted = np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    wrong = counted != num_tokens_per_expert
    if wrong.any():
        expert = int(wrong.nonzero()[0][0])
        refuse(
            f"num_tokens_per_expert[{expert}]",
            num_tokens_per_expert[expert],
            f"{counted[expert]}, the choices of topk_idx that are {expert}",
        )


def payload(runtime: Runtime, x: Any) -> tuple[View, View]:
    """The tokens and their scales, NO_ARRAY without."""
    if not isinstance(x, tuple):
        tokens = runtime.view(x)
        array("x", tokens, ROW_DTYPES, ("num_tokens", "hidden"))
        hidden_size("x", tokens.shape[1], VEC_BYTES // tokens.itemsize)
        row_alignment("x", tokens)
        return tokens, NO_ARRAY
    if len(x) != 2:
        refuse("x", f"a tuple of {len(x)}", "an array, or a tuple of an FP8 array and its scales")
    tokens, scales = map(runtime.view, x)
    array("x[0]", tokens, "float8_e4m3fn", ("num_tokens", "hidden"))
    num_tokens, hidden = tokens.shape
    hidden_size("x[0]", hidden, VEC_BYTES)
    row_alignment("x[0]", tokens)
    array("x[1]", scales, ("float32", "int32"), (num_tokens, "num_scales"), contiguous=False)
    if not 1 <= scales.shape[1] <= MAX_SCALES:
        allowed = f"1 to {MAX_SCALES} scales a token: a warp's stage holds them"
        refuse("x[1]", f"{scales.shape[1]} scales a token", allowed)
    if min(scales.strides) < 0:
        refuse("x[1]", f"strides {scales.strides}", "of strides that are not negative")
    return tokens, scales


def row_alignment(name: str, view: View) -> None:
    """Rows move 16 bytes at a time; a hidden size that fits keeps them aligned if the first one is."""
    past = view.address % VEC_BYTES
    if past:
        refuse(name, f"an array that starts {past} bytes past a multiple of {VEC_BYTES}", f"{VEC_BYTES}-byte aligned")


def hidden_size(name: str, hidden: int, multiple: int) -> None:
    if hidden == 0 or hidden % multiple != 0:
        refuse(f"hidden size of {name}", hidden, f"a positive multiple of {multiple}")


def only_with_counts(topk_idx: object, topk_weights: object) -> None:
    """A handle knows the routes. num_worst_tokens means nothing beside it: it knows the number of tokens, too."""
    for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if value is not None:
            refuse(name, type(value).__name__, "None together with a handle")


# Settings


def config(value: object, num_ranks: int, min_threads: int) -> None:
    if not isinstance(value, Config):
        refuse("config", type(value).__name__, "an nbep.Config or None")
    if value.num_sms < 2 or value.num_sms % 2 != 0:
        refuse("config.num_sms", value.num_sms, "even and at least 2")
    threads = value.num_threads
    if threads is not None and (threads % (32 * num_ranks) != 0 or not min_threads <= threads <= MAX_RING_THREADS):
        refuse(
            "config.num_threads",
            threads,
            f"a multiple of {32 * num_ranks} (a warp a rank) from {min_threads} to {MAX_RING_THREADS}",
        )


def zero_copy(memory: Node) -> DirectMemory:
    """The memory for calls without rings."""
    if memory.direct is None:
        refuse("zero_copy", True, "False: num_zero_copy_bytes was 0 at construction")
    return memory.direct


def mnnvl(allow_mnnvl: bool, hosts: Sequence[str]) -> None:
    """hosts: of the ranks, if they are on several."""
    if allow_mnnvl and hosts:
        names = ", ".join(dict.fromkeys(hosts))
        refuse(
            "allow_mnnvl",
            f"True with ranks on several hosts ({names})",
            "False there: nbep maps memory over NVLink inside a host only, and NICs connect hosts",
        )


def num_push_warps(config: Config, num_warps: int) -> None:
    if config.num_push_warps is not None and config.num_push_warps > num_warps:
        refuse("config.num_push_warps", config.num_push_warps, f"at most the warps of a block, {num_warps}")


def buffer_size(shape: RingShape, num_nvl_bytes: int) -> None:
    needed = num_nvl_bytes_needed(shape)
    if needed > num_nvl_bytes:
        raise ValueError(
            f"num_nvl_bytes: got {num_nvl_bytes} at construction; must be at least {needed} for "
            f"{shape.num_channels} channels of {shape.num_slots} slots from {shape.num_ranks} ranks, "
            f"{shape.hidden_bytes} bytes a token"
        )


def own_handle(memory: Node, value: Any, kind: type[AnyHandle], made_by: str, num_arrays: int) -> AnyHandle:
    """A handle of this buffer. A tuple or list of its arrays is taken too, but its buffer is not known."""
    if not isinstance(value, kind) and isinstance(value, (tuple, list)) and len(value) == num_arrays:
        value = kind(*value)
    if not isinstance(value, kind):
        count = {6: "six", 10: "ten"}[num_arrays]
        refuse("handle", type(value).__name__, f"the handle that {made_by} returned, or a tuple of its {count} arrays")
    if value.owner is not None and value.owner is not memory.identity:
        refuse("handle", "the handle of another buffer", f"a handle that this buffer made on rank {memory.rank}")
    return value


def handle(memory: Node, value: Any, previous_event: EventOverlap | None) -> DispatchHandle:
    """That of a dispatch inside a node."""
    value = own_handle(memory, value, DispatchHandle, "dispatch", 6)
    if not value.is_as_made:  # else its arrays are those that dispatch made
        _handle_arrays(memory, value)
    if may_read(memory, previous_event):
        handle_contents.intranode(DispatchHandle(*map(memory.runtime.contents, value)), memory.rank)
    return value


def _handle_arrays(memory: Node, value: DispatchHandle) -> None:
    num_ranks = memory.num_ranks
    of_ranks, of_channels, received, src_idx, in_rank, send_head = map(memory.runtime.view, value)
    array("handle.rank_prefix_matrix", of_ranks, "int32", (num_ranks, num_ranks))
    array("handle.channel_prefix_matrix", of_channels, "int32", (num_ranks, "num_channels"))
    array("handle.recv_channel_prefix_matrix", received, "int32", (num_ranks, of_channels.shape[1]))
    array("handle.recv_src_idx", src_idx, "int32", ("num_recv_tokens",))
    array("handle.is_token_in_rank", in_rank, "bool", ("num_tokens", num_ranks))
    output("handle.send_head", send_head, "int32", (in_rank.shape[0], num_ranks))  # by combine


def handle_config(handle: DispatchHandle, config: Config) -> None:
    num_channels = handle.channel_prefix_matrix.shape[1]
    if config.num_channels != num_channels:
        refuse("config.num_sms", config.num_sms, f"{2 * num_channels}, as in the dispatch that made the handle")
