"""What the kernels of puzzles call beside primitives: a hole, and waits that end on a GPU too."""

from nbep.device.jit import device_function
from nbep.device.primitives import ld_acquire_sys_s32, wait_expired
from nbep.device.protocols.own_sites import own_site
from nbep.device.protocols.waits import Waiter, is_at_least, report_fault, wait_or_report

PUZZLE_WAIT = own_site("puzzle's kernel", "a cell", "a value that never came")


@device_function
def hole():
    """Marks where code is missing. The check looks for it and runs nothing as long as it stands there."""


@device_function
def give_up(bounds, deadline):
    """Whether a wait has taken too long; then the host is told. The last call in every turn of a polling loop.

    deadline = start_wait(bounds)
    while ld_acquire_sys_s32(cell) == 0:
        if give_up(bounds, deadline):
            return
    """
    if wait_expired(deadline):
        report_fault(bounds, PUZZLE_WAIT, -1, 0, -1, -1)
        return True
    return False


@device_function
def wait_at_least(cell, wanted, bounds):
    """Wait until a cell has come to `wanted`, with acquire order. Returns what it holds then."""
    seen, _ = wait_or_report(ld_acquire_sys_s32, cell, is_at_least, wanted, bounds, Waiter(PUZZLE_WAIT, -1, -1))
    return seen
