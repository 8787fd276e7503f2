"""Programs that tests run in processes of their own."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from target import unusable_reason

ROOT = Path(__file__).parents[2]
# For processes with a GPU each. torch's own allocator: the other one is for ranks that share a card.
GPU_EACH: dict[str, str | None] = {"PYTORCH_CUDA_ALLOC_CONF": None, "NBEP_TIMEOUT_MS": None}

# Ends what hangs, never what is only slow: on two idle cores the longest program takes 20 s.
LIMIT_S = 900
# Once a program has hung: where mpiexec itself does not work, all tests of it hang.
LATER_LIMIT_S = 60
LAUNCHER_FAILED = "demux engine error waiting for event"  # the last words of a proxy of MPICH's mpiexec
_limit_s = LIMIT_S


def run_python(
    *arguments: object,
    ranks: int | None = None,
    must_fail: bool = False,
    survive: bool = False,
    **environment: str | None,
) -> str:
    """What `python *arguments` prints; with ranks, that many of it under mpirun. A variable that is None is unset.

    The test fails if the program does, or with must_fail if it does not; and if it is not done after LIMIT_S.
    survive: ranks go on when another one is killed. They must not finalize MPI then: that waits for all. MPICH's
             launcher may fail itself as such ranks exit, and takes the others with it: then they are run once more.
    """
    global _limit_s
    command = [*(surviving_mpirun(ranks) if survive else mpirun(ranks)), sys.executable, *map(str, arguments)]
    status, output = run_within(_limit_s, command, **environment)
    if survive and status is not None and LAUNCHER_FAILED in output:
        status, output = run_within(_limit_s, command, **environment)
    if status is None:
        message = f"{' '.join(command)} is not done after {_limit_s} s\n{output}"
        _limit_s = LATER_LIMIT_S
        pytest.fail(message)
    assert (status != 0) == must_fail, output
    return output


def run_within(limit_s: float, command: Sequence[str], **environment: str | None) -> tuple[int | None, str]:
    """A command's status and what it prints. The status is None if it was not done in time: then it is killed.

    So are the processes that it has started. They find nbep and tests/support. A variable that is None is unset.
    """
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **environment,
    }
    with subprocess.Popen(
        command,
        env={name: value for name, value in variables.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
    return process.returncode, output


def mpirun(ranks: int | None) -> list[str]:
    """The command that starts ranks processes, empty for one without MPI."""
    if ranks is None:
        return []
    # An MPI that came as a wheel lies beside the interpreter, and mpi4py's wheel goes with it.
    search = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which("mpirun", path=search) or shutil.which("mpiexec", path=search)
    if found is None:
        pytest.skip("no mpirun here")
    return [found, "-n", str(ranks)]


def once_per_run(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[], str]) -> str:
    """What make() gives. Of the workers of one run of pytest, the first that asks for the name makes it for all."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # a worker's own folder lies in that of the run
    path = folder / f"{name}.txt"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(make())
    return path.read_text()


def surviving_mpirun(ranks: int | None) -> list[str]:
    """The command that starts processes which are not ended when one of them is.

    MPICH's mpiexec, told to, ends no other process when one exits with a status, but it does when one dies of a signal:
    a shell in between makes a status of the signal. It also sends SIGUSR1 to the others, who have to ignore it.
    """
    mpiexec, *arguments = mpirun(ranks)
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in version:
        pytest.skip("the mpiexec here is not MPICH's")
    shell = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh"]
    return [mpiexec, "-disable-auto-cleanup", *arguments, *shell]


def need_gpus(num_gpus: int) -> None:
    """Skip the test if there are fewer GPUs, or no torch or mpi4py."""
    for library in ("torch", "mpi4py"):
        if find_spec(library) is None:
            pytest.skip(f"no {library} here")
    from nbep.host.target.cuda.driver import num_devices

    if unusable_reason() is None and num_devices() < num_gpus:
        pytest.skip(f"{num_devices()} of {num_gpus} GPUs")
