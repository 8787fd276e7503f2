"""A message through a flag, broken: rank 0 writes data and raises the flag, rank 1 waits for it and reads."""

from cells import ALL, DATA, FLAG, OTHER, cell, linger, together, wait
from entries import Broken

from nbep.device.primitives import (
    atom_add_relaxed_gpu_s32,
    fence_acq_rel_gpu,
    fence_acq_rel_sys,
    lane_id,
    ld_acquire_gpu_s32,
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    ld_volatile_s32,
    ld_weak_s32,
    shfl_idx_s32,
    st_relaxed_sys_s32,
    st_release_gpu_s32,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
)
from nbep.emulator import DataRace


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


def fence_behind_the_flag(memory):
    st_weak_s32(memory + DATA, 42)
    st_relaxed_sys_s32(memory + FLAG, 1)
    fence_acq_rel_sys()


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


def relay(load=ld_acquire_sys_s32, pass_on=st_release_sys_s32):
    def pass_message_on(memory):
        wait(memory + FLAG, load)
        pass_on(memory + OTHER, 1)

    return pass_message_on


def count_on(memory):
    wait(memory + FLAG, ld_relaxed_sys_s32)
    atom_add_relaxed_gpu_s32(memory + FLAG, 1)


def read_second_count(memory):
    wait(memory + FLAG, at_least=2)
    ld_weak_s32(memory + DATA)


def three(middle, last):
    return together((0, writer(), 1, 1), (1, middle, 1, 1), (2, last, 1, 1))


STORE, LOAD = f"the store to {cell('flag')}", f"the load of {cell('flag')}"
WEAK = "is too weak to order the store before this load"
OTHER_END = ("scope", "data[", "other flag", "are both")
ENTRIES = [
    Broken(
        "flag: relaxed store", message(writer(st_relaxed_sys_s32), reader()), DataRace,
        (STORE, WEAK, "releases nothing"), (LOAD, *OTHER_END), least=4,
    ),
    Broken(
        "flag: relaxed load", message(writer(), reader(ld_relaxed_sys_s32)), DataRace, (LOAD, WEAK, "acquires nothing"),
        (STORE, *OTHER_END), least=4,
    ),
    Broken(
        "flag: volatile load behind a fence and a relaxed store",
        message(writer(st_relaxed_sys_s32, before=fence_acq_rel_sys), reader(ld_volatile_s32)),
        DataRace, (LOAD, WEAK, "volatile"), (STORE, *OTHER_END), least=4,
    ),
    Broken(
        "flag: relaxed store, and a load with a fence",
        message(writer(st_relaxed_sys_s32), reader(ld_volatile_s32, after=fence_acq_rel_sys)),
        DataRace, (STORE, WEAK, "no fence comes before it"), (LOAD, *OTHER_END), least=4,
    ),
    Broken(
        "flag: both ends relaxed", message(writer(st_relaxed_sys_s32), reader(ld_relaxed_sys_s32)), DataRace,
        (f"the store to and the load of {cell('flag')}", "both too weak"), ("data[",), least=4,
    ),
    Broken(
        "flag: fence behind the store", message(fence_behind_the_flag, reader()), DataRace, (STORE, WEAK),
        (LOAD, *OTHER_END), least=4,
    ),
    Broken(
        "flag: release of the GPU between ranks", message(writer(st_release_gpu_s32), reader()), DataRace,
        ((f"the scope of the store to {cell('flag')}", f"the scope of this store to {cell('flag')}"), "takes sys"),
        ("data[", "load of"), least=4,
    ),
    Broken(
        "flag: acquire of the GPU between ranks", message(writer(), reader(ld_acquire_gpu_s32)), DataRace,
        ((f"the scope of the load of {cell('flag')}", f"the scope of this load of {cell('flag')}"), "takes sys"),
        ("data[", "store to"), least=4,
    ),
    Broken(
        "flag: fence of the GPU before the store",
        message(writer(st_relaxed_sys_s32, before=fence_acq_rel_gpu), reader()), DataRace,
        (f"the scope of the fence before the store to {cell('flag')}", "gpu, but between ranks it takes sys"),
        ("load of", "data["), least=4,
    ),
    Broken(
        "flag: fence of the GPU after the load",
        message(writer(), reader(ld_relaxed_sys_s32, after=fence_acq_rel_gpu)), DataRace,
        (f"the scope of the fence after the load of {cell('flag')}", "gpu, but between ranks it takes sys"),
        ("store to", "data["), least=4,
    ),
    Broken(
        "flag: raised before the data is written", message(flag_before_data, reader()), DataRace,
        (f"of {cell('data[0]')}", (f"heard of the one that stores is {cell('flag')}",
                                     f"heard of this block is {cell('flag')}"), "which was stored before"),
        ("too weak", "scope"), range(12),
    ),
    Broken(
        "flag: a second message without one", message(flag_before_a_bulk_of_data, read_both), DataRace,
        (f"of {cell('data[1]')}", f"is {cell('flag')}", "which was stored before"),
        ("too weak", "other flag", "data[0]"), range(8),
    ),
    Broken(
        "flag: weak store", message(writer(st_weak_s32), reader()), DataRace,
        (f"store to {cell('flag')}", "is too weak: weak, but another thread loads it"), ("data[", "scope"), range(8),
    ),
    Broken(
        "flag: weak load", message(writer(), reader(ld_weak_s32)), DataRace,
        (f"load of {cell('flag')}", "is too weak: weak, but another thread stores to it"), ("data[", "scope"), range(8),
    ),
    Broken(
        "flag: lanes write, no syncwarp", message(lanes_write(nothing), lanes_read(meet_all), 32), DataRace,
        (("no syncwarp orders the store before the store to", "no syncwarp orders this store before the store to"),
         cell("flag")), ("too weak", "scope", "barrier"), least=4,
    ),
    Broken(
        "flag: lanes write, a shuffle in place of a syncwarp", message(lanes_write(shuffle), lanes_read(meet_all), 32),
        DataRace, ("no syncwarp orders", ("shfl.idx brings lanes together, but orders no memory", cell("flag"))),
        ("too weak", "scope"),
        least=4,
    ),
    Broken(
        "flag: a lane waits, a shuffle tells the others", message(lanes_write(meet_all), lanes_read(shuffle), 32),
        DataRace, ("no syncwarp passes on to all lanes", cell("flag"), "shfl.idx"), ("too weak", "scope"), least=4,
    ),
    Broken(
        "flag: a lane waits, the others do not", message(lanes_write(meet_all), lanes_read(nothing), 32), DataRace,
        (("no syncwarp orders this load behind the load of", "nothing at all orders the store before this load of",
          "nothing at all orders the load and this store of"), (cell("flag"), "data[")), ("too weak", "scope"), least=4,
    ),
    Broken(
        "flag: nobody waits", message(writer(), read_without_waiting), DataRace,
        (("nothing at all orders the store before this load", "nothing at all orders the load and this store of"),
         cell("data[0]")),
        ("too weak", "flag"), range(8),
    ),
    Broken(
        "flag: the reader waits for another one", message(write_with_another_flag, reader(flag=OTHER)), DataRace,
        (cell("data[0]"), (f"heard of the one that stores is {cell('other flag')}",
                           f"heard of this block is {cell('other flag')}"), "which was stored before"),
        ("too weak", "scope"), range(12),
    ),
    Broken(
        "chain: a relay loads relaxed", three(relay(ld_relaxed_sys_s32), reader(flag=OTHER)), DataRace,
        (f"the load of {cell('flag', 2)}", "acquires nothing"), ("other flag", "store to", "data["), least=4,
    ),
    Broken(
        "chain: a relay passes on relaxed", three(relay(pass_on=st_relaxed_sys_s32), reader(flag=OTHER)), DataRace,
        (f"the store to {cell('other flag', 2)}", "releases nothing"), (": flag", "load of", "data["), least=4,
    ),
    Broken(
        "chain: the last one loads relaxed", three(relay(), reader(ld_relaxed_sys_s32, flag=OTHER)), DataRace,
        (f"the load of {cell('other flag', 2)}", "acquires nothing"), (": flag", "store to", "data["), least=4,
    ),
    Broken(
        "chain: an atomic of the GPU on the way", three(count_on, read_second_count), DataRace,
        ("scope", cell("flag", 2), "gpu, but between ranks it takes sys"), ("data[", "too weak"), least=4,
    ),
]  # fmt: skip
