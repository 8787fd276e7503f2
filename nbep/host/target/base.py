"""What the host layer needs of a target: memory, arrays, streams, launches and waits; and the runtime of the rank that
runs now.

The rest of nbep.host reaches a device through this interface alone. An *array* is what the user of the target passes
in and gets back (NumPy arrays on the emulator); its dtype is spoken of by NumPy's name, e.g. "bfloat16".
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import count
from typing import Any, Self

import numpy as np

from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.target.arrays import ROWS, Array, ByColumns, Make, Parts, PartsLayout, View, Wanted
from nbep.host.target.memory import Describe, Memory, PolledMemory, Reach, SymmetricMemory, WantedMemory


class Event(ABC):
    """A point in a stream."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the stream has got there."""

    @abstractmethod
    def current_stream_wait(self) -> None:
        """Hold back the caller's current stream until the event is done. On the emulator: wait for it."""


class PastEvent(Event):
    """A point that is behind everything: nothing was ever launched before it."""

    done = True

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class Stream(ABC):
    """Launches run in order within a stream."""

    name: str

    @property
    @abstractmethod
    def key(self) -> object:
        """Equal for objects that stand for the same stream."""

    @property
    def is_capturing(self) -> bool:
        """Whether it records work for later instead of doing it (a CUDA graph)."""
        return False

    @abstractmethod
    def record(self, event: Event | None = None) -> Event:
        """An event at the stream's present end. event: one to record again, for those who wait from now on."""

    def hand_over(self) -> Event:
        """As `record`, and the caller's current stream waits for the event at once."""
        event = self.record()
        event.current_stream_wait()
        return event

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Later work of this stream starts after the event."""

    @abstractmethod
    def wait_current_stream(self) -> None:
        """Later work of this stream starts after what the caller's current stream holds now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the caller until the stream is empty."""

    @abstractmethod
    def close(self) -> None:
        """Give the stream back. It is empty."""


# --- What runs on them, and all else that the host asks of a target


MaybeArray = Any  # an array or None; kernels get address 0 for None
Kernel = Callable[..., None]


Recognizer = Callable[[Sequence[Any]], list[Any] | None]  # see Runtime.recognizer
LATER: Any = object()  # among the last arguments of a prepared launch: a number that each launch gets


class PreparedLaunch(ABC):
    """A kernel with its launch size and its last arguments, which stay as they are from call to call."""

    @abstractmethod
    def launch(
        self, stream: Stream, first: Sequence[Any] = (), keep: Sequence[Any] = (), later: Sequence[Any] = ()
    ) -> None:
        """Start the kernel with these arguments and then those that it was prepared with, as Runtime.launch.

        first: of its first parameters, the fields of NamedTuples one by one; for an array what `arguments` gives
        later: what stands where LATER did, in this order
        keep: those arrays, or what holds them: they stay alive until the launch is done
        """


class NicDevice(ABC):
    """What the software NIC of one rank runs on: memory of its own, and its view of the memory that it serves.

    Life cycle: allocate, address_of, open_peers -> start -> join, when the kernel has been asked to end -> close.
    From start to join all is served that kernels of this rank write into the queues. The kernel itself may run only
    while those do.
    """

    @abstractmethod
    def allocate(self, num_bytes: int, name: str, describe: Describe | None = None) -> Memory:
        """Memory of the NIC, all zeros."""

    @abstractmethod
    def address_of(self, memory: Memory) -> int:
        """Where the NIC sees memory of its rank."""

    @abstractmethod
    def open_peers(self, symmetric: SymmetricMemory, handles: list[Any], rank: int) -> list[int]:
        """Where the NIC sees the symmetric memory of each rank, its own included."""

    @abstractmethod
    def start(
        self, kernel: Kernel, queues: Memory, num_queue_pairs: int, timeout_ns: int, nic: Any, *args: Any
    ) -> None:
        """Serve so many queue pairs by the kernel, which takes nic and args: a warp for each as far as there is room.

        queues: of the rank, as its networks name them; timeout_ns: longest time that one wait of its kernels takes
        """

    def explain(self, describe: Callable[[int], list[str]] | None) -> None:  # noqa: B027 - a GPU reports no deadlock
        """What to say of the network to a peer, in reports of the emulator; None: nothing any more."""

    @abstractmethod
    def join(self) -> None:
        """Block the caller until the kernel has ended."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back but the memory."""


class Runtime(ABC):
    """One rank's access to its target.

    Attributes:
        target: its name
        rank: the rank in the whole run, for reports
        host_reads_arrays: the host can look at an array's contents without waiting for a device
        max_symmetric_bytes: what its addresses can hold of one allocation; None if that is more than there ever is
        max_smem_bytes: of a block, at most
        shares_current_stream: ranks of this process have one current stream in common, on which none may wait
        has_own_stream: the caller's current stream is no other rank's, and the host waits for no launch on it
        array_kinds: the arrays that it takes, in words
        is_failing: the whole run ends with an error, which is reported
        has_recognizers: there may be a `recognizer`
    """

    target: str
    rank: int
    host_reads_arrays: bool
    max_symmetric_bytes: int | None
    max_smem_bytes: int
    shares_current_stream: bool
    array_kinds: str
    has_own_stream = False
    is_failing = False
    has_recognizers = False
    num_forks: int  # behind the process that made it; verbs ask check_caller if there are others now
    _made_after: int
    dropped: dict[tuple[int, ...], Any]  # memory of Buffers that went away without destroy; see shared_memory.agreed
    buffer_numbers: Iterator[int]  # a new one for each Buffer of this rank

    def __new__(cls, *args: Any, **options: Any) -> Self:
        self = super().__new__(cls)
        self.num_forks = self._made_after = num_forks
        self.dropped, self.buffer_numbers = {}, count()
        return self

    def check_caller(self, verb: str) -> None:
        """Raises: RuntimeError if the rank cannot be used where this is called: in a child made by fork"""
        if self._made_after != num_forks:
            raise RuntimeError(
                f"{verb}: called in a child made by fork, which has neither the threads nor the GPU of its parent; "
                f'start processes with the method "spawn", and make a Buffer in each'
            )

    def tell_calls(self, so_far: Callable[[], list[tuple[int, str]]]) -> None:  # noqa: B027 - a GPU reports no deadlock
        """What gives, by rank, how many collective calls its host has made, and the last one: for reports."""

    @property
    @abstractmethod
    def has_tma(self) -> bool:
        """Whether kernels find bulk copies (sm_90 and later)."""

    # Memory

    @abstractmethod
    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        """Symmetric memory; all ranks of comm call this together.

        reach: what processes of the emulator have to prepare; elsewhere memory is made alike for all
        """

    @abstractmethod
    def allocate(self, num_bytes: int, name: str, describe: Describe | None = None) -> Memory:
        """Device memory of this rank alone, all zeros."""

    @abstractmethod
    def create_nic(self) -> NicDevice:
        """What a software NIC of this rank runs on."""

    @abstractmethod
    def allocate_host_visible(self, num_bytes: int, name: str) -> PolledMemory:
        """Memory, all zeros, that kernels write and that the host reads while they run."""

    # Arrays

    @abstractmethod
    def view(self, value: Any) -> View:
        """What the value is as an array; NO_ARRAY for None."""

    def look_at(self, values: Sequence[Any], num_free: int = 0) -> tuple[tuple[Any, ...] | None, list[Any], list[View]]:
        """What can be said of arrays at a glance.

        num_free: of so many of them the number of rows is not said
        Returns: of what kinds they are: class, shape, dtype, gaps and alignment of each, or None for one that is not
                 given, and on which device the first one is. What is right with some arrays is right with all of their
                 kinds. None if one is no array
                 what a launch takes for each
                 what `view` says of each, where the host reads arrays
        """
        views = [*map(self.view, values)]
        kinds: list[Any] = []
        for i, each in enumerate(views):
            if each.array is not None and not each.is_array:
                return None, [*values], views
            gaps = () if each.is_contiguous else each.strides
            kinds += type(each.array), each.shape[i < num_free :], each.dtype_name, gaps, each.address % VEC_BYTES
        return tuple(kinds), [*values], views

    def recognizer(self, values: Sequence[Any], num_free: int = 0) -> Recognizer | None:
        """A short way to see that later values are of the same kinds as these, or None if there is none.

        It takes values, and returns what a launch takes for each; None if they may be of other kinds.
        """
        raise NotImplementedError  # unless has_recognizers

    def contents(self, array: Array) -> np.ndarray:
        """The array as one of NumPy, of the same memory; only where host_reads_arrays."""
        return array

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        """A new array of the same kind and on the same device as `like`."""

    @abstractmethod
    def empty_parts(self, layout: PartsLayout, like: Array) -> Parts:
        """New arrays of the same kind and on the same device as `like`, which live as long as the parts or an array."""

    @abstractmethod
    def empty_by_columns(self, shape: tuple[int, int, int], dtype: str, like: Array) -> Array:
        """As `empty`, but neighbours in the second dimension lie side by side in memory, not those in the last."""

    @abstractmethod
    def stand_in(self, like: Array) -> Array:
        """An array of the same kind and on the same device, without elements: a plan does not keep the caller's.

        Of what is no array anything: it is not checked yet.
        """

    def prepare_empty(self, wanted: Sequence[Wanted | ByColumns | PartsLayout | None], like: Array) -> Make:
        """What makes such arrays at once, of the kind of `like` and on its device; None for None."""
        like = self.stand_in(like)

        def make(numbers: Sequence[int] = ()) -> tuple[list[Any], list[Any]]:
            arrays: list[Any] = []
            for each in wanted:
                if each is None:
                    arrays.append(None)
                    continue
                if each[0] and not isinstance(each, PartsLayout) and each[0][0] < 0:
                    each = (numbers[ROWS - each[0][0]], *each[0][1:]), each[1]
                empty: Any = self.empty
                if isinstance(each, (ByColumns, PartsLayout)):
                    empty = self.empty_by_columns if isinstance(each, ByColumns) else self.empty_parts
                arrays.append(empty(each, like) if isinstance(each, PartsLayout) else empty(*each, like))
            return arrays, [each.arguments if isinstance(each, Parts) else self.arguments([each])[0] for each in arrays]

        return make

    def arguments(self, arrays: Sequence[MaybeArray]) -> list[Any]:
        """What a launch takes for arrays: they themselves, or their addresses, and then somebody has to keep them."""
        return list(arrays)

    def lend(self, array: Array, lease: Any) -> Array:
        """The array, as the caller gets it who may use it until a `lent.Lease` ends. The emulator finds later uses."""
        return array

    def hold_outputs(self) -> Callable[[], None]:
        """Let the outputs of the next launch be there once what this returns is called; see TensorWatch."""
        return lambda: None

    def after_launch(self, call: Callable[[], None]) -> None:
        """Call it once the latest launch has ended; never, on a target whose host does not read arrays."""
        return

    def watch(self, reader: str, until: str, arrays: dict[str, Array]) -> Callable[[], None] | None:
        """What raises if arrays are changed between now and its call; None on a target that does not check."""
        return None

    @abstractmethod
    def dtype_like(self, dtype: str, like: Array) -> Any:
        """The dtype of that name, as the library of an array has it."""

    @abstractmethod
    def allocating_on(self, stream: Stream) -> AbstractContextManager[None]:
        """Within it, `empty` makes arrays that belong to the stream."""

    @abstractmethod
    def let_current_stream_use(self, arrays: list[Array]) -> bool:
        """Let the caller's current stream use arrays that belong to another stream.

        When one goes away, its memory is not handed out again before the current stream is done with the work that it
        has by then. False if the arrays' library cannot see to that.
        """

    # Work

    @property
    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream of the caller's own work."""

    @property
    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the caller's current stream records work for later instead of doing it (a CUDA graph)."""

    @abstractmethod
    def create_stream(self, name: str) -> Stream:
        """A new stream of this rank."""

    @abstractmethod
    def launch(self, stream: Stream, kernel: Kernel, grid: int, block: int, smem_bytes: int, *args: Any) -> None:
        """Start a kernel with the arguments of its signature: grid blocks of block threads in one dimension.

        An address field takes an address, an array or None (address 0). Arrays stay alive until the launch is done.
        smem_bytes is the dynamic shared memory of a block.

        Raises: TypeError if the function is no kernel, or for a wrong number of arguments; ValueError, with the
                parameter's name, for a value that it cannot take; see launches.check_launch. On a GPU the arguments of
                nbep's own kernels are not checked again: `Buffer` has done it.
        """

    @abstractmethod
    def prepare(self, kernel: Kernel, grid: int, block: int, smem_bytes: int, *last_args: Any) -> PreparedLaunch:
        """For launches of one of nbep's own kernels that cost the host as little as can be.

        last_args are numbers, addresses and arrays, which the caller keeps alive while it launches with them.
        """

    @abstractmethod
    def load(self, kernel: Kernel) -> None:
        """Make a kernel ready, which its first launch does otherwise. On the emulator there is nothing to make.

        A GPU may wait for the kernels that run on it before it loads another. So a kernel that starts while others of
        the same card wait for each other is loaded before those.

        Raises: TypeError if the function is no kernel; CompileError if it does not compile
        """

    @abstractmethod
    def wait_until(
        self,
        predicate: Callable[[], bool],
        describe: Callable[[], str],
        timeout_ns: int | None = None,
        told: Callable[[], Iterable[Any]] | None = None,
    ) -> bool:
        """Block the caller until predicate() is true; False if timeout_ns passed first. describe() tells what for.

        told: of a meeting of hosts, what those have told (`tell_hosts`) for whom it was
        """

    def tell_hosts(self) -> Any:
        """What other hosts learn of this one where they meet it now. Only the emulator's memory models ask for it."""
        return None

    @abstractmethod
    def settle(self, stream: Stream) -> bool:
        """Called after launches on a stream that stands for the caller's current one.

        The caller's later work comes after them. Where that is not so by itself, this waits. Returns whether it has.
        """

    @abstractmethod
    def resident_blocks(self, handles: list[Any], num_taken: int) -> int:
        """Blocks that each rank may launch, one for an SM, so that those of all ranks of a card are resident at once.

        handles: of the symmetric memory of all ranks; num_taken: SMs that a rank needs for something else
        """


# --- How many forks lie behind this process. What was made before one belongs to the parent


num_forks = 0  # read as base.num_forks


def _count_fork() -> None:
    global num_forks
    num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


# --- The runtime of the rank that runs now


_current: ContextVar[Runtime | None] = ContextVar("nbep_runtime", default=None)
_of_process: Runtime | None = None


SHARED = (
    "ranks of nbep.spawn share the globals of a module: keep the buffer in a variable of the rank's own function, or "
    "start a process for each rank, with mpiexec or torchrun"
)


def is_rank_of_spawn() -> bool:
    """Whether the caller is one of several ranks in one process."""
    return _current.get() is not None


def check_rank(verb: str, its: Any) -> None:
    """Raises: RuntimeError if the caller is another rank of the same spawn than the one whose runtime this is"""
    here: Any = _current.get()
    if here is not None and here is not its and here.world is its.world:
        raise RuntimeError(f"{verb}: rank {here.rank} calls it of the buffer of rank {its.rank}; {SHARED}")


def current_runtime() -> Runtime | None:
    """The runtime of the rank that calls this, None outside of a rank."""
    return _current.get() or _of_process


def set_process_runtime(runtime: Runtime) -> None:
    """Make this the runtime of every thread of the process that has none of its own, e.g. of torch's backward pass."""
    global _of_process
    _of_process = runtime


def set_current_runtime(runtime: Runtime) -> None:
    """Make this the runtime of the calling rank (its greenlet or thread)."""
    _current.set(runtime)
