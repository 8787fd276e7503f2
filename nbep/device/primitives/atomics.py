"""Atomic operations on global memory. Each gives the value before.

 relaxed   indivisible; orders nothing else
 release   publishes what was written before
 acq_rel   publishes what was written before, and sees what the previous writer of the cell published

Addition wraps. Source: PTX ISA "atom".
"""

from nbep.emulator import current_thread

from ..jit import primitive


@primitive("atom.relaxed.sys.global.add.s32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_add_relaxed_sys_s32(address, value):
    """Add to a counter shared with other GPUs."""
    return current_thread().atomic("add", address, "s32", value, "relaxed", "sys")


@primitive("atom.release.sys.global.add.s32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_add_release_sys_s32(address, value):
    """Add to a counter shared with other GPUs, publishing what was written before."""
    return current_thread().atomic("add", address, "s32", value, "release", "sys")


@primitive("atom.acq_rel.sys.global.add.s32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_add_acq_rel_sys_s32(address, value):
    """Add to a counter shared with other GPUs, publishing what was written before and seeing what others published."""
    return current_thread().atomic("add", address, "s32", value, "acq_rel", "sys")


# PTX has 64-bit atomic addition for u64 alone; in two's complement it is the signed one.
@primitive("atom.relaxed.sys.global.add.u64 $0, [$1], $2;", "s64", ("s64", "s64"))
def atom_add_relaxed_sys_s64(address, value):
    """Add to a 64-bit counter shared with other GPUs."""
    return current_thread().atomic("add", address, "s64", value, "relaxed", "sys")


@primitive("atom.release.sys.global.add.u64 $0, [$1], $2;", "s64", ("s64", "s64"))
def atom_add_release_sys_s64(address, value):
    """Add to a 64-bit counter shared with other GPUs, publishing what was written before."""
    return current_thread().atomic("add", address, "s64", value, "release", "sys")


@primitive("atom.acq_rel.sys.global.add.u64 $0, [$1], $2;", "s64", ("s64", "s64"))
def atom_add_acq_rel_sys_s64(address, value):
    """Add to a 64-bit counter shared with other GPUs, publishing and seeing what was published."""
    return current_thread().atomic("add", address, "s64", value, "acq_rel", "sys")


@primitive("atom.acq_rel.gpu.global.add.s32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_add_acq_rel_gpu_s32(address, value):
    """Add to a counter shared by the blocks of this GPU, publishing and seeing what was published."""
    return current_thread().atomic("add", address, "s32", value, "acq_rel", "gpu")


@primitive("atom.release.gpu.global.add.s32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_add_release_gpu_s32(address, value):
    """Add to a counter shared by the blocks of this GPU, publishing what was written before."""
    return current_thread().atomic("add", address, "s32", value, "release", "gpu")


@primitive("atom.relaxed.gpu.global.add.s32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_add_relaxed_gpu_s32(address, value):
    """Add to a counter shared by the blocks of this GPU."""
    return current_thread().atomic("add", address, "s32", value, "relaxed", "gpu")


@primitive("atom.acq_rel.sys.global.exch.b32 $0, [$1], $2;", "s32", ("s64", "s32"))
def atom_exch_acq_rel_sys_s32(address, value):
    """Swap in a value shared with other GPUs, publishing and seeing what was published."""
    return current_thread().atomic("exch", address, "s32", value, "acq_rel", "sys")


@primitive("atom.acq_rel.sys.global.cas.b32 $0, [$1], $2, $3;", "s32", ("s64", "s32", "s32"))
def atom_cas_acq_rel_sys_s32(address, compare, value):
    """Write `value` if the cell holds `compare`, publishing and seeing what was published."""
    return current_thread().atomic("cas", address, "s32", value, "acq_rel", "sys", compare)
