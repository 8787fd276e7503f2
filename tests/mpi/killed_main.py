"""What test_kills.py runs, once per rank: calls on buffers, until one rank is killed, or stopped.

python killed_main.py VICTIM SIGNAL KIND step STEP
python killed_main.py VICTIM SIGNAL KIND after MILLISECONDS

SIGNAL is KILL or STOP; or LINK: then the victim's whole host vanishes, as its network card goes down. It takes a host
of tests/hosts/two_hosts.py.

VICTIM gets SIGNAL before its step of that number or after that time. A rank that is stopped goes on when
the processes of all others have ended. With NBEP_TEST_TARGET=cuda it runs on GPUs, and between nodes without NICs.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import internode_rounds
import low_latency
from arrays import to_target
from cases import make_case
from intranode import Options, combine, dispatch, num_nvl_bytes
from target import TARGET
from world import group_of, world

import nbep

NETWORK = {"transport": "ibgda" if TARGET == "emulator" else "direct", "num_nvl_peers": 2}
WAIT_AND_GO_ON = """
for pid in $1 $2 $3; do while kill -0 $pid 2>/dev/null; do sleep 0.05; done; done; kill -CONT $0
"""


def intranode(comm: Any) -> Iterator[None]:
    case, options = make_case(21, num_ranks=comm.size, num_tokens=3), Options(nbep.Config(2, 2, 4))
    yield
    buffer = nbep.Buffer(group_of(comm), num_nvl_bytes=num_nvl_bytes(case, options))
    yield
    outcome = dispatch(buffer, case, options, comm.rank)
    yield
    combine(buffer, case, options, comm.rank, outcome)
    yield
    buffer.dispatch(to_target(case.x[comm.rank]), handle=outcome.handle, config=options.config, async_finish=True)
    yield
    buffer.destroy()


def nodes(comm: Any) -> Iterator[None]:
    """Two nodes, low latency."""
    case = low_latency.make_low_latency_case(5, num_ranks=comm.size, num_tokens=[3] * comm.size, num_topk=3, hidden=256)
    trips = [(case, low_latency.Options())]
    yield
    buffer = low_latency.make_buffer(group_of(comm), trips, **NETWORK)
    yield
    trip = low_latency.Trip(buffer, *trips[0])
    trip.send_dispatch()
    yield
    trip.receive_dispatch()
    yield
    trip.send_combine()
    trip.receive_combine()
    yield
    buffer.destroy()


def internode(comm: Any) -> Iterator[None]:
    """Two nodes, the normal mode."""
    sizes = internode_rounds.SMALL
    yield
    buffer = nbep.Buffer(
        group_of(comm), **internode_rounds.num_bytes(2, 2, sizes), **NETWORK, num_qps_per_rank=sizes.most_channels
    )
    yield
    internode_rounds.wrong_rounds(buffer, 2, 3, 1, sizes)
    yield
    buffer.destroy()


def take_gpu(rank: int) -> None:
    import torch

    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")


def main(victim: int, name: str, kind: str, when: str, number: int) -> None:
    comm, steps = world(), count()
    others = [pid for rank, pid in enumerate(comm.allgather(os.getpid())) if rank != victim]
    is_victim = comm.rank == victim
    if is_victim and name == "STOP":
        subprocess.Popen(["sh", "-c", WAIT_AND_GO_ON, str(os.getpid()), *map(str, others)], start_new_session=True)

    if TARGET == "cuda":
        take_gpu(comm.rank)

    def end() -> None:
        print(f"at {time.time()}", flush=True)  # for tests/cuda/kills_main.py
        if name == "LINK":
            assert "NBEP_TWO_HOSTS" in os.environ
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        else:
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    comm.barrier()
    if is_victim and when == "after":
        timer = threading.Timer(number / 1000, end)
        timer.daemon = True
        timer.start()
    while True:
        for _ in {"intranode": intranode, "nodes": nodes, "internode": internode}[kind](comm):
            if is_victim and when == "step" and next(steps) == number:
                end()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]))
    except RuntimeError as error:
        os.write(2, f"ends: {error}\n".encode())  # in one piece: lines of a traceback mix with those of other ranks
        raise
