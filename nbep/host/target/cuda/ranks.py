"""Virtual ranks: several ranks on one card, one Python thread and one set of streams each.

Their kernels wait for each other inside one GPU, so all their blocks must be resident at once; `CudaRuntime.launch`
checks it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from nbep.host.ranks.comm import CommGroup, InProcessComm
from nbep.host.target.cuda.driver import current_ordinal
from nbep.host.target.cuda.runtime import CudaRuntime, PeerFailed, SharedDevice
from nbep.host.target.current import set_current_runtime


def run_virtual_ranks(fn: Callable[..., Any], num_ranks: int, args: Sequence[Any]) -> list[Any]:
    """Run fn(comm, *args) once per rank on the current GPU, or else the first one; the results, by rank.

    Raises: the first exception of a rank, with a note that names the rank
    """
    shared = SharedDevice(current_ordinal() or 0, num_ranks)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        # torch gives the pool its own settings when it first allocates.
        torch.empty(1, device=torch.device("cuda", shared.device.ordinal))
    shared.device.prepare_pool()
    group = CommGroup(range(num_ranks))
    failed = threading.Event()
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            runtime = CudaRuntime(shared, rank, failed)
            set_current_runtime(runtime)
            with own_streams(shared.device.ordinal):
                results[rank] = fn(InProcessComm(group, rank, runtime), *args)
            group.returned.add(rank)
        except BaseException as error:  # raised again below
            failures.append((rank, error))
            failed.set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], PeerFailed)), failures[0])
        error.add_note(f"raised in rank {rank}")
        raise error
    return results


@contextmanager
def own_streams(ordinal: int) -> Iterator[None]:
    """Give the calling thread current streams of its own in the libraries that are loaded.

    The default stream waits for all others of the context, so ranks that share it would wait for each other.
    """
    with ExitStack() as stack:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(ordinal)
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(ordinal)))
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            stack.enter_context(cupy.cuda.Stream(non_blocking=True))
        yield
