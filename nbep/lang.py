"""What kernels of one's own are written in, under one name.

    import nbep.lang as nl

    @nl.kernel(max_threads=32)
    def answer(out: nl.Out, peers: nl.Peers, bounds: nl.Bounds): ...

 to define   kernel, device_function; over: a kernel with another type of network or of peers
 parameters  In, Out, InOut, Sym: addresses; I32, I64, F32: numbers; Peers, Bounds, Network
 memory      buffer_of(peers, rank): where a rank's SharedMemory begins; all primitives: see docs/primitives.md
 waits       wait_at_least, or start_wait and give_up in a loop of one's own; own_site names a wait in reports
 barriers    barrier_block(peers, bounds): of the ranks of a node; barrier_grid(arrivals, bounds): of a launch's blocks
 network     keep_message, put_nbi_warp, amo_add, quiet, own_ptr, peer_ptr: also to ranks whose memory is not mapped

With nbep.spawn and nbep.SharedMemory that is all that such a kernel needs.
"""

from nbep.device.jit import device_function, kernel, over
from nbep.device.network.seam import Network, Place, amo_add, keep_message, own_ptr, peer_ptr, put_nbi_warp, quiet
from nbep.device.primitives import *  # noqa: F403
from nbep.device.primitives import __all__ as _primitives
from nbep.device.primitives import ld_acquire_sys_s32, wait_expired
from nbep.device.protocols.barriers import barrier_block
from nbep.device.protocols.grid_barrier import barrier_grid
from nbep.device.protocols.peers import Bounds, HostPeers, Peers, buffer_of
from nbep.device.protocols.waits import (
    Waiter,
    is_at_least,
    is_set,
    own_site,
    report_fault,
    start_wait,
    wait_or_report,
)
from nbep.device.types import F32, I32, I64, In, InOut, Out, Sym
from nbep.emulator.machine.source import wait_loop

__all__ = [
    *_primitives,
    "F32",
    "I32",
    "I64",
    "Bounds",
    "HostPeers",
    "In",
    "InOut",
    "Network",
    "Out",
    "Peers",
    "Place",
    "Sym",
    "Waiter",
    "amo_add",
    "barrier_block",
    "barrier_grid",
    "buffer_of",
    "device_function",
    "give_up",
    "is_at_least",
    "is_set",
    "keep_message",
    "kernel",
    "over",
    "own_ptr",
    "own_site",
    "peer_ptr",
    "put_nbi_warp",
    "quiet",
    "report_fault",
    "start_wait",
    "wait_at_least",
    "wait_or_report",
]

SOME_WAIT = own_site("kernel", "a cell", "a value that never came")  # of a wait that does not say what for


@wait_loop
@device_function
def wait_at_least(cell, wanted, bounds, site=SOME_WAIT, peer=-1):
    """Wait until a counter of 32 bits has come to `wanted`, with acquire order at scope sys.

    Args:
        site: by `own_site`: who waits and for what, for the report of a wait that times out
        peer: the rank that is waited for, for the report

    Returns:
        What the cell holds. It is less than wanted if the wait has timed out; that is reported
    """
    seen, _ = wait_or_report(ld_acquire_sys_s32, cell, is_at_least, wanted, bounds, Waiter(site, peer, -1))
    return seen


@wait_loop
@device_function
def give_up(bounds, deadline, site=SOME_WAIT, peer=-1, expected=-1, seen=-1):
    """Whether a wait has timed out, which is reported then. The last call in every iteration of a loop that polls.

    deadline = start_wait(bounds)
    while ld_acquire_sys_s32(cell) == 0:
        if give_up(bounds, deadline):
            return

    Args:
        site, peer, expected, seen: what a report of the wait says
    """
    if wait_expired(deadline):
        report_fault(bounds, site, peer, -1, expected, seen)
        return True
    return False
