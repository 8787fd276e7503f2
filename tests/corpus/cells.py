"""The memory that small broken kernels share, with names for its cells, and how they run."""

from collections.abc import Callable

from litmus import run_together

from nbep.device.primitives import ld_acquire_sys_s32, wait_expired
from nbep.emulator import current_thread

DATA, PARTS, FLAG, OTHER, TAIL, HEAD, COUNT, OUT = 0, 128, 512, 528, 544, 560, 576, 640
NAMES = {
    DATA: "data", PARTS: "parts", FLAG: "flag", OTHER: "other flag", TAIL: "tail", HEAD: "head", COUNT: "arrivals",
    OUT: "out",
}  # fmt: skip
NEVER = 1 << 62
ALL = 0xFFFFFFFF


def name_cell(offset: int) -> str:
    """`data[3]` of the fourth word from DATA on; a cell that is one word has no index."""
    begin = max(begin for begin in NAMES if begin <= offset)
    index = (offset - begin) // 4
    return f"{NAMES[begin]}[{index}]" if begin in (DATA, PARTS, OUT) else NAMES[begin] + f" + {index}" * (index > 0)


def cell(name: str, rank: int = 1) -> str:
    """How a report names a cell, without its byte."""
    return f"`memory` of rank {rank}: {name} ("


def together(*kernels: tuple[int, Callable, int, int]) -> Callable[[int], None]:
    """A run of kernels (rank, kernel(memory), grid, block), all at once; the memory is the last rank's."""

    def run(seed: int) -> None:
        called = []
        for rank, kernel, grid, block in kernels:

            def call(_, memory, kernel=kernel):
                kernel(memory)

            call.__name__ = kernel.__name__
            called.append((rank, call, grid, block))
        run_together(called, seed, name_cell)

    return run


def wait(address: int, load: Callable[[int], int] = ld_acquire_sys_s32, at_least: int = 1) -> int:
    """Poll a cell."""
    while (seen := load(address)) < at_least:
        wait_expired(NEVER)
    return seen


def linger(turns: int = 100) -> None:
    """Let the others go on."""
    for _ in range(turns):
        current_thread().globaltimer()
