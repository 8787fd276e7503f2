"""Rings and double buffers, broken: rank 0 fills slots, rank 1 empties them; tail and head say how far they are."""

from cells import ALL, COUNT, DATA, HEAD, OTHER, TAIL, cell, linger, together, wait
from entries import OVERWRITTEN, Race, maybe
from litmus import MBARRIER

from nbep.device.primitives import (
    fence_mbarrier_init,
    fence_proxy_async_global,
    fence_proxy_async_shared,
    lane_id,
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    ld_shared_s32,
    ld_weak_s32,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    st_shared_s32,
    st_weak_s32,
    syncwarp,
    tma_load_1d,
    tma_store_1d,
    tma_store_commit,
    tma_store_wait_all,
    tma_store_wait_read_all,
)
from nbep.emulator import DeadlockError

SLOTS, ITEMS = 2, 6


def nothing():
    """No step."""


def slot_of(memory, item):
    return memory + DATA + 4 * (item % SLOTS)


def sender(
    publish=st_release_sys_s32, poll=ld_relaxed_sys_s32, slots=SLOTS, tail_first=False, too_much=0, pace=nothing
):
    """too_much: so many more the tail says once all slots have been filled."""

    def fill(memory):
        for item in range(ITEMS):
            wait(memory + HEAD, poll, item + 1 - slots)
            if tail_first:
                publish(memory + TAIL, item + 1)
            pace()
            st_weak_s32(slot_of(memory, item), item)
            if not tail_first:
                publish(memory + TAIL, item + 1 + (too_much if item + 1 >= slots else 0))

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


def loads_through_two_stages(mbarrier, parity):
    """Four rows come by bulk loads. mbarrier(row), parity(row): what is waited for; each stage has an mbarrier."""

    def load_rows(memory):
        for i in range(8 * 4):
            st_weak_s32(memory + DATA + 4 * i, i)
        fence_proxy_async_global()
        for stage in range(2):
            mbarrier_init(MBARRIER + 8 * stage, 1)
            for word in range(8):
                st_shared_s32(32 * stage + 4 * word, -1)
        fence_mbarrier_init()
        fence_proxy_async_shared()
        for row in range(4):
            stage = row % 2
            mbarrier_arrive_expect_tx(MBARRIER + 8 * stage, 32)
            tma_load_1d(32 * stage, memory + DATA + 32 * row, 32, MBARRIER + 8 * stage)
            while not mbarrier_try_wait_parity(MBARRIER + 8 * mbarrier(row), parity(row)):
                pass
            ld_shared_s32(32 * stage)
            fence_proxy_async_shared()

    return together((0, load_rows, 1, 1))


def lanes_fill_a_stage(memory):
    """Lane 0 starts the copies; lane 1 waits for them, and so for none."""
    for turn in range(2):
        st_shared_s32(4 * lane_id(), turn)
        fence_proxy_async_shared()
        syncwarp(ALL)
        if lane_id() == 0:
            tma_store_1d(memory + DATA + 128 * turn, 0, 128)
            tma_store_commit()
        elif lane_id() == 1:
            tma_store_wait_read_all()
        syncwarp(ALL)
    if lane_id() == 0:
        tma_store_wait_all()


FULL, FREE = (TAIL, OTHER), (HEAD, COUNT)  # of the two slots of a ring


def fill_two(memory):
    """Rank 0 fills two slots in turn, each with a flag of its own."""
    for item in range(ITEMS):
        slot, turn = item % SLOTS, item // SLOTS
        wait(memory + FREE[slot], at_least=turn)
        st_weak_s32(memory + DATA + 64 * slot, item)
        st_release_sys_s32(memory + FULL[slot], turn + 1)


def empty_two(flag):
    """flag(item): the slot whose flag is waited for."""

    def empty(memory):
        for item in range(ITEMS):
            slot, turn = item % SLOTS, item // SLOTS
            wait(memory + FULL[flag(item)], at_least=turn + (flag(item) <= slot))
            ld_weak_s32(memory + DATA + 64 * slot)
            st_release_sys_s32(memory + FREE[slot], turn + 1)

    return empty


def send_by_lanes(memory):
    for item in range(ITEMS):
        if lane_id() == 0:
            wait(memory + HEAD, at_least=item + 1 - SLOTS)
        syncwarp(ALL)
        st_weak_s32(memory + DATA + 128 * (item % SLOTS) + 4 * lane_id(), item)
        syncwarp(ALL)
        if lane_id() == 0:
            st_release_sys_s32(memory + TAIL, item + 1)


def receive_by_lanes(memory):
    """Lane 0 gives a slot back when it has read its own word, and speaks for all."""
    for item in range(ITEMS):
        if lane_id() == 0:
            wait(memory + TAIL, at_least=item + 1)
        syncwarp(ALL)
        ld_weak_s32(memory + DATA + 128 * (item % SLOTS) + 4 * lane_id())
        if lane_id() == 0:
            st_release_sys_s32(memory + HEAD, item + 1)


ENTRIES = [
    Race("ring: the sender does not wait", ring(sender(slots=ITEMS), receiver(pace=linger)),
         OVERWRITTEN, (": data[",), range(8), least=2),
    Race("ring: the sender takes it for larger than it is", ring(sender(slots=SLOTS + 1), receiver(pace=linger)),
         OVERWRITTEN, (": data[", maybe(cell("head"))), range(6),
         least=2),
    Race("ring: the head moves before the load", ring(sender(), receiver(head_first=True, pace=linger)),
         OVERWRITTEN, (": data[", cell("head")), range(8),
         least=2),
    Race("ring: the tail moves before the store", ring(sender(tail_first=True), receiver()), "old signal",
         (": data[", cell("tail")), range(8)),
    Race("ring: the tail says one too much", ring(sender(too_much=1, pace=linger), receiver()), "promised",
         (cell("tail"), ": data["), range(6), least=4),
    Race("double buffer: the copy engine is not told", copies(tell_engine=nothing), "no proxy fence",
         (cell("data[0]"), cell("tail")), least=4),
    Race("double buffer: the tail does not wait for the copy", copies(tma_store_wait_read_all), "copy writes",
         (cell("data[0]"), cell("tail"))),
    Race("double buffer: a stage is filled while a copy reads it", two_stages(nothing), "copy reads",
         ("`shared memory`",), least=4),
    Race("double buffer: nobody waits on the mbarrier", two_stages(wait_for_load=False), "copy, mbarrier",
         ("`shared memory`", "the mbarrier at shared byte 256"), least=4),
    Race("double buffer: the parity of an mbarrier stays the same",
         loads_through_two_stages(lambda row: row % 2, lambda row: 0), "copy, phase",
         ("`shared memory`", "the mbarrier at shared byte 256"), also=(DeadlockError,)),
    Race("double buffer: waits on the mbarrier of the other stage",
         loads_through_two_stages(lambda row: 0, lambda row: row // 2), "copy, mbarrier",
         ("`shared memory`", "the mbarrier at shared byte 264"), least=4),
    Race("double buffer: another lane waits for the copy", together((0, lanes_fill_a_stage, 1, 32)), "copy reads",
         ("`shared memory`",), least=4),
    Race("ring of two: waits for the other slot's flag", ring(fill_two, empty_two(lambda item: 0)), "old signal",
         (cell("data[16]"), cell("tail"), cell("other flag")), range(8)),
    Race("ring: a lane gives the slot back for all lanes",
         together((0, send_by_lanes, 1, 32), (1, receive_by_lanes, 1, 32)), "another lane signals", (cell("head"),),
         range(6)),
]  # fmt: skip
