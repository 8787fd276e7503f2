"""Stores to global memory. The name says the order, the scope and the kind.

 st_release_{sys,gpu}   what this thread wrote or acquired before is visible to whoever acquires the value
 st_relaxed_{sys,gpu}   one coherent value; publishes nothing else
 st_volatile            as relaxed at system scope, never merged or dropped
 st_na                  weak, with the hint not to keep it in L1: for payload that a release publishes later
 st_weak                weak: the thread's own data, or data that a release or barrier publishes later

Addresses are byte addresses, aligned to the kind. Integers wrap to the kind. f32 takes np.float32, v2 and v4 take one
tuple of 2 or 4 u32 words. Source: DeepEP csrc/kernels/utils.cuh, PTX ISA "Memory Consistency Model".
"""

from nbep.emulator import current_thread

from ..jit import primitive


@primitive("st.release.sys.global.s32 [$0], $1;", None, ("s64", "s32"))
def st_release_sys_s32(address, value):
    """Publish a flag, and all that was written before it, to other GPUs and the host."""
    current_thread().store(address, "s32", value, "release", "sys")


@primitive("st.release.sys.global.s64 [$0], $1;", None, ("s64", "s64"))
def st_release_sys_s64(address, value):
    """Publish a 64-bit flag, and all that was written before it, to other GPUs and the host."""
    current_thread().store(address, "s64", value, "release", "sys")


@primitive("st.relaxed.sys.global.s32 [$0], $1;", None, ("s64", "s32"))
def st_relaxed_sys_s32(address, value):
    """Tell other GPUs one value; it publishes nothing else."""
    current_thread().store(address, "s32", value, "relaxed", "sys")


@primitive("st.relaxed.sys.global.s64 [$0], $1;", None, ("s64", "s64"))
def st_relaxed_sys_s64(address, value):
    """Tell other GPUs one 64-bit value; it publishes nothing else."""
    current_thread().store(address, "s64", value, "relaxed", "sys")


@primitive("st.release.gpu.global.s32 [$0], $1;", None, ("s64", "s32"))
def st_release_gpu_s32(address, value):
    """Publish a flag, and all that was written before it, to other blocks of this GPU."""
    current_thread().store(address, "s32", value, "release", "gpu")


@primitive("st.relaxed.gpu.global.s32 [$0], $1;", None, ("s64", "s32"))
def st_relaxed_gpu_s32(address, value):
    """Tell other blocks of this GPU one value; it publishes nothing else."""
    current_thread().store(address, "s32", value, "relaxed", "gpu")


@primitive("st.volatile.global.s32 [$0], $1;", None, ("s64", "s32"))
def st_volatile_s32(address, value):
    """Write a cell that others poll; precede it with a fence if other data depends on it."""
    current_thread().store(address, "s32", value, "volatile", "sys")


@primitive("st.global.L1::no_allocate.s32 [$0], $1;", None, ("s64", "s32"))
def st_na_s32(address, value):
    """Write an int32 of payload."""
    current_thread().store(address, "s32", value, "weak", "cta")


@primitive("st.global.L1::no_allocate.s64 [$0], $1;", None, ("s64", "s64"))
def st_na_s64(address, value):
    """Write an int64 of payload."""
    current_thread().store(address, "s64", value, "weak", "cta")


@primitive("st.global.L1::no_allocate.f32 [$0], $1;", None, ("s64", "f32"))
def st_na_f32(address, value):
    """Write a float32 of payload."""
    current_thread().store(address, "f32", value, "weak", "cta")


@primitive("st.global.L1::no_allocate.v2.u32 [$0], {$1, $2};", None, ("s64", "v2"))
def st_na_v2(address, value):
    """Write 8 bytes of payload, aligned to 8."""
    current_thread().store(address, "v2", value, "weak", "cta")


@primitive("st.global.L1::no_allocate.v4.u32 [$0], {$1, $2, $3, $4};", None, ("s64", "v4"))
def st_na_v4(address, value):
    """Write 16 bytes of payload, aligned to 16."""
    current_thread().store(address, "v4", value, "weak", "cta")


@primitive("st.global.u8 [$0], $1;", None, ("s64", "u8"))
def st_weak_u8(address, value):
    """Write the low byte of an integer."""
    current_thread().store(address, "u8", value, "weak", "cta")


@primitive("st.global.s32 [$0], $1;", None, ("s64", "s32"))
def st_weak_s32(address, value):
    """Write an int32."""
    current_thread().store(address, "s32", value, "weak", "cta")


@primitive("st.global.u32 [$0], $1;", None, ("s64", "u32"))
def st_weak_u32(address, value):
    """Write a uint32."""
    current_thread().store(address, "u32", value, "weak", "cta")


@primitive("st.global.s64 [$0], $1;", None, ("s64", "s64"))
def st_weak_s64(address, value):
    """Write an int64."""
    current_thread().store(address, "s64", value, "weak", "cta")


@primitive("st.global.f32 [$0], $1;", None, ("s64", "f32"))
def st_weak_f32(address, value):
    """Write a float32."""
    current_thread().store(address, "f32", value, "weak", "cta")


@primitive("st.global.v2.u32 [$0], {$1, $2};", None, ("s64", "v2"))
def st_weak_v2(address, value):
    """Write 8 bytes, aligned to 8."""
    current_thread().store(address, "v2", value, "weak", "cta")
