"""What the assembler has made of a kernel's loads, read from its machine code.

PTX says which loads a kernel has, not how many of them a thread has in flight: ptxas may put the first use of one,
where the thread waits for it, before the next.

Needs nvdisasm, of the CUDA toolkit or of the package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

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
