"""What SMs copy with nothing else to do, with which calls are compared: the kernel `push`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from nbep.bench.harness.clocks import Clock, mean_us
from nbep.bench.harness.report import Report
from nbep.device.kernels.intranode.push import AT_HOME, BOTH, ROW_BYTES, TO_PEERS, push
from nbep.host.shared_memory import SharedMemory

PUSH_ROWS = 4096
PUSH_OFFSET = 1 << 20  # past the cells of the rings
PUSH_THREADS = 768
COLUMNS = {"SMs": "num_sms", "to peers": "to_peers:.1f", "at home": "at_home:.1f", "both": "both:.1f"}


class Push(NamedTuple):
    """What SMs copy with nothing else to do, in GB/s of each rank; half of `both` goes to the peers."""

    to_peers: float
    at_home: float
    both: float


Pushes = dict[int, Push]  # by the number of SMs


def push_bytes(num_ranks: int) -> int:
    """Of the symmetric memory that `push_rates` takes."""
    return PUSH_OFFSET + 2 * num_ranks * PUSH_ROWS * ROW_BYTES


def push_call(memory: SharedMemory, num_rows: int, num_sms: int, goal: int = TO_PEERS) -> Callable[[], None]:
    """A call that copies so many rows to each goal."""
    import torch

    src = torch.ones(num_rows * ROW_BYTES // 2, dtype=torch.int16, device="cuda")
    torch.cuda.current_stream().synchronize()
    runtime, sizes = memory.runtime, (num_sms, PUSH_THREADS, 0)

    def call() -> None:
        runtime.launch(runtime.current_stream, push, *sizes, src, PUSH_OFFSET, num_rows, goal, memory.peers)

    return call


def push_rates(clock: Clock, memory: SharedMemory, sms: Iterable[int]) -> Pushes:
    """Of so many SMs each, to the ranks of the memory's node."""
    num_peers = memory.peers.num_ranks - 1

    def gbps(num_sms: int, goal: int) -> float:
        num_bytes = PUSH_ROWS * ROW_BYTES * (2 * num_peers if goal == BOTH else num_peers)
        return num_bytes / mean_us(clock, push_call(memory, PUSH_ROWS, num_sms, goal)) / 1e3

    return {num_sms: Push(*(gbps(num_sms, goal) for goal in (TO_PEERS, AT_HOME, BOTH))) for num_sms in sms}


def push_gbps(pushes: Pushes) -> dict[int, dict[str, float]]:
    """As JSON has it."""
    return {num_sms: rates._asdict() for num_sms, rates in pushes.items()}


def say_push(report: Report, pushes: Pushes) -> None:
    rows = [{"num_sms": num_sms, **rates._asdict()} for num_sms, rates in pushes.items()]
    report.table(rows, COLUMNS, "push, GB/s")
