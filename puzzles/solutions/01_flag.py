"""Puzzle 1, solved: the store of the flag is a release, the load that polls it an acquire, and data lies between."""

from nbep.device.jit import device_function
from nbep.device.primitives import ld_acquire_sys_s32, ld_weak_s32, st_release_sys_s32, st_weak_s32
from nbep.device.protocols.waits import start_wait
from nbep.puzzle import give_up


@device_function
def send(value, data, flag):
    st_weak_s32(data, value)
    st_release_sys_s32(flag, 1)


@device_function
def receive(data, flag, bounds):
    deadline = start_wait(bounds)
    while ld_acquire_sys_s32(flag) != 1:
        if give_up(bounds, deadline):
            break
    return ld_weak_s32(data)
