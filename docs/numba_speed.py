"""Writes the table of CPU times of docs/numba_cuda.md: Numba's simulator beside the emulator.

    python docs/numba_speed.py        measure, and write the table

Each program runs as a process of its own, imports and compilation included. Seconds of CPU depend on the machine.
"""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "numba_cuda.md"
PROGRAMS = ("matmul", "transpose", "atomics", "warps", "laplace", "mandel")
WAYS = {
    "simulator": ([sys.executable], {"NUMBA_ENABLE_CUDASIM": "1"}),
    "`sc`": ([sys.executable, "-m", "nbep", "run", "--memory-model", "sc"], {}),
    "`checked`": ([sys.executable, "-m", "nbep", "run"], {}),
}


def measure(name: str, way: str) -> str:
    """Seconds of CPU, or what went wrong."""
    words, environment = WAYS[way]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = DOCS / "examples" / "numba" / f"{name}.py"
    done = subprocess.run([*words, str(program)], env={**os.environ, **environment}, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{seconds:.1f}" if done.returncode == 0 else "fails"


def main() -> None:
    rows = ["| program | " + " | ".join(WAYS) + " |", "| --- " * (len(WAYS) + 1) + "|"]
    rows += [
        f"| [{name}](examples/numba/{name}.py) | " + " | ".join(measure(name, way) for way in WAYS) + " |"
        for name in PROGRAMS
    ]
    table = "<!-- speed -->\n" + "\n".join(rows) + "\n<!-- /speed -->"
    PAGE.write_text(re.sub(r"<!-- speed -->.*<!-- /speed -->", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
