"""Fences and barriers.

A fence orders this thread's accesses before it and after it, as seen by the block (cta), this GPU (gpu) or all GPUs and
the host (sys). A barrier stops threads until the others arrive, and orders memory within the block.
"""

from nbep.emulator import current_thread

from ..jit import primitive


@primitive("fence.acq_rel.cta;")
def fence_acq_rel_cta():
    """Order accesses as seen by the block."""
    current_thread().fence("acq_rel", "cta")


@primitive("fence.acq_rel.gpu;")
def fence_acq_rel_gpu():
    """Order accesses as seen by this GPU."""
    current_thread().fence("acq_rel", "gpu")


@primitive("fence.acq_rel.sys;")
def fence_acq_rel_sys():
    """Order accesses as seen by all GPUs and the host."""
    current_thread().fence("acq_rel", "sys")


@primitive("bar.sync 0;", effect="converge")
def syncthreads():
    """Wait for all threads of the block."""
    thread = current_thread()
    thread.barrier(0, thread.block_dim)


@primitive("bar.sync $0, $1;", None, ("s32", "s32"), effect="converge")
def bar_sync(barrier_id, num_threads):
    """Wait until `num_threads` threads (whole warps) are at barrier `barrier_id`, 1 to 15; 0 is that of syncthreads."""
    current_thread().barrier(barrier_id, num_threads)


@primitive(
    "{ .reg .pred p; .reg .pred q; setp.ne.s32 q, $3, 0; bar.red.and.pred p, $1, $2, q; selp.s32 $0, 1, 0, p; }",
    "pred",
    ("s32", "s32", "pred"),
    effect="converge",
)
def bar_red_and(barrier_id, num_threads, predicate):
    """As `bar_sync`; gives whether the predicate holds in all threads that met."""
    return current_thread().barrier(barrier_id, num_threads, bool(predicate))


@primitive("bar.arrive $0, $1;", None, ("s32", "s32"), effect="converge")
def bar_arrive(barrier_id, num_threads):
    """Count as arrived at a named barrier without waiting for it."""
    current_thread().barrier_arrive(barrier_id, num_threads)


@primitive("bar.warp.sync $0;", None, "u32", effect="converge")
def syncwarp(mask):
    """Wait for the lanes of `mask`, and order memory among them."""
    current_thread().syncwarp(mask)
