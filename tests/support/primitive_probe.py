"""Compile every primitive for one architecture and print what came of it as JSON.

    python primitive_probe.py sm_90

It is a program of its own because one process compiles for one architecture. All primitives go into one kernel, each
after a PTX comment with its name, so that a test finds its instructions.
"""

import json
import sys
from dataclasses import asdict
from typing import NamedTuple

from nbep.device import primitives
from nbep.device.compile import CompileError, assemble, compile_kernel, compile_to_ptx, parse_arch
from nbep.device.jit import PRIMITIVES, KernelSpec, PrimitiveSpec, primitive
from nbep.device.types import F32, I32, I64, In, Out  # noqa: F401  named in the sources below

MARK = "// probe "
ARGUMENTS = {
    "s64": "n", "s32": "n", "u32": "n", "u8": "n", "any": "n", "pred": "n > 3", "f32": "x", "smem": "s",
    "v2": "(n, n + 1)", "v4": "(n, n + 1, n + 2, n + 3)",
}  # fmt: skip
REFUSED = {
    "float64 for float32": "primitives.st_weak_f32(p, 1.0)",
    "float for an integer": "primitives.st_weak_s32(p, x)",
    "float for an address": "primitives.ld_acquire_sys_s32(x)",
    "two words for four": "primitives.st_na_v4(p, (n, n))",
    "floats for words": "primitives.st_na_v2(p, (x, x))",
}


class Arrays(NamedTuple):
    x: In
    y: Out


class Sizes(NamedTuple):
    rows: I32
    columns: I32


def probe_lines(spec: PrimitiveSpec, number: int) -> list[str]:
    """Source lines that call a primitive and store what it gives. `number` keeps its arguments apart from others'."""

    def marker():
        raise NotImplementedError("only compiled")

    marker.__name__ = f"mark_{spec.name}"
    globals()[marker.__name__] = primitive(MARK + spec.name)(marker)

    arguments = [ARGUMENTS[kind].replace("n", f"(n + {number + place})") for place, kind in enumerate(spec.args)]
    call = f"primitives.{spec.name}({', '.join(arguments)})"
    if spec.returns is None:
        return [f"mark_{spec.name}()", call]
    result = f"r_{spec.name}"
    is_tuple = isinstance(spec.returns, tuple)
    kinds = spec.returns if is_tuple else (spec.returns,)
    stores = [
        f"primitives.{store_of(kind)}(n, {f'{result}[{i}]' if is_tuple else result})" for i, kind in enumerate(kinds)
    ]
    return [f"mark_{spec.name}()", f"{result} = {call}", *stores]


def store_of(kind: str) -> str:
    return {"f32": "st_weak_f32", "v2": "st_na_v2", "v4": "st_na_v4"}.get(kind, "st_weak_s64")


def define(name: str, parameters: str, *lines: str) -> KernelSpec:
    exec(f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines), globals())
    return KernelSpec(name, globals()[name], max_threads=128, min_blocks=2)


def main(arch: str) -> dict:
    cc = parse_arch(arch)
    specs = [spec for spec in PRIMITIVES.values() if spec.name in primitives.__all__ and spec.constant is None]
    lines = [line for number, spec in enumerate(specs) for line in probe_lines(spec, number)]
    everything = compile_to_ptx(define("everything", "n: I64, s: I64, x: F32", *lines), cc)
    _, report = assemble(everything, cc, "everything")

    refused = {}
    for what, expression in REFUSED.items():
        try:
            compile_to_ptx(define("wrong", "p: Out, n: I64, x: F32", expression), cc)
            refused[what] = ""
        except CompileError as error:
            refused[what] = str(error)
    try:
        compile_to_ptx(define("other", "p: Out", "primitives.st_weak_s32(p, 1)"), (8, 7))
        other_arch = ""
    except RuntimeError as error:
        other_arch = str(error)

    branch = define(
        "branch", "p: Out", "if primitives.has_tma():", "    primitives.st_weak_s32(p, 1111)",
        "else:", "    primitives.st_weak_s32(p, 2222)",
    )  # fmt: skip
    words = define(
        "words", "p: Out, n: I64", "a, b, c, d = primitives.ld_na_v4(p)", "e = (a ^ b) + n - (c | d)",
        "primitives.st_weak_s64(p, e * primitives.u32(n) + primitives.popc_u32(a) - primitives.vote_ballot(n, n))",
    )  # fmt: skip
    grouped = define(
        "grouped", "arrays: Arrays, sizes: Sizes, scale: F32",
        "i = primitives.thread_idx() * sizes.columns + sizes.rows",
        "primitives.st_na_v4(arrays.y + 16 * i, primitives.ld_nc_v4(arrays.x + 16 * i))",
    )  # fmt: skip
    compiled = compile_kernel(grouped, cc)
    return {
        "everything": everything,
        "report": asdict(report),
        "refused": refused,
        "other_arch": other_arch,
        "branch": compile_to_ptx(branch, cc),
        "words": compile_to_ptx(words, cc),
        "grouped": compiled.ptx,
        "grouped_elf": compiled.cubin[:4].hex(),
        "grouped_report": asdict(compiled.report),
        "grouped_params": [param.path for param in compiled.params],
    }


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
