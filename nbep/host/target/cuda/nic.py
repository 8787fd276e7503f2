"""What the software NIC of a rank runs on: a block of the rank's own GPU, beside the launches that use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as cu

from nbep.host.target.base import Kernel, NicDevice, Runtime
from nbep.host.target.cuda.driver import check
from nbep.host.target.cuda.streams import CudaEvent, CudaStream, is_capturing
from nbep.host.target.memory import Describe, Memory, SymmetricMemory

NIC_THREADS = 512
LIMIT_IN_WAITS = 6  # that one launch may have, each timed out, before its NIC ends without it


class CudaNic(NicDevice):
    """A block of the rank's own GPU, on a stream of its own. All that the GPU sees, it sees at the same addresses.

     stream of the launch   stop = 0 |.......... kernel ..........| stop = 1            | what comes next
     stream of the NIC               |.......... software_nic ................. drained |

    It runs only beside launches that use its queues, until what they have rung for is served. A kernel that never ended
    would hold up whoever waits for the whole card, which a host does without a word about it: torch.cuda.synchronize,
    cudaFree, the loading of another kernel, the capture of a graph by torch, and the end of the process.

    Both kernels must run at once: an SM is left for the NIC, see LoadedKernel. If the driver runs one stream behind the
    other nevertheless, because there are more streams than CUDA_DEVICE_MAX_CONNECTIONS, the NIC ends after
    LIMIT_IN_WAITS time-outs, and the kernel's waits report what has not come.
    """

    def __init__(self, runtime: Runtime, nics: dict[int, CudaNic]):
        self._runtime = runtime
        self._nics = nics
        stream = runtime.create_stream("nic")
        assert isinstance(stream, CudaStream)
        self._stream = stream
        self._queues = 0
        self._ended: CudaEvent | None = None  # of the latest launch that no graph holds

    def allocate(self, num_bytes: int, name: str, describe: Describe | None = None) -> Memory:
        return self._runtime.allocate(num_bytes, name)

    def address_of(self, memory: Memory) -> int:
        return memory.address

    def open_peers(self, symmetric: SymmetricMemory, handles: list[Any], rank: int) -> list[int]:
        return symmetric.open_peers(handles, rank)

    def start(
        self, kernel: Kernel, queues: Memory, num_queue_pairs: int, timeout_ns: int, nic: Any, *args: Any
    ) -> None:
        self._kernel, self._stop = kernel, nic.stop
        self._num_threads = 32 * min(num_queue_pairs, NIC_THREADS // 32)
        self._args = (nic._replace(limit_ns=LIMIT_IN_WAITS * timeout_ns), *args)
        self._queues = queues.address
        self._nics[self._queues] = self
        self._tell(0, self._stream)  # what a driver loads for this, it loads now, and not while kernels wait
        self._stream.synchronize()

    @contextmanager
    def beside(self, stream: CudaStream) -> Iterator[None]:
        """Around a launch on a stream: the NIC serves it, and what comes on the stream later comes after both."""
        is_captured = is_capturing(stream.handle)
        if self._ended is not None and not is_captured:  # a launch before, maybe on another stream
            stream.wait(self._ended)
        self._tell(0, stream)
        self._stream.wait(CudaEvent(stream.handle))
        self._runtime.launch(self._stream, self._kernel, 1, self._num_threads, 0, *self._args)
        try:
            yield
        finally:
            self._tell(1, stream)
            ended = CudaEvent(self._stream.handle)
            stream.wait(ended)
            if not is_captured:
                self._ended = ended

    def _tell(self, stop: int, stream: CudaStream) -> None:
        check("cuMemsetD32Async", cu.cuMemsetD32Async(self._stop, stop, 1, stream.handle))

    def join(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._nics.pop(self._queues, None)
        self._stream.close()
