"""A block's shared memory. Addresses start at `smem_base()`; they are byte addresses below 2**32, aligned to the kind.

Plain accesses are ordered by `syncthreads`, `bar_sync` or `syncwarp`. What other warps of the block poll without a
barrier is written by atomics: a load beside a plain store is a hazard to compute-sanitizer, whatever their order.

Kinds are those of loads.py and stores.py.
"""

from nbep.emulator import current_thread

from ..jit import primitive


@primitive("ld.shared.s32 $0, [$1];", "s32", "smem")
def ld_shared_s32(address):
    """Read an int32."""
    return current_thread().load_shared(address, "s32", "weak")


@primitive("ld.shared.s64 $0, [$1];", "s64", "smem")
def ld_shared_s64(address):
    """Read an int64."""
    return current_thread().load_shared(address, "s64", "weak")


@primitive("ld.shared.f32 $0, [$1];", "f32", "smem")
def ld_shared_f32(address):
    """Read a float32."""
    return current_thread().load_shared(address, "f32", "weak")


@primitive("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", "v4", "smem")
def ld_shared_v4(address):
    """Read 16 bytes as 4 u32 words, aligned to 16."""
    return current_thread().load_shared(address, "v4", "weak")


@primitive("st.shared.s32 [$0], $1;", None, ("smem", "s32"))
def st_shared_s32(address, value):
    """Write an int32."""
    current_thread().store_shared(address, "s32", value, "weak")


@primitive("st.shared.s64 [$0], $1;", None, ("smem", "s64"))
def st_shared_s64(address, value):
    """Write an int64."""
    current_thread().store_shared(address, "s64", value, "weak")


@primitive("st.shared.f32 [$0], $1;", None, ("smem", "f32"))
def st_shared_f32(address, value):
    """Write a float32."""
    current_thread().store_shared(address, "f32", value, "weak")


@primitive("st.shared.v2.u32 [$0], {$1, $2};", None, ("smem", "v2"))
def st_shared_v2(address, value):
    """Write 8 bytes from a tuple of 2 u32 words, aligned to 8."""
    current_thread().store_shared(address, "v2", value, "weak")


@primitive("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", None, ("smem", "v4"))
def st_shared_v4(address, value):
    """Write 16 bytes from a tuple of 4 u32 words, aligned to 16."""
    current_thread().store_shared(address, "v4", value, "weak")


@primitive("ld.relaxed.cta.shared.s32 $0, [$1];", "s32", "smem")
def ld_relaxed_cta_shared_s32(address):
    """Poll a cell that another warp of the block writes; it orders nothing else."""
    return current_thread().load_shared(address, "s32", "relaxed")


@primitive("ld.acquire.cta.shared.s32 $0, [$1];", "s32", "smem")
def ld_acquire_cta_shared_s32(address):
    """Read a flag that another warp of the block releases."""
    return current_thread().load_shared(address, "s32", "acquire")


@primitive("atom.relaxed.cta.shared.add.s32 $0, [$1], $2;", "s32", ("smem", "s32"))
def atom_add_relaxed_cta_shared_s32(address, value):
    """Add, and give the value before; wraps."""
    return current_thread().atomic_shared("add", address, "s32", value, "relaxed")


@primitive("atom.relaxed.cta.shared.exch.b32 $0, [$1], $2;", "s32", ("smem", "s32"))
def atom_exch_relaxed_cta_shared_s32(address, value):
    """Write a cell that another warp of the block polls, and give the value before; it publishes nothing else."""
    return current_thread().atomic_shared("exch", address, "s32", value, "relaxed")


@primitive("atom.release.cta.shared.exch.b32 $0, [$1], $2;", "s32", ("smem", "s32"))
def atom_exch_release_cta_shared_s32(address, value):
    """Publish a flag, and all that was written before it, to the other warps of the block; give the value before."""
    return current_thread().atomic_shared("exch", address, "s32", value, "release")
