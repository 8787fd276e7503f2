"""Bulk asynchronous copies (TMA) between global and shared memory, and the mbarriers that they complete on.

From sm_90. On older cards each of these traps, except `has_tma`, which is a constant there: code behind `if has_tma()`
compiles away. Addresses and sizes of copies are multiples of 16 bytes; an mbarrier is 8 bytes of shared memory, aligned
to 8.

 load    mbarrier_arrive_expect_tx(m, n); tma_load_1d(smem, gmem, n, m); poll mbarrier_try_wait_parity(m, phase)
 store   st_shared_*; fence_proxy_async_shared(); a barrier; one thread: tma_store_1d(gmem, smem, n) and
         tma_store_commit(); before smem is written again: tma_store_wait_read_*(); before others may read it:
         tma_store_wait_all()

Source: PTX ISA "Asynchronous copy", DeepEP csrc/kernels/utils.cuh.
"""

from nbep.emulator import current_thread
from nbep.emulator.machine.source import polls

from ..cards import SM90, has_bulk_copies
from ..jit import primitive


@primitive("", "pred", constant=has_bulk_copies)
def has_tma():
    """Whether kernels copy in bulk on this card: known when compiling. The emulator's is `world.compute_capability`."""
    return has_bulk_copies(current_thread().world.compute_capability)


@primitive("mbarrier.init.shared::cta.b64 [$0], $1;", None, ("smem", "s32"), since=SM90)
def mbarrier_init(mbarrier, count):
    """Start phase 0 of an mbarrier that `count` arrivals complete. Who else uses it has to meet this thread first."""
    current_thread().mbarrier_init(mbarrier, count)


@primitive("mbarrier.arrive.shared::cta.b64 _, [$0];", None, "smem", since=SM90)
def mbarrier_arrive(mbarrier):
    """Arrive once: release within the block."""
    current_thread().mbarrier_arrive(mbarrier)


@primitive("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, ("smem", "s32"), since=SM90)
def mbarrier_arrive_expect_tx(mbarrier, num_bytes):
    """Expect `num_bytes` more bytes of copies in this phase, and arrive once."""
    current_thread().mbarrier_arrive_expect_tx(mbarrier, num_bytes)


@polls
@primitive(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.s32 $0, 1, 0, p; }",
    "pred",
    ("smem", "s32"),
    since=SM90,
)
def mbarrier_try_wait_parity(mbarrier, parity):
    """Whether the phase of that parity is complete, after a short hardware wait. Acquire within the block if so."""
    return current_thread().mbarrier_try_wait(mbarrier, parity)


@primitive("mbarrier.inval.shared::cta.b64 [$0];", None, "smem", since=SM90)
def mbarrier_inval(mbarrier):
    """Give the mbarrier's 8 bytes back to plain use."""
    current_thread().mbarrier_inval(mbarrier)


@primitive("fence.mbarrier_init.release.cluster;", since=SM90)
def fence_mbarrier_init():
    """Release mbarrier_init to other blocks of the cluster, and to bulk copies on older cards."""
    current_thread().fence("weak", "cta")


@primitive("fence.proxy.async.shared::cta;", since=SM90)
def fence_proxy_async_shared():
    """Order this thread's plain accesses to shared memory before the bulk copies that follow."""
    current_thread().fence_proxy_async()


@primitive("fence.proxy.async.global;", since=SM90)
def fence_proxy_async_global():
    """Order plain accesses to global memory that this thread has seen before the bulk copies that follow."""
    current_thread().fence_proxy_async_global()


@primitive(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    None,
    ("smem", "s64", "s32", "smem"),
    since=SM90,
)
def tma_load_1d(smem, address, num_bytes, mbarrier):
    """Start copying `num_bytes` from global memory to shared memory; they count on `mbarrier` when they are there."""
    current_thread().bulk_load(smem, address, num_bytes, mbarrier)


@primitive("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", None, ("s64", "smem", "s32"), since=SM90)
def tma_store_1d(address, smem, num_bytes):
    """Start copying `num_bytes` from shared memory to global memory, in this thread's current bulk group."""
    current_thread().bulk_store(address, smem, num_bytes)


@primitive("cp.async.bulk.commit_group;", since=SM90)
def tma_store_commit():
    """Close this thread's current bulk group."""
    current_thread().bulk_commit_group()


@primitive("cp.async.bulk.wait_group.read 0;", since=SM90)
def tma_store_wait_read_all():
    """Wait until all bulk groups of this thread have read their shared memory, so that it may be written again."""
    current_thread().bulk_wait_group_read(0)


@primitive("cp.async.bulk.wait_group.read 1;", since=SM90)
def tma_store_wait_read_1():
    """Wait until at most the latest bulk group of this thread still reads shared memory."""
    current_thread().bulk_wait_group_read(1)


@primitive("cp.async.bulk.wait_group.read 3;", since=SM90)
def tma_store_wait_read_3():
    """Wait until at most the 3 latest bulk groups of this thread still read shared memory."""
    current_thread().bulk_wait_group_read(3)


@primitive("cp.async.bulk.wait_group.read 7;", since=SM90)
def tma_store_wait_read_7():
    """Wait until at most the 7 latest bulk groups of this thread still read shared memory."""
    current_thread().bulk_wait_group_read(7)


@primitive("cp.async.bulk.wait_group 0;", since=SM90)
def tma_store_wait_all():
    """Wait until all bulk groups of this thread are done and their writes are visible to this thread."""
    current_thread().bulk_wait_group(0)
