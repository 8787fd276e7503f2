"""Rings and double buffers, broken: rank 0 fills slots, rank 1 empties them; tail and head say how far they are."""

from cells import DATA, HEAD, TAIL, cell, linger, together, wait
from entries import Broken
from litmus import MBARRIER

from nbep.device.primitives import (
    fence_proxy_async_global,
    fence_proxy_async_shared,
    ld_acquire_sys_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_sys_s32,
    ld_shared_s32,
    ld_volatile_s32,
    ld_weak_s32,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    st_shared_s32,
    st_weak_s32,
    tma_load_1d,
    tma_store_1d,
    tma_store_commit,
    tma_store_wait_all,
    tma_store_wait_read_all,
)
from nbep.emulator import DataRace

SLOTS, ITEMS = 2, 6


def nothing():
    """No step."""


def slot_of(memory, item):
    return memory + DATA + 4 * (item % SLOTS)


def sender(publish=st_release_sys_s32, poll=ld_relaxed_sys_s32, slots=SLOTS, tail_first=False):
    def fill(memory):
        for item in range(ITEMS):
            wait(memory + HEAD, poll, item + 1 - slots)
            if tail_first:
                publish(memory + TAIL, item + 1)
            st_weak_s32(slot_of(memory, item), item)
            if not tail_first:
                publish(memory + TAIL, item + 1)

    return fill


def receiver(poll=ld_acquire_sys_s32, head_first=False, pace=nothing):
    def drain(memory):
        for item in range(ITEMS):
            wait(memory + TAIL, poll, item + 1)
            if head_first:
                st_relaxed_sys_s32(memory + HEAD, item + 1)
            pace()
            ld_weak_s32(slot_of(memory, item))
            if not head_first:
                st_relaxed_sys_s32(memory + HEAD, item + 1)

    return drain


def ring(send, receive):
    return together((0, send, 1, 1), (1, receive, 1, 1))


def copies(wait_for_writes=tma_store_wait_all, tell_engine=fence_proxy_async_global):
    """A row goes by bulk copies to the ring, and from there to the receiver's shared memory."""

    def put_row(memory):
        for i in range(8):
            st_shared_s32(4 * i, 1)
        fence_proxy_async_shared()
        tma_store_1d(memory + DATA, 0, 32)
        tma_store_commit()
        wait_for_writes()
        st_release_sys_s32(memory + TAIL, 1)
        linger()
        tma_store_wait_all()

    def take_row(memory):
        mbarrier_init(MBARRIER, 1)
        wait(memory + TAIL)
        tell_engine()
        tma_load_1d(0, memory + DATA, 32, MBARRIER)
        mbarrier_arrive_expect_tx(MBARRIER, 32)
        while not mbarrier_try_wait_parity(MBARRIER, 0):
            pass
        ld_shared_s32(0)

    return ring(put_row, take_row)


def two_stages(wait_until_read=tma_store_wait_read_all, wait_for_load=True):
    """A stage of shared memory that is filled and sent, twice; then it takes what comes back."""

    def send_twice(memory):
        for turn in range(2):
            for i in range(8):
                st_shared_s32(4 * i, turn)
            fence_proxy_async_shared()
            tma_store_1d(memory + DATA + 32 * turn, 0, 32)
            tma_store_commit()
            wait_until_read()
        tma_store_wait_all()
        mbarrier_init(MBARRIER, 1)
        fence_proxy_async_global()
        tma_load_1d(0, memory + DATA, 32, MBARRIER)
        mbarrier_arrive_expect_tx(MBARRIER, 32)
        while wait_for_load and not mbarrier_try_wait_parity(MBARRIER, 0):
            pass
        ld_shared_s32(0)

    return together((0, send_twice, 1, 1))


STORE, LOAD = f"the store to {cell('tail')}", f"the load of {cell('tail')}"
LOST = (
    "was overwritten before this load",
    "is overwritten, and nothing at all tells this thread that it has been read",
)
ENTRIES = [
    Broken("ring: relaxed tail", ring(sender(st_relaxed_sys_s32), receiver()), DataRace, (STORE, "releases nothing"),
           (LOAD, "head", "data["), least=4),
    Broken("ring: relaxed poll of the tail", ring(sender(), receiver(ld_relaxed_sys_s32)), DataRace,
           (LOAD, "acquires nothing"), (STORE, "head", "data["), least=4),
    Broken("ring: volatile poll of the tail", ring(sender(), receiver(ld_volatile_s32)), DataRace,
           (LOAD, "volatile.sys", "acquires nothing"), (STORE, "head", "data["), least=4),
    Broken("ring: the head is polled with the GPU's scope", ring(sender(poll=ld_relaxed_gpu_s32), receiver()), DataRace,
           (("the scope of the load of", "the scope of this load of", "the scope of this store to"), cell("head")),
           ("tail", "data[")),
    Broken("ring: the sender does not wait", ring(sender(slots=ITEMS), receiver(pace=linger)), DataRace,
           (LOST, cell("data[")[:-2]), ("too weak", "scope", "tail"), range(8), least=2),
    Broken("ring: the sender takes it for larger than it is", ring(sender(slots=SLOTS + 1), receiver(pace=linger)),
           DataRace, (LOST, cell("data[")[:-2]), ("too weak", "scope", "tail"), range(6), least=2),
    Broken("ring: the head moves before the load", ring(sender(), receiver(head_first=True, pace=linger)), DataRace,
           (LOST, cell("data[")[:-2], cell("head")), ("too weak", "scope", "tail"), range(8), least=2),
    Broken("ring: the tail moves before the store", ring(sender(tail_first=True), receiver()), DataRace,
           (cell("data[")[:-2], cell("tail"), "which was stored before"), ("too weak", "scope", "head"), range(8)),
    Broken("double buffer: the copy engine is not told", copies(tell_engine=nothing), DataRace,
           ("the copy engine is not told", cell("tail"), "no fence.proxy.async.global", cell("data[0]")), ("too weak",),
           least=4),
    Broken("double buffer: the tail does not wait for the copy", copies(tma_store_wait_read_all), DataRace,
           ("has not been waited for: a wait_group is missing before the store to", cell("tail")), ("too weak",)),
    Broken("double buffer: a stage is filled while a copy reads it", two_stages(nothing), DataRace,
           ("the bulk copy that reads `shared memory`: byte 0", "wait_group.read is missing"), ("too weak",), least=4),
    Broken("double buffer: nobody waits on the mbarrier", two_stages(wait_for_load=False), DataRace,
           ("nobody has waited on the mbarrier of the bulk copy that writes `shared memory`: byte 0",), ("wait_group",),
           least=4),
]  # fmt: skip
