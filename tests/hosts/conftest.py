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
RUNS = 3  # of mpiexec with --survive, at most
MPIEXEC_FAILED = "unable to send SIGUSR1 downstream"


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
    options = ["--torchrun"] if torchrun else ["--survive"] if until else []
    script = [sys.executable, str(HERE / "two_hosts.py"), *options, *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "NBEP_TARGET": "emulator", **environment}
    for _ in range(RUNS):
        output, is_heard, status = run_once(script, variables, until)
        # It ends the ranks that are left before they have said a word: two_hosts.py says of which mpiexec.
        if is_heard or MPIEXEC_FAILED not in output:
            break
    assert until or status == 0, output
    return output


def run_once(script: list[str], variables: dict[str, str], until: Sequence[Sequence[str]]) -> tuple[str, bool, int]:
    """What a script prints; whether a text of each group was in it; the script's status."""
    lines: list[str] = []
    is_heard = False
    with subprocess.Popen(
        script, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = threading.Timer(LIMIT_S, process.terminate)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if until and all(any(text in line for text in group for line in lines) for group in until):
                is_heard = True
                process.terminate()
                break
        lines += process.stdout
        status = process.wait()
        in_time = timer.is_alive()
        timer.cancel()
    output = "".join(lines)
    assert in_time, f"not done after {LIMIT_S} s\n{output}"
    return output, is_heard, status
