"""One rank's share of the low-latency mode: its workspace, and which half of the RDMA buffer the next call takes.

call 0 (half 0): send .......... receive
call 1 (half 1):        send .............. receive
call 2 (half 0):                   send ............. receive      not before call 0 is received
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nbep.device.jit import over
from nbep.device.kernels.low_latency import by_type  # noqa: F401 - registers them
from nbep.device.kernels.low_latency.arguments import (
    BOTH_PHASES,
    NO_PHASE,
    RECV_PHASE,
    SEND_PHASE,
    Call,
    Workspace,
    slot_words,
)
from nbep.device.kernels.low_latency.calls import ComparedCall
from nbep.device.kernels.low_latency.clean_low_latency_buffer import clean_low_latency_buffer
from nbep.device.kernels.low_latency.combine import low_latency_combine
from nbep.device.kernels.low_latency.coordinator import (
    NEXT_HALF,
    NUM_COUNTS,
    NUM_SLOTS,
    RECEIVED_HALF,
    SENT_HALF,
    STATE_WORDS,
    USES,
)
from nbep.device.kernels.low_latency.dispatch import low_latency_dispatch
from nbep.device.kernels.low_latency.mask_buffer import update_mask_buffer
from nbep.device.layout.intranode import ALIGNMENT_BYTES, align_up
from nbep.device.layout.low_latency import (
    MAX_EXPERTS,
    MAX_TOPK,
    NUM_HALVES,
    DeduplicatedShape,
    LowLatencyShape,
    message_stride,
    quarter_bytes,
    recv_begin,
    row_stride,
    shape_of,
    share_bytes,
)
from nbep.device.network.seam import sends_from_buffer
from nbep.host.arguments import integer, refuse
from nbep.host.config import INT4_BYTES, Sizes
from nbep.host.handles import Identity
from nbep.host.low_latency.calls import ORIGINS, Words
from nbep.host.plans import Plans
from nbep.host.ranks.timeouts import PeerTimeout
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.target.arrays import Make
from nbep.host.target.base import Kernel, PreparedLaunch, Stream

STATE_NAMES = {
    SENT_HALF: "sent half + 1",
    RECEIVED_HALF: "received half + 1",
    NUM_SLOTS: "slots",
    NUM_COUNTS: "counts",
    NEXT_HALF: "next half",
}

Launches = tuple[dict[int, PreparedLaunch], ...]  # by half, then by phases


class Plan(NamedTuple):
    """Of a dispatch or combine: what depends on sizes and options alone.

    make: recv_x, recv_count, parts and recv_x_scales, None without FP8; or combined_x
    num_bytes: of the arrays that are given; handle_sizes: of a dispatch's
    """

    shape: LowLatencyShape
    words: Words
    launches: Launches
    make: Make
    num_bytes: tuple[int, ...]
    handle_sizes: tuple[int, ...] = ()


def workspace_at(address: int, num_ranks: int) -> tuple[Workspace, int]:
    """Where everything lies in a workspace at an address, and where it ends."""

    def after(begin: int, num_words: int) -> int:
        return begin + align_up(4 * num_words, ALIGNMENT_BYTES)

    sums = after(address, NUM_HALVES * slot_words(num_ranks))
    barriers = after(sums, NUM_HALVES * slot_words(num_ranks))
    state = after(barriers, num_ranks)
    mask = after(state, STATE_WORDS)
    return Workspace(address, state, mask, sums, barriers), after(mask, num_ranks)


def describe_workspace(num_ranks: int, offset: int) -> str:
    """Name the cell at an offset of the workspace, for reports."""
    at, _ = workspace_at(0, num_ranks)
    if offset >= at.mask:
        return f"mask[rank {(offset - at.mask) // 4}]"
    if offset >= at.state:
        word = (offset - at.state) // 4
        return f"state[{STATE_NAMES.get(word, f'uses of half {word - USES}')}]"
    if offset >= at.barriers:
        return f"barriers[rank {(offset - at.barriers) // 4}]"
    name, half, unit = slot_at(num_ranks, offset)
    where = f"expert {unit}" if unit < MAX_EXPERTS else f"rank {unit - MAX_EXPERTS}"
    return f"{name}[half {half}, {where}]"


def slot_at(num_ranks: int, offset: int) -> tuple[str, int, int]:
    """Of a cell of slots or sums: which of the two, the half, and the expert or MAX_EXPERTS + the rank."""
    at, _ = workspace_at(0, num_ranks)
    return ("sums" if offset >= at.sums else "slots", *divmod(offset % at.sums // 4, slot_words(num_ranks)))


class LowLatencyCall:
    """One dispatch or combine: `is_received` once its receive phase is launched.

    `is_forgotten` if clean_low_latency_buffer came before that; `owner` is the memory that it was made with; `words`
    are those of calls.py, set when it begins. `choices`, where the host reads arrays: a copy of a dispatch's topk_idx.
    `watch`, `release`: see Runtime.watch, Runtime.hold_outputs
    """

    words: Words
    is_received = False
    is_forgotten = False
    choices: Any = None
    watch: Any = None
    release: Any = None

    def __init__(self, owner: LowLatencyMemory, verb: str, number: int):
        self.owner = owner
        self.verb = verb
        self.number = number
        self.half = number % NUM_HALVES

    def __str__(self) -> str:
        return f"{self.verb} (low-latency call {self.number})"

    def __deepcopy__(self, memo: Any) -> LowLatencyCall:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.is_received:
            refuse("handle", f"that of {self}, whose hook has not been called", "pickled after that")
        return _received_call, (self.owner, self.verb, self.number, self.choices)


def _received_call(owner: LowLatencyMemory, verb: str, number: int, choices: Any) -> LowLatencyCall:
    """That of a handle which was pickled."""
    call = LowLatencyCall(owner, verb, number)
    call.is_received, call.choices = True, choices
    return call


class LowLatencyMemory(Identity):
    """See above. Handles remember it.

    Attributes: work: argument of the kernels; num_blocks: of their launches
    """

    def __init__(self, rdma: RdmaMemory, rank: int, num_ranks: int, sizes: Sizes) -> None:
        super().__init__()
        self.rdma = rdma
        self.runtime = runtime = rdma.runtime
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_rdma_bytes = num_rdma_bytes = rdma.num_rdma_bytes
        self.share_bytes = share_bytes(num_rdma_bytes, num_ranks)
        self.symmetric = rdma.symmetric
        self.transport = rdma.transport
        _, num_bytes = workspace_at(0, num_ranks)
        self.workspace = runtime.allocate(num_bytes, "low-latency workspace", partial(describe_workspace, num_ranks))
        work, _ = workspace_at(self.workspace.address, num_ranks)
        self.mask = work.mask if sizes.enable_shrink else 0
        self.work = work._replace(mask=self.mask)
        self.compares_calls = sizes.check_calls
        self.call_type: Any = ComparedCall if sizes.check_calls else Call
        self._num_sms = sizes.low_latency_num_sms
        self.num_calls = 0
        self.halves: list[LowLatencyCall | None] = [None] * NUM_HALVES  # who used each half last
        self.zero_copy_number = -1  # of the call that the zero-copy buffer was handed out for
        self.dispatch_plans: Plans[Plan] = Plans(runtime)
        self.combine_plans: Plans[Plan] = Plans(runtime)
        self.last_stream: Stream | None = None
        self.is_unclean = False  # masks were taken off: clean_low_latency_buffer comes before the next call
        self._taken_by: str | None = None  # the verb between nodes that has used the buffer last, since it was cleaned

    def open(self, memories: list[Any]) -> None:
        """The peers' memories are open: see RdmaMemory."""
        most = self.runtime.resident_blocks(memories, self.transport.num_blocks_taken)
        self.num_blocks = min(most, self._num_sms or most)

    def kernel_of_calls(self, kernel: Kernel, shape: type) -> Kernel:
        """Dispatch or combine for shapes of a type, which compares calls if this buffer does."""
        return over(over(kernel, shape, "shape"), self.call_type, "call")

    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels that calls of the mode launch."""
        both = low_latency_dispatch, low_latency_combine
        shapes = LowLatencyShape, DeduplicatedShape
        of_calls = (self.kernel_of_calls(kernel, shape) for kernel in both for shape in shapes)
        return (*of_calls, clean_low_latency_buffer, update_mask_buffer)

    # Calls

    def next_call(self, verb: str) -> LowLatencyCall:
        """The call that is about to be made; see launch.run_call.

        Raises: ValueError if the call before the last, which used the same half, has not been received, or a call of
                the normal mode has used the buffer
        """
        if self._taken_by is not None:
            self.check_own(verb)
        holder = self.halves[self.num_calls % NUM_HALVES]
        if holder is not None and not holder.is_received:
            held = f"a third call under way: the hook of {holder} has not been called"
            refuse(verb, held, "made after that hook")
        return LowLatencyCall(self, verb, self.num_calls)

    def origin_of(self, call: LowLatencyCall | None) -> int:
        """What the words of a combine say of its handle's dispatch; 0 if it is unknown, or calls are not compared."""
        return 1 + call.number % ORIGINS if call is not None and self.compares_calls else 0

    def restart(self) -> None:
        """Begin with half 0 again, as after construction: see clean_low_latency_buffer."""
        for call in self.halves:
            if call is not None and not call.is_received:
                call.is_forgotten = True
        self.num_calls = 0
        self.halves = [None] * NUM_HALVES
        self.zero_copy_number = -1
        self.is_unclean = False
        self._taken_by = None

    # Turns with the normal mode between nodes, which takes the same bytes

    def check_own(self, verb: str) -> None:
        """Raises: ValueError if a call of the normal mode has used the buffer since it was cleaned"""
        if self._taken_by is not None:
            allowed = f"called after clean_low_latency_buffer: {self._taken_by} between nodes has used the RDMA buffer"
            refuse(verb, "a call", allowed)

    def check_received(self, verb: str) -> None:
        """Raises: ValueError if a call has not been received"""
        for call in self.halves:
            if call is not None and not call.is_received:
                refuse(verb, f"a call while the hook of {call} has not been called", "called after that hook")

    def give_way(self, verb: str, stream: Stream) -> bool:
        """A verb of the normal mode comes next, on this stream. Returns whether calls were made since a clean."""
        self.order(stream)
        self.zero_copy_number = -1
        was_used = self._taken_by is None and self.num_calls > 0
        self._taken_by = verb
        return was_used

    def prepare(
        self, kernel: Kernel, num_threads: int, smem_bytes: int, words: Words, bounds: Any, shape: Any, sizes: Any
    ) -> Launches:
        """The launches of dispatch or combine."""
        kernel = self.rdma.kernel(self.kernel_of_calls(kernel, type(shape)))
        num_bytes = self.num_rdma_bytes
        more = words if self.call_type is ComparedCall else ()
        return tuple(
            {
                phases: self.runtime.prepare(
                    kernel,
                    1 if phases == NO_PHASE else self.num_blocks,
                    num_threads,
                    smem_bytes,
                    self.call_type(num_bytes, self.share_bytes, recv_begin(num_bytes, half), half, phases, *more),
                    self.rdma.network,
                    self.work,
                    bounds,
                    shape,
                    sizes,
                )
                for phases in (NO_PHASE, SEND_PHASE, RECV_PHASE, BOTH_PHASES)
            }
            for half in range(NUM_HALVES)
        )

    def check_size(self, shape: LowLatencyShape) -> None:
        """Raises: ValueError if the buffer, or a chunk of the network, is too small for calls of this shape"""
        self.transport.check_message(message_stride(shape._replace(use_fp8=0)))
        needed = quarter_bytes_needed(shape)
        if needed > quarter_bytes(self.num_rdma_bytes):
            raise ValueError(
                f"num_rdma_bytes: got {self.num_rdma_bytes} at construction; must be at least "
                f"{NUM_HALVES * 2 * needed} for {shape.num_experts} experts, {shape.num_max_tokens} tokens of a rank "
                f"and hidden {shape.hidden}; see get_low_latency_rdma_size_hint"
            )

    # Streams

    def order(self, stream: Stream) -> None:
        """Let what is launched on a stream next come behind the calls before it, which may be on another stream."""
        last = self.last_stream
        if last is stream:
            return
        if last is not None and last.key != stream.key and not self.runtime.is_capturing:
            stream.wait(last.record())
        self.last_stream = stream

    def synchronize(self) -> None:
        """Wait for the calls so far; they may be on a stream of the caller."""
        if self.last_stream is not None:
            self.last_stream.synchronize()

    @property
    def sends_from_buffer(self) -> bool:
        """Whether what leaves is read from the send area after the kernel that sends it has ended."""
        return sends_from_buffer(self.rdma.network)

    def wait_sent(self, timeout_ms: float) -> None:
        """Wait until the send area is not read any more: not by kernels, and not by a NIC.

        Raises: PeerTimeout if the NIC does not come that far
        """
        self.synchronize()
        in_time = self.runtime.wait_until(
            lambda: self.transport.unread_by_nic() is None,
            lambda: f"its NIC to read what goes to rank {self.transport.unread_by_nic()}",
            int(timeout_ms * 1e6),
        )
        peer = None if in_time else self.transport.unread_by_nic()
        if peer is not None:
            message = f"rank {self.rank}: its NIC has not read what goes to rank {peer} in {timeout_ms:g} ms"
            message = "\n  ".join((message, *self.transport.describe(peer)))
            raise PeerTimeout(message, self.rank, peer, "zero copy")

    def masked_ranks(self) -> list[int]:
        """The ranks that this one goes on without, after the calls so far; [] if the buffer does not shrink."""
        if self.mask == 0:
            return []
        self.synchronize()
        mask = self.workspace.read(self.mask - self.workspace.address, self.num_ranks, np.int32)
        return [int(rank) for rank in mask.nonzero()[0]]


# How large the RDMA buffer has to be. Source: DeepEP csrc/config.hpp, get_low_latency_rdma_size_hint


def low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """num_rdma_bytes that serve any call with these numbers: DeepEP's, or ours if larger."""
    num_max_tokens = integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0)
    hidden, num_experts = integer("hidden", hidden, 0), integer("num_experts", num_experts, 0)
    num_ranks = integer("num_ranks", num_ranks, 1)
    shape = shape_of(num_ranks, num_experts, num_max_tokens, hidden, MAX_TOPK, 0, 1, 0)
    # DeepEP's: signals, send and receive buffers, each of them twice.
    num_scales = hidden // 128
    dispatch_msg = INT4_BYTES + max(2 * hidden, hidden + 4 * num_scales)
    combine_msg = 4 * num_scales + 2 * hidden
    send = max(num_max_tokens * dispatch_msg, num_experts * num_max_tokens * combine_msg)
    recv = num_experts * num_max_tokens * max(dispatch_msg, combine_msg)
    signals = align_up(4 * num_experts, ALIGNMENT_BYTES)
    # DeepEP rounds up past an exact multiple too.
    deep_eps = (2 * (send + recv + signals) + ALIGNMENT_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return max(NUM_HALVES * 2 * quarter_bytes_needed(shape), deep_eps)


def quarter_bytes_needed(shape: LowLatencyShape) -> int:
    """What the largest part of one half takes in dispatches and combines of this shape, whatever their options."""
    num_messages = shape.num_experts // shape.num_ranks * shape.num_max_tokens
    bf16 = LowLatencyShape(*shape._replace(use_fp8=0))
    message = max(message_stride(bf16), message_stride(bf16._replace(use_fp8=1)))
    needed = num_messages * max(message, row_stride(shape._replace(use_logfmt=1)))
    if shape.deduplicate:
        needed = max(needed, shape.num_max_tokens * message_stride(shape._replace(use_fp8=0)))
    return shape.num_ranks * align_up(needed, ALIGNMENT_BYTES)
