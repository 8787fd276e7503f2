"""What the benchmarks of the normal mode share: the clock, and what SMs copy with nothing else to do.

Source: DeepEP tests/utils.py (bench)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from nbep.device.kernels.intranode.push import AT_HOME, BOTH, ROW_BYTES, TO_PEERS, push
from nbep.host.shared_memory import SharedMemory

PUSH_ROWS = 4096
PUSH_OFFSET = 1 << 20  # past the cells of the rings
PUSH_THREADS = 768
SLEEP_CYCLES = 20_000_000


class Timed(Protocol):
    """A rank that measures; options have `repeat`."""

    comm: Any
    options: argparse.Namespace


class Push(NamedTuple):
    """What SMs copy with nothing else to do, in GB/s of each rank; half of `both` goes to the peers."""

    to_peers: float
    at_home: float
    both: float


def push_bytes(num_ranks: int) -> int:
    """Of the symmetric memory that `push_rates` takes."""
    return PUSH_OFFSET + 2 * num_ranks * PUSH_ROWS * ROW_BYTES


def push_rates(setup: Timed, memory: SharedMemory, num_sms: int) -> Push:
    """Of so many SMs, to the ranks of the memory's node."""
    return Push(*(push_gbps(setup, memory, num_sms, goal) for goal in (TO_PEERS, AT_HOME, BOTH)))


def push_gbps(setup: Timed, memory: SharedMemory, num_sms: int, goal: int) -> float:
    """What this many SMs copy, in GB/s of each rank."""
    import torch

    runtime, num_peers = memory.runtime, memory.peers.num_ranks - 1
    src = torch.ones(PUSH_ROWS * ROW_BYTES // 2, dtype=torch.int16, device="cuda")
    torch.cuda.current_stream().synchronize()

    def call() -> None:
        stream = runtime.current_stream
        runtime.launch(stream, push, num_sms, PUSH_THREADS, 0, src, PUSH_OFFSET, PUSH_ROWS, goal, memory.peers)

    num_regions = 2 * num_peers if goal == BOTH else num_peers
    return PUSH_ROWS * ROW_BYTES * num_regions / mean_seconds(setup, call) / 1e9


def mean(setup: Timed, value: float) -> float:
    """The mean over ranks."""
    return sum(setup.comm.allgather(float(value))) / setup.comm.size


def mean_seconds(setup: Timed, call: Callable[[], Any], behind_sleep: bool = False) -> float:
    """Time of a call on the GPU, the mean over repetitions and ranks.

    behind_sleep queues all repetitions behind a kernel that sleeps, so that the time of launching them does not count.
    """
    import torch

    repeat = setup.options.repeat
    for _ in range(max(3, repeat // 3)):
        call()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(1 + repeat)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(1 + repeat)]
    torch.cuda.current_stream().synchronize()
    setup.comm.barrier()
    if behind_sleep:
        torch.cuda._sleep(SLEEP_CYCLES)
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.current_stream().synchronize()
    # The first call after the barrier waits for the slowest rank.
    times = [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)][1:]
    return mean(setup, sum(times) / repeat)
