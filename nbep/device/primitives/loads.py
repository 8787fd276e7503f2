"""Loads from global memory. The name says the order, the scope and the kind.

 ld_acquire_{sys,gpu}   what was written before the release that is read here is visible afterwards
 ld_relaxed_{sys,gpu}   one coherent value; orders nothing else
 ld_volatile            as relaxed at system scope, never merged or dropped: for polls with another fence
 ld_nc                  the read-only path, which is not coherent: only for memory that is not written while the kernel
                        runs; with the hint not to keep it in L1
 ld_nc_keep             as ld_nc without the hint: for what other warps of the block read soon
 ld_na                  weak, with the hint not to keep it in L1: for payload that an acquire has already made visible
 ld_weak                weak: the thread's own data, or data ordered by a barrier

Addresses are byte addresses, aligned to the kind. s32, s64 and u8 give ints, f32 gives np.float32, v2 and v4 give a
tuple of 2 or 4 u32 words. Source: DeepEP csrc/kernels/utils.cuh, PTX ISA "Memory Consistency Model".
"""

from nbep.emulator import current_thread

from ..jit import primitive


@primitive("ld.acquire.sys.global.s32 $0, [$1];", "s32", "s64")
def ld_acquire_sys_s32(address):
    """Read a flag that another GPU or the host releases."""
    return current_thread().load(address, "s32", "acquire", "sys")


@primitive("ld.acquire.sys.global.s64 $0, [$1];", "s64", "s64")
def ld_acquire_sys_s64(address):
    """Read a 64-bit flag that another GPU or the host releases."""
    return current_thread().load(address, "s64", "acquire", "sys")


@primitive("ld.relaxed.sys.global.s32 $0, [$1];", "s32", "s64")
def ld_relaxed_sys_s32(address):
    """Read a value shared with another GPU; nothing else is ordered by it."""
    return current_thread().load(address, "s32", "relaxed", "sys")


@primitive("ld.relaxed.sys.global.s64 $0, [$1];", "s64", "s64")
def ld_relaxed_sys_s64(address):
    """Read a 64-bit value shared with another GPU; nothing else is ordered by it."""
    return current_thread().load(address, "s64", "relaxed", "sys")


@primitive("ld.volatile.global.s32 $0, [$1];", "s32", "s64")
def ld_volatile_s32(address):
    """Poll a cell; pair it with a fence if other data depends on it."""
    return current_thread().load(address, "s32", "volatile", "sys")


@primitive("ld.volatile.global.s64 $0, [$1];", "s64", "s64")
def ld_volatile_s64(address):
    """Poll a 64-bit cell; pair it with a fence if other data depends on it."""
    return current_thread().load(address, "s64", "volatile", "sys")


@primitive("ld.acquire.gpu.global.s32 $0, [$1];", "s32", "s64")
def ld_acquire_gpu_s32(address):
    """Read a flag that another block of this GPU releases."""
    return current_thread().load(address, "s32", "acquire", "gpu")


@primitive("ld.relaxed.gpu.global.s32 $0, [$1];", "s32", "s64")
def ld_relaxed_gpu_s32(address):
    """Read a value shared with another block of this GPU; nothing else is ordered by it."""
    return current_thread().load(address, "s32", "relaxed", "gpu")


@primitive("ld.global.nc.L1::no_allocate.u8 $0, [$1];", "u8", "s64", effect="pure")
def ld_nc_u8(address):
    """Read a constant byte, 0 to 255."""
    return current_thread().load(address, "u8", "nc", "cta")


@primitive("ld.global.nc.L1::no_allocate.s32 $0, [$1];", "s32", "s64", effect="pure")
def ld_nc_s32(address):
    """Read a constant int32."""
    return current_thread().load(address, "s32", "nc", "cta")


@primitive("ld.global.nc.s32 $0, [$1];", "s32", "s64", effect="pure")
def ld_nc_keep_s32(address):
    """Read a constant int32 that shares its 128 bytes with others that this block needs."""
    return current_thread().load(address, "s32", "nc", "cta")


@primitive("ld.global.nc.L1::no_allocate.s64 $0, [$1];", "s64", "s64", effect="pure")
def ld_nc_s64(address):
    """Read a constant int64."""
    return current_thread().load(address, "s64", "nc", "cta")


@primitive("ld.global.nc.s64 $0, [$1];", "s64", "s64", effect="pure")
def ld_nc_keep_s64(address):
    """Read a constant int64 that shares its 128 bytes with others that this block needs."""
    return current_thread().load(address, "s64", "nc", "cta")


@primitive("ld.global.nc.L1::no_allocate.f32 $0, [$1];", "f32", "s64", effect="pure")
def ld_nc_f32(address):
    """Read a constant float32."""
    return current_thread().load(address, "f32", "nc", "cta")


@primitive("ld.global.nc.L1::no_allocate.v2.u32 {$0, $1}, [$2];", "v2", "s64", effect="pure")
def ld_nc_v2(address):
    """Read 8 constant bytes, aligned to 8."""
    return current_thread().load(address, "v2", "nc", "cta")


@primitive("ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", "v4", "s64", effect="pure")
def ld_nc_v4(address):
    """Read 16 constant bytes, aligned to 16."""
    return current_thread().load(address, "v4", "nc", "cta")


@primitive("ld.global.L1::no_allocate.u8 $0, [$1];", "u8", "s64")
def ld_na_u8(address):
    """Read a payload byte, 0 to 255."""
    return current_thread().load(address, "u8", "weak", "cta")


@primitive("ld.global.L1::no_allocate.s32 $0, [$1];", "s32", "s64")
def ld_na_s32(address):
    """Read an int32 of payload."""
    return current_thread().load(address, "s32", "weak", "cta")


@primitive("ld.global.L1::no_allocate.s64 $0, [$1];", "s64", "s64")
def ld_na_s64(address):
    """Read an int64 of payload."""
    return current_thread().load(address, "s64", "weak", "cta")


@primitive("ld.global.L1::no_allocate.f32 $0, [$1];", "f32", "s64")
def ld_na_f32(address):
    """Read a float32 of payload."""
    return current_thread().load(address, "f32", "weak", "cta")


@primitive("ld.global.L1::no_allocate.v2.u32 {$0, $1}, [$2];", "v2", "s64")
def ld_na_v2(address):
    """Read 8 bytes of payload, aligned to 8."""
    return current_thread().load(address, "v2", "weak", "cta")


@primitive("ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", "v4", "s64")
def ld_na_v4(address):
    """Read 16 bytes of payload, aligned to 16."""
    return current_thread().load(address, "v4", "weak", "cta")


@primitive("ld.global.u8 $0, [$1];", "u8", "s64")
def ld_weak_u8(address):
    """Read a byte, 0 to 255."""
    return current_thread().load(address, "u8", "weak", "cta")


@primitive("ld.global.s32 $0, [$1];", "s32", "s64")
def ld_weak_s32(address):
    """Read an int32."""
    return current_thread().load(address, "s32", "weak", "cta")


@primitive("ld.global.s64 $0, [$1];", "s64", "s64")
def ld_weak_s64(address):
    """Read an int64."""
    return current_thread().load(address, "s64", "weak", "cta")


@primitive("ld.global.f32 $0, [$1];", "f32", "s64")
def ld_weak_f32(address):
    """Read a float32."""
    return current_thread().load(address, "f32", "weak", "cta")
