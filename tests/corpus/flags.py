"""A message through a flag, broken: rank 0 writes data and raises the flag, rank 1 waits for it and reads."""

from cells import ALL, DATA, FLAG, OTHER, cell, linger, together, wait
from entries import Race, maybe

from nbep.device.primitives import (
    fence_acq_rel_gpu,
    lane_id,
    ld_acquire_gpu_s32,
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    ld_weak_s32,
    shfl_idx_s32,
    st_relaxed_sys_s32,
    st_release_gpu_s32,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
)


def nothing():
    """No step."""


def writer(raise_flag=st_release_sys_s32, before=nothing, after=nothing):
    def write(memory):
        st_weak_s32(memory + DATA, 42)
        before()
        raise_flag(memory + FLAG, 1)
        after()

    return write


def reader(load=ld_acquire_sys_s32, after=nothing, flag=FLAG):
    def read(memory):
        wait(memory + flag, load)
        after()
        ld_weak_s32(memory + DATA)

    return read


def message(write, read, threads=1):
    return together((0, write, 1, threads), (1, read, 1, threads))


def flag_before_data(memory):
    st_release_sys_s32(memory + FLAG, 1)
    st_weak_s32(memory + DATA, 42)


def flag_before_a_bulk_of_data(memory):
    """A second message goes out with the first one's flag."""
    st_weak_s32(memory + DATA, 1)
    st_release_sys_s32(memory + FLAG, 1)
    wait(memory + OTHER)
    st_weak_s32(memory + DATA + 4, 2)


def read_both(memory):
    wait(memory + FLAG)
    ld_weak_s32(memory + DATA)
    st_release_sys_s32(memory + OTHER, 1)
    linger()
    ld_weak_s32(memory + DATA + 4)


def lanes_write(meet):
    def write(memory):
        st_weak_s32(memory + DATA + 4 * lane_id(), 1)
        meet()
        if lane_id() == 0:
            st_release_sys_s32(memory + FLAG, 1)

    return write


def lanes_read(meet):
    def read(memory):
        if lane_id() == 0:
            wait(memory + FLAG)
        meet()
        ld_weak_s32(memory + DATA + 4 * lane_id())

    return read


def meet_all():
    syncwarp(ALL)


def shuffle():
    shfl_idx_s32(ALL, 1, 0)


def read_without_waiting(memory):
    ld_weak_s32(memory + DATA)


def write_with_another_flag(memory):
    """The flag that the reader waits for says something else, and is raised first."""
    st_release_sys_s32(memory + OTHER, 1)
    writer()(memory)


ENTRIES = [
    Race("flag: relaxed store", message(writer(st_relaxed_sys_s32), reader()), "store too weak", (cell("flag"),),
         least=4),
    Race("flag: relaxed load", message(writer(), reader(ld_relaxed_sys_s32)), "load too weak", (cell("flag"),),
         least=4),
    Race("flag: both ends relaxed", message(writer(st_relaxed_sys_s32), reader(ld_relaxed_sys_s32)), "both too weak",
         (cell("flag"),), least=4),
    Race("flag: release of the GPU between ranks", message(writer(st_release_gpu_s32), reader()),
         "racing store's scope", (cell("flag"),), least=4),
    Race("flag: acquire of the GPU between ranks", message(writer(), reader(ld_acquire_gpu_s32)),
         "racing load's scope", (cell("flag"),), least=4),
    Race("flag: fence of the GPU before the store",
         message(writer(st_relaxed_sys_s32, before=fence_acq_rel_gpu), reader()), "store fence scope", (cell("flag"),),
         least=4),
    Race("flag: fence of the GPU after the load",
         message(writer(), reader(ld_relaxed_sys_s32, after=fence_acq_rel_gpu)), "load fence scope", (cell("flag"),),
         least=4),
    Race("flag: raised before the data is written", message(flag_before_data, reader()),
         ("old signal", "old signal, loader"), (cell("data[0]"), cell("flag")), range(12)),
    Race("flag: a second message without one", message(flag_before_a_bulk_of_data, read_both),
         ("old signal", "old signal, loader"), (cell("data[1]"), cell("flag")), range(8)),
    Race("flag: weak store", message(writer(st_weak_s32), reader()), "weak store", (cell("flag"),), range(8)),
    Race("flag: weak load", message(writer(), reader(ld_weak_s32)), "weak load", (cell("flag"),), range(8)),
    Race("flag: lanes write, no syncwarp", message(lanes_write(nothing), lanes_read(meet_all), 32),
         "another lane signals", (cell("flag"),), least=4),
    Race("flag: a lane waits, a shuffle tells the others", message(lanes_write(meet_all), lanes_read(shuffle), 32),
         "shuffle passes on", (cell("flag"),), least=4),
    Race("flag: a lane waits, the others do not", message(lanes_write(meet_all), lanes_read(nothing), 32),
         ("neither waited", "gone on"), (": data[", maybe(cell("flag"))), least=4),
    Race("flag: nobody waits", message(writer(), read_without_waiting), ("neither waited", "not waited"),
         (cell("data[0]"),), range(8)),
    Race("flag: the reader waits for another one", message(write_with_another_flag, reader(flag=OTHER)),
         ("old signal", "old signal, loader"), (cell("data[0]"), cell("other flag"), maybe(cell("flag"))), range(12)),
]  # fmt: skip
