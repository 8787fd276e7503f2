"""Who this thread is, what time it is, and giving up.

Grids and blocks have one dimension.
"""

from nbep.emulator import current_thread
from nbep.emulator.machine.source import polls

from ..jit import device_function, primitive


@primitive("mov.u32 $0, %tid.x;", "u32", effect="pure")
def thread_idx():
    """This thread's number in its block."""
    return current_thread().thread_idx


@primitive("mov.u32 $0, %ctaid.x;", "u32", effect="pure")
def block_idx():
    """This block's number in the grid."""
    return current_thread().block_idx


@primitive("mov.u32 $0, %nctaid.x;", "u32", effect="pure")
def grid_dim():
    """Blocks in the grid."""
    return current_thread().grid_dim


@primitive("mov.u32 $0, %ntid.x;", "u32", effect="pure")
def block_dim():
    """Threads in the block."""
    return current_thread().block_dim


@primitive("mov.u32 $0, %laneid;", "u32", effect="pure")
def lane_id():
    """This thread's number in its warp, 0 to 31."""
    return current_thread().lane


@primitive("mov.u64 $0, %globaltimer;", "s64")
def globaltimer():
    """Nanoseconds. On the emulator in one process: a virtual clock that advances with the work done."""
    return current_thread().globaltimer()


@primitive("mov.u64 $0, %clock64;", "s64")
def clock64():
    """Cycles of this SM. On the emulator: the clock of `globaltimer`."""
    return current_thread().globaltimer()


@primitive("", None, ("s64", "s64"))
def serving(queue_pair, entry):
    """What this thread does from now on, it does for an entry of a queue pair: for reports. On a GPU: nothing."""
    current_thread().serving = int(queue_pair), int(entry)


@primitive("")
def fault_reported():
    """The rank has reported a fault and goes on; data may be missing, so nothing is checked. On a GPU: nothing."""
    current_thread().world.has_failed = True


@primitive("", None, ("s64", "s64"), effect="pure")
def fault_due(deadline, report):
    """This thread reports a fault if the deadline passes; if report is 0, it goes on without one. On a GPU: nothing.

    So the emulator can tell a deadlock from a wait that is to time out. What this thread has looked at last was whether
    another wait has timed out: it does not wait for that.
    """
    thread = current_thread()
    thread.fault_deadline = int(deadline) if report else None
    if thread.polled:
        thread.polled.popitem()


@primitive("prefetch.global.L2 [$0];", None, "s64")
def prefetch_l2(address):
    """What lies there may be read soon: a hint, which reads nothing. On the emulator: nothing."""


@primitive("trap;", effect="converge")
def trap():
    """Stop the whole launch with an error."""
    current_thread().trap("the kernel called trap()")


@device_function
def deadline_after(timeout_ns):
    """The time `timeout_ns` nanoseconds from now, for `wait_expired`."""
    return globaltimer() + timeout_ns


@polls
@primitive(
    "{ .reg .s64 t; .reg .pred p; mov.u64 t, %globaltimer; setp.gt.s64 p, t, $1; selp.s32 $0, 1, 0, p; }",
    "pred",
    "s64",
)
def wait_expired(deadline_ns):
    """Whether the deadline has passed; the last call in every iteration of a polling loop.

    The emulator parks the thread here until a cell that it polled since the last call changes.
    """
    thread = current_thread()
    thread.may_time_out = deadline_ns != thread.fault_deadline
    return thread.spin(deadline_ns)


@primitive("", "u32", emit="dynamic_shared", effect="pure")
def smem_base():
    """Address of the block's dynamic shared memory, 1024-byte aligned; 0 on the emulator."""
    return 0
