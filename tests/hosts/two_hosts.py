"""Run a Python program on two hosts that are one machine, with 2 ranks on each. Needs root.

    python tests/hosts/two_hosts.py [--torchrun | --survive] PROGRAM [ARGUMENT ...]

 hosta  10.77.0.1 --eth0-- a pair of virtual cards --eth0-- 10.77.0.2  hostb

A host is a network namespace; its processes have a hostname, process numbers, IPC and /dev/shm of their own. The
addresses exist inside of the two namespaces alone, and nothing leads out of these. `mpiexec` (MPICH's) starts the ranks
and connects them over TCP; with --torchrun, a torchrun on each host does.

At its end, however that comes, the script ends what runs on the hosts and removes them. With --survive, a rank that is
killed does not end the others; but then MPICH 5.0's mpiexec may fail at the end, when it signals a host that is done.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ENTER = Path(__file__).with_name("enter.sh")
ADDRESSES = "10.77.0.1", "10.77.0.2"
RANKS_PER_HOST = 2
LINK_S = 10.0
NETWORK = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Why two hosts cannot be made here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts need Linux and root"
    try:
        with hosts() as (first, _):
            enter = [str(ENTER), ADDRESSES[0], "true"]
            done = subprocess.run(enter, env=environment(first, first), capture_output=True, text=True)
            return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None
    except OSError as error:
        return f"namespaces are not allowed here: {error}"


@contextlib.contextmanager
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that are connected. They, and what runs in them, end with the block."""
    names = f"nbep-{os.getpid()}-a", f"nbep-{os.getpid()}-b"
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        deadline = time.monotonic() + LINK_S
        # A link that is up counts as running about a second later. libfabric takes no other.
        while not all("state UP" in ip("-n", name, "link", "show", "eth0") for name in names):
            if time.monotonic() > deadline:
                raise OSError("the link between the hosts does not come up")
            time.sleep(0.05)
        yield names
    finally:
        for name in names:
            remove(name)


def remove(namespace: str) -> None:
    with contextlib.suppress(OSError):  # a process that ends while `ip` looks at it is an error to it, too
        for pid in ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(OSError):
        ip("netns", "delete", namespace)


def environment(first: str, second: str) -> dict[str, str]:
    return {**os.environ, **NETWORK, "NBEP_TWO_HOSTS": f"{first} {second}"}


def commands(program: list[str], with_torchrun: bool, may_survive: bool) -> list[list[str]]:
    """What to run, each on a host; the first one's status counts."""
    if with_torchrun:
        options = f"--nnodes 2 --nproc-per-node {RANKS_PER_HOST} --master-addr {ADDRESSES[0]} --master-port 29517"
        return [
            [sys.executable, "-m", "torch.distributed.run", *options.split(), "--node-rank", str(number), *program]
            for number in range(len(ADDRESSES))
        ]
    survive = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh"] if may_survive else []
    cleanup = "-disable-auto-cleanup" if may_survive else ""
    options = f"-launcher ssh -launcher-exec {ENTER} -hosts {','.join(ADDRESSES)} -iface eth0 {cleanup}"
    ranks = f"-n {RANKS_PER_HOST * len(ADDRESSES)} -ppn {RANKS_PER_HOST}"
    mpiexec = Path(sys.executable).with_name("mpiexec")
    found = str(mpiexec) if mpiexec.exists() else "mpiexec"
    return [[found, *options.split(), *ranks.split(), *survive, sys.executable, *program]]


def main() -> int:
    arguments = sys.argv[1:]
    with_torchrun, may_survive = arguments[:1] == ["--torchrun"], arguments[:1] == ["--survive"]
    program = arguments[with_torchrun or may_survive :]
    if not program:
        print(__doc__)
        return 2
    if sys.platform != "linux" or os.geteuid() != 0:
        print("two_hosts.py: needs Linux and root: it makes network namespaces", file=sys.stderr)
        return 1

    def end(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, end)
    with hosts() as names:
        started = [
            subprocess.Popen([str(ENTER), address, *map(shlex.quote, command)], env=environment(*names))
            for address, command in zip(ADDRESSES, commands(program, with_torchrun, may_survive), strict=False)
        ]
        return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
