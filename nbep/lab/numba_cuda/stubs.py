"""What `numba.cuda` has for kernels. Their compiler knows these objects; the host can do nothing with them."""

from __future__ import annotations

from typing import Any

import numpy as np


class Stub:
    """Something that only kernels may use. parts: what it has inside, as `cuda.atomic.add`"""

    def __init__(self, name: str, *parts: str):
        self._name = name
        for part in parts:
            setattr(self, part, Stub(f"{name}.{part}"))

    def __repr__(self) -> str:
        return f"cuda.{self._name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self!r} is for kernels only")


class Dim3(Stub):
    """threadIdx and its like."""


threadIdx, blockIdx, blockDim, gridDim = (Dim3(name) for name in ("threadIdx", "blockIdx", "blockDim", "gridDim"))
laneid, warpsize = Stub("laneid"), Stub("warpsize")
grid, gridsize = Stub("grid"), Stub("gridsize")
shared, local, const = Stub("shared", "array"), Stub("local", "array"), Stub("const", "array_like")
syncthreads, syncthreads_count, syncthreads_and, syncthreads_or = (
    Stub(f"syncthreads{end}") for end in ("", "_count", "_and", "_or")
)
syncwarp, activemask, lanemask_lt = Stub("syncwarp"), Stub("activemask"), Stub("lanemask_lt")
threadfence, threadfence_block, threadfence_system = (Stub(f"threadfence{end}") for end in ("", "_block", "_system"))
shfl_sync, shfl_up_sync, shfl_down_sync, shfl_xor_sync = (
    Stub(f"shfl{how}_sync") for how in ("", "_up", "_down", "_xor")
)
all_sync, any_sync, eq_sync, ballot_sync = (Stub(f"{how}_sync") for how in ("all", "any", "eq", "ballot"))
match_any_sync, match_all_sync = Stub("match_any_sync"), Stub("match_all_sync")
popc, brev, clz, ffs, selp, fma, cbrt, nanosleep = (
    Stub(name) for name in ("popc", "brev", "clz", "ffs", "selp", "fma", "cbrt", "nanosleep")
)
ATOMICS = (
    "add", "sub", "and_", "or_", "xor", "inc", "dec", "exch", "max", "min", "nanmax", "nanmin", "compare_and_swap",
    "cas",
)  # fmt: skip
atomic = Stub("atomic", *ATOMICS)
cg = Stub("cg", "this_grid")
grid_group = Stub("grid group", "sync")
LOADS = ("ldca", "ldcg", "ldcs", "ldlu", "ldcv")
STORES = ("stcg", "stcs", "stwb", "stwt")
ldca, ldcg, ldcs, ldlu, ldcv = (Stub(name) for name in LOADS)
stcg, stcs, stwb, stwt = (Stub(name) for name in STORES)
FP16_UNARY = (
    "hneg", "habs", "hsin", "hcos", "hlog", "hlog10", "hlog2", "hexp", "hexp10", "hexp2", "hsqrt", "hrsqrt", "hfloor",
    "hceil", "hrcp", "hrint", "htrunc", "htanh", "htanh_approx",
)  # fmt: skip
FP16_BINARY = ("hadd", "hsub", "hmul", "hdiv", "heq", "hne", "hge", "hgt", "hle", "hlt", "hmax", "hmin")
fp16 = Stub("fp16", *FP16_UNARY, *FP16_BINARY, "hfma")
_C_NAMES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4", "ll": "i8", "ull": "u8",
    "float": "f4", "double": "f8",
}  # fmt: skip


def _bf16_conversions() -> dict[str, tuple[str, str, str]]:
    """Of each function of numba.cuda.bf16 that converts, by C's name and by NumPy's: from what, to what, and how."""
    found = {}
    for c_name, code in _C_NAMES.items():
        names, of_c = (c_name, np.dtype(code).name), code[1] in "248" and code[0] in "iu"
        for how in ("_rn", "_rz", "_rd", "_ru", ""):
            if (of_c and how) or c_name == "float" or (c_name == "double" and not how):
                to = code, "bf16", how[1:] or "rn"
                found.update({f"{names[0]}2bfloat16{how}": to, f"{names[1]}_to_bfloat16{how}": to})
            if (of_c and how) or (code[1] == "1" and how == "_rz") or (c_name == "float" and not how):
                back = "bf16", code, how[1:] or "rn"
                found.update({f"bfloat162{names[0]}{how}": back, f"bfloat16_to_{names[1]}{how}": back})
        for name in names if code[1] == "2" else ():
            found.update({f"bfloat16_as_{name}": ("bf16", code, "as"), f"{name}_as_bfloat16": (code, "bf16", "as")})
    return found


BF16_CONVERSIONS = _bf16_conversions()
bf16 = Stub(
    "bf16", *FP16_UNARY, *FP16_BINARY, "hfma", "hfma_relu", "hfma_sat", "hmax_nan", "hmin_nan", "hisnan", "hisinf",
    *(f"h{name}{end}" for name in ("add", "sub", "mul") for end in ("_rn", "_sat")),
    *(f"h{name}u" for name in ("eq", "ne", "ge", "gt", "le", "lt")), *BF16_CONVERSIONS,
)  # fmt: skip


class VectorStub(Stub):
    """A vector type, such as float32x4."""

    def __init__(self, name: str, base: str, size: int):
        super().__init__(name)
        self.__name__ = self.name = name
        self.base, self.size = base, size
        self.aliases: list[str] = []


def _vectors() -> dict[str, VectorStub]:
    found: dict[str, VectorStub] = {}
    aliases = {
        "int8": "char", "int16": "short", "int32": "int", "int64": "longlong", "uint8": "uchar", "uint16": "ushort",
        "uint32": "uint", "uint64": "ulonglong", "float16": "half", "float32": "float", "float64": "double",
    }  # fmt: skip
    for base, alias in aliases.items():
        for size in (1, 2, 3, 4):
            stub = VectorStub(f"{base}x{size}", base, size)
            found[stub._name] = stub
            stub.aliases.append(f"{alias}{size}")
            if base in ("int64", "uint64"):
                stub.aliases.append(f"{alias.replace('longlong', 'long')}{size}")
            found.update(dict.fromkeys(stub.aliases, stub))
    return found


VECTORS = _vectors()
_vector_type_stubs = list(dict.fromkeys(VECTORS.values()))
