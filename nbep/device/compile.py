"""Compile kernels to PTX and machine code, with or without a GPU.

    nbep compile [FILE] --arch sm_90 [--kernel NAME ...] [--json [FILE.json]] [--ptx DIR]
    nbep compile [FILE] --emulator [--kernel NAME ...]

With --emulator they are compiled for the CPU, into the cache from which `nbep.spawn(..., engine="auto")` takes them.

Without FILE they are nbep's own; KERNEL-NETWORK is one over another network than that of its signature, and all are
there that need no extra package. Those for buffers in the host's memory are compiled when they are named:
KERNEL-HostNetwork and KERNEL-HostPeers. With FILE they are those that it defines, and it is imported.

Numba and NVVM make the PTX, nvJitLink assembles it and reports registers, spills and stack frame. Neither needs a card
or a driver. With NBEP_COMPILER=mlir numba-cuda-mlir stands in for numba-cuda; see records/compilers.md. A kernel whose
network calls a library is linked with it; see `jit.LIBRARIES`. One process compiles for one compute capability.
With nvdisasm, the machine code says how many loads are in flight, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nbep.emulator.engine import MODELS
from nbep.emulator.engine.switch import why_not

from . import compilers, engine
from .by_type import NETWORKS, HostNetwork, HostPeers
from .cards import LOWEST_CC
from .diagnosis import explain
from .jit import KERNELS, ComputeCapability, KernelSpec, LinkInput, over, spec_of
from .library import checking_variants_of, libraries, load_kernels, variants_of
from .orders import LostOrder
from .terminal import STDOUT, add_json, progress, write_json
from .types import Param, flatten_params


@dataclass(frozen=True)
class Report:
    """What the assembler says about one kernel. Sizes are in bytes, a thread; smem is the static part, a block."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_frame: int
    smem: int


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one compute capability. `params` are the leaves of its parameter block, in order."""

    name: str
    compute_capability: ComputeCapability
    ptx: str
    cubin: bytes
    report: Report
    entry_name: str
    params: tuple[Param, ...]


class CompileError(RuntimeError):
    """Numba refused the code of a kernel, or the assembler its PTX. The message begins with the cause and the line."""


def with_variants(kernels: Iterable[KernelSpec]) -> dict[str, KernelSpec]:
    """Kernels by label, with their variants that need no extra package: over the networks, for the shapes of calls."""
    specs: dict[str, KernelSpec] = {}
    for spec in kernels:
        networks = NETWORKS if spec.hints.get("network") in NETWORKS else ()
        for one in variants_of(spec.function):
            for function in (one, *(over(one, network) for network in networks), *checking_variants_of(one)):
                specs[spec_of(function).label] = spec_of(function)
    return specs


def for_host_memory() -> dict[str, KernelSpec]:
    """nbep's kernels for buffers in the host's memory, by label."""
    kinds = {"network": HostNetwork, "peers": HostPeers}
    kernels = load_kernels()
    made = [
        spec_of(over(one, kinds[by], by))
        for library in libraries()
        for name, by in library.host_memory.items()
        for one in variants_of(kernels[name].function)
    ]
    return {spec.label: spec for spec in made}


def find_kernel(kernel: str | Callable | KernelSpec) -> KernelSpec:
    """The spec of a kernel: of any function that is one, or of one of nbep's by its name.

    Raises: KeyError for a name that no kernel of nbep has; TypeError for a function that is no kernel
    """
    if isinstance(kernel, KernelSpec):
        return kernel
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            load_kernels()
        if kernel not in KERNELS:
            raise KeyError(f"no kernel {kernel!r}; there are {', '.join(sorted(KERNELS))}")
        return KERNELS[kernel]
    return spec_of(kernel)


def compile_kernel(
    kernel: str | Callable | KernelSpec, cc: ComputeCapability = (9, 0), *, lineinfo: bool = False
) -> CompiledKernel:
    """Compile one kernel.

    Args:    kernel    its function or its spec, or the name of one of nbep's
             lineinfo  keep source lines for profilers
    Raises:  KeyError or TypeError if there is no such kernel; TypeError for a parameter that is annotated with none of
             nbep.device.types; CompileError if it does not compile;
             RuntimeError if this process has compiled for another compute capability; ValueError if NBEP_COMPILER
             names no compiler
    """
    spec = find_kernel(kernel)
    ptx = compile_to_ptx(spec, cc, lineinfo=lineinfo)
    libraries = spec.libraries(cc) if spec.libraries is not None else ()
    cubin, report = assemble(ptx, cc, spec.name, libraries, spec.entry_name, most_registers(spec.threads_on(cc)))
    return CompiledKernel(spec.name, cc, ptx, cubin, report, spec.entry_name, spec.params)


def compile_to_ptx(spec: KernelSpec, cc: ComputeCapability, *, lineinfo: bool = False) -> str:
    """The PTX of one kernel; its entry is called spec.entry_name. Raises as compile_kernel."""
    flatten_params(spec.function)  # refuses annotations that are none
    compiler = compilers.chosen()
    with compiler.lock():
        compiler.register(cc)
        try:
            lowered = compiler.lower(spec, cc, lineinfo)
        except LostOrder as error:
            raise CompileError(f"{spec.name} for {arch_name(cc)}: {error}") from error
        except Exception as error:  # the compiler's own errors, and those of what it does not expect
            raise CompileError(f"{spec.name} for {arch_name(cc)}: {explain(error, spec.function)}") from error
        return compiler.to_ptx(lowered, spec, cc)


def most_registers(threads: int) -> int:
    """How many registers a thread of such a block may have: a quarter of an SM has 512 for each lane of its warps."""
    warps_of_a_quarter = -(-threads // 128)
    return 512 // warps_of_a_quarter // 8 * 8


def assemble(
    ptx: str,
    cc: ComputeCapability,
    name: str,
    libraries: Sequence[LinkInput] = (),
    entry_name: str | None = None,
    library_registers: int = 255,
) -> tuple[bytes, Report]:
    """The machine code of PTX text, linked with libraries, and the assembler's report on its entry.

    Args:   name               the kernel's, for messages
            entry_name         None if it is the same
            library_registers  most that a function of a library may use; the entry's block bounds the entry's own
    Raises: CompileError with the assembler's messages
    """
    from cuda.bindings import nvjitlink
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(
        arch=arch_name(cc),
        no_cache=True,  # a cached result comes without the assembler's report
        verbose=True,
        ptxas_options=["-v"],
        max_register_count=library_registers if libraries and library_registers < 255 else None,
    )
    inputs = [ObjectCode.from_ptx(ptx.encode(), name=f"{name}.ptx")]
    for library in libraries:
        read = ObjectCode.from_library if library.is_archive else ObjectCode.from_ptx
        inputs.append(read(library.data, name=library.name))
    try:
        linker = Linker(*inputs, options=options)
        cubin = linker.link("cubin").code
    except nvjitlink.nvJitLinkError as error:  # with the assembler's messages
        raise CompileError(f"{name} for {arch_name(cc)}: {error}") from error
    return bytes(cubin), parse_report(linker.get_info_log(), entry_name or name)


def parse_report(text: str, name: str) -> Report:
    """The report on entry `name` in nvJitLink's verbose output.

    Raises: CompileError if there is none
    """

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        if found is None:
            raise CompileError(f"{name}: no {pattern!r} in the assembler's report:\n{text}")
        return int(found.group(1))

    properties = rf"Function properties for {name}\n.*?"
    linked = rf"Function properties for '{name}':\n.*?"
    return Report(
        registers=number(rf"{linked}\bused (\d+) registers"),
        spill_stores=number(rf"{properties}(\d+) bytes spill stores"),
        spill_loads=number(rf"{properties}(\d+) bytes spill loads"),
        stack_frame=number(rf"{properties}(\d+) bytes stack frame"),
        smem=number(rf"{linked}(\d+) bytes smem"),
    )


def arch_name(cc: ComputeCapability) -> str:
    return f"sm_{cc[0]}{cc[1]}"


def parse_arch(text: str) -> ComputeCapability:
    """Raises: ArgumentTypeError if the text names no architecture, or one that is too old"""
    found = re.fullmatch(r"sm_(\d+)(\d)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture such as sm_90")
    cc = int(found.group(1)), int(found.group(2))
    if cc < LOWEST_CC:
        raise argparse.ArgumentTypeError(f"{text} is too old; the lowest is {arch_name(LOWEST_CC)}")
    return cc


def check_arch(cc: ComputeCapability) -> None:
    """Raises: ValueError if the assembler that is installed does not know it"""
    from cuda.bindings import nvjitlink

    try:
        nvjitlink.destroy(nvjitlink.create(1, [f"-arch={arch_name(cc)}"]))
    except nvjitlink.nvJitLinkError as error:
        number = ".".join(map(str, nvjitlink.version()))
        raise ValueError(f"got {arch_name(cc)}, which nvJitLink {number} does not know: {error}") from error


def kernels_of(path: Path) -> dict[str, KernelSpec]:
    """Name -> kernel, for the kernels that a file of Python defines. The file is imported, from its own folder.

    Raises: what the file raises
    """
    sys.path.insert(0, str(path.resolve().parent))
    name = f"_kernels_of_{path.stem}"  # the file may be called like a module that is there already
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    specs = [getattr(value, "kernel_spec", None) for value in vars(module).values()]
    return {spec.name: spec for spec in specs if spec is not None and spec.function.__module__ == name}


ORDERED = re.compile(
    r"(?:^|[;{])\s*((?:ld|st|atom|red)\.(?:acquire|release|acq_rel|relaxed|volatile)[\w.:]*"
    r"|fence\.[\w.:]+|bar\.[\w.]+|mbarrier\.[\w.:]+|cp\.async\.bulk[\w.:]*)",
    re.MULTILINE,
)


def count_instructions(ptx: str) -> dict[str, Any]:
    """How often a kernel's PTX has 16-byte accesses, ordered memory instructions, local memory and calls."""
    return {
        "loads_16_bytes": len(re.findall(r"^\s*ld\.(?:global|shared)[\w.:]*\.v4\.[ubsf]32", ptx, re.MULTILINE)),
        "stores_16_bytes": len(re.findall(r"^\s*st\.(?:global|shared)[\w.:]*\.v4\.[ubsf]32", ptx, re.MULTILINE)),
        "ordered": dict(sorted(Counter(ORDERED.findall(ptx)).items())),
        "local_bytes": sum(map(int, re.findall(r"\.local\s.*\[(\d+)\]", ptx))),
        "calls": len(re.findall(r"^\s*call", ptx, re.MULTILINE)),
    }


def describe(spec: KernelSpec, cc: ComputeCapability, ptx_dir: Path | None) -> dict[str, Any]:
    """One kernel's row of the command's output."""
    start = time.perf_counter()
    compiled = compile_kernel(spec, cc)
    seconds = round(time.perf_counter() - start, 2)
    if ptx_dir is not None:
        (ptx_dir / f"{spec.label}.{arch_name(cc)}.ptx").write_text(compiled.ptx)
        (ptx_dir / f"{spec.label}.{arch_name(cc)}.cubin").write_bytes(compiled.cubin)
    text = disassemble(compiled.cubin)
    return {
        "kernel": spec.label,
        "arch": arch_name(cc),
        "max_threads": spec.threads_on(cc),
        **asdict(compiled.report),
        **count_instructions(compiled.ptx),
        "loads_in_flight": None if text is None else loads_in_flight(text),
        "cubin_bytes": len(compiled.cubin),
        "seconds": seconds,
    }


COLUMNS = ("registers", "spill_stores", "spill_loads", "stack_frame", "smem", "loads_16_bytes", "stores_16_bytes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nbep compile", description="Compile kernels; no GPU needed.")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="its kernels, in place of nbep's own")
    parser.add_argument("--arch", type=parse_arch, default=(9, 0), help="sm_75, sm_80, ..., sm_120; default sm_90")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel; may be repeated")
    add_json(parser)
    parser.add_argument("--emulator", action="store_true", help="for the CPU, into the cache: see nbep.spawn's engine")
    parser.add_argument("--memory-model", choices=MODELS, default="sc", help="of --emulator; default sc")
    parser.add_argument("--ptx", type=Path, metavar="DIR", help="keep the PTX and the machine code there")
    options = parser.parse_args(argv)

    try:
        if not options.emulator:
            check_arch(options.arch)
        elif (reason := why_not()) is not None:
            parser.error(f"--emulator: {reason}")
    except ValueError as error:
        parser.error(f"argument --arch: {error}")
    if options.ptx is not None:
        try:
            options.ptx.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"argument --ptx: {error}")

    if options.file is None:
        specs = with_variants(load_kernels().values())
    elif options.file.suffix == ".py" and options.file.is_file():
        specs = kernels_of(options.file)
    else:
        parser.error(f"FILE: got {options.file}; must be a file of Python")
    if not specs:
        parser.error(f"FILE: got {options.file}, which defines no kernel")
    named = specs if options.file is not None else specs | for_host_memory()
    unknown = [name for name in options.kernel or () if name not in named]
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; there are {', '.join(sorted(named))}")
    rows = []
    num_failed = 0
    names = options.kernel or sorted(specs)
    with progress("compiling", len(names)) as advance:
        for name in names:
            advance(description=name)
            try:
                if options.emulator:
                    start = time.process_time()
                    engine.Code(model=options.memory_model).entry(named[name].function)
                    row = {"kernel": name, "cpu_seconds": time.process_time() - start}
                else:
                    row = describe(named[name], options.arch, options.ptx)
            except (CompileError, TypeError) as error:
                num_failed += 1
                print(error, file=sys.stderr)
            else:
                rows.append(row)
                if options.json != STDOUT:
                    print_row(row)
            advance()
    write_json(options.json, rows)
    return 1 if num_failed else 0


def print_row(row: dict[str, Any]) -> None:
    """One kernel in a few lines."""
    if "cpu_seconds" in row:
        print("{kernel}: {cpu_seconds:.1f} s of CPU".format(**row))
        return
    cells = ", ".join(f"{row[column]} {column.replace('_', ' ')}" for column in COLUMNS)
    print(f"{row['kernel']} {row['arch']}: {cells}, {row['seconds']} s")
    if row["loads_in_flight"]:
        print(f"    16-byte loads in flight, run by run: {', '.join(map(str, row['loads_in_flight']))}")
    for instruction, count in row["ordered"].items():
        print(f"    {count:3} {instruction}")


# What the assembler has made of a kernel's loads, read from its machine code.
#
# PTX says which loads a kernel has, not how many of them a thread has in flight: ptxas may put the first use of one,
# where the thread waits for it, before the next.
#
# Needs nvdisasm, of the CUDA toolkit or of the package nvidia-cuda-nvdisasm.


INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", re.MULTILINE)
WIDE_LOAD = re.compile(r"LDG[\w.]*\.128\b[\w.]*\s+R(\d+),")
WIDE_STORE = re.compile(r"STG[\w.]*\.128\b.*,\s*R(\d+)")
REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")


def find_nvdisasm() -> Path | None:
    """The program, from the package or from PATH."""
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for program in sorted(Path(folder).glob("*/bin/nvdisasm*")):
            return program
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(cubin: bytes) -> str | None:
    """The machine code as text; None if there is no nvdisasm, or if it does not know the architecture."""
    program = find_nvdisasm()
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([program, "-c", file], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def loads_in_flight(text: str) -> list[int]:
    """For each run of 16-byte loads from global memory: how many come before an instruction that waits for one of them.

    text is what `disassemble` returns. Code is read from top to bottom, whatever branches there are.
    """
    runs: list[int] = []
    under_way: set[int] = set()
    num_loads = 0
    for instruction in INSTRUCTION.findall(text):
        load, store = WIDE_LOAD.match(instruction), WIDE_STORE.match(instruction)
        touched = {int(number) + i for number, wide in REGISTER.findall(instruction) for i in range(2 if wide else 1)}
        for four in filter(None, (load, store)):
            touched.update(range(int(four[1]), int(four[1]) + 4))
        if touched & under_way:
            runs.append(num_loads)
            under_way, num_loads = set(), 0
        if load:
            under_way.update(range(int(load[1]), int(load[1]) + 4))
            num_loads += 1
    return [*runs, num_loads] if num_loads else runs


if __name__ == "__main__":
    sys.exit(main())
