"""Two hosts that are one machine; the tests are skipped where they cannot be made."""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 300


@pytest.fixture(scope="session")
def on_two_hosts() -> Callable[..., str]:
    """What a program prints there: run(*arguments, torchrun=False, until=(), **environment).

    until: groups of texts; when one of each group has come, the hosts are ended. Without any, the program comes to its
           own end
    """
    reason = runpy.run_path(str(HERE / "two_hosts.py"))["why_not"]()
    if reason:
        pytest.skip(reason)
    return run


def run(*arguments: object, torchrun: bool = False, until: Sequence[Sequence[str]] = (), **environment: str) -> str:
    script = [sys.executable, str(HERE / "two_hosts.py"), *(["--torchrun"] if torchrun else [])]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "NBEP_TARGET": "emulator", **environment}
    lines: list[str] = []
    with subprocess.Popen(
        [*script, *map(str, arguments)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = threading.Timer(LIMIT_S, process.terminate)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if until and all(any(text in line for text in group for line in lines) for group in until):
                process.terminate()
                break
        lines += process.stdout
        status = process.wait()
        in_time = timer.is_alive()
        timer.cancel()
    output = "".join(lines)
    assert in_time, f"not done after {LIMIT_S} s\n{output}"
    assert until or status == 0, output
    return output
