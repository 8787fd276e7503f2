"""Whole runs on the emulator: a low-latency call, a call inside a node, a ring; and small programs of `--all`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import nbep
from nbep.bench.harness.case import Row
from nbep.check.scenario import accepted
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.emulator.schedule.scheduler import few_collections
from nbep.lang import (
    FULL_MASK,
    I32,
    Bounds,
    Peers,
    barrier_block,
    buffer_of,
    device_function,
    kernel,
    ld_weak_s32,
    own_site,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
    thread_idx,
    wait_at_least,
)
from nbep.scenarios import SCENARIOS

Main = Callable[[Any], Any]

LANES, NUM_SLOTS = 32, 4
ROW_BYTES = 4 * LANES
TAIL, HEAD, SLOTS = 0, 64, 128  # byte offsets in a rank's memory
RING_TAIL = own_site("ring receiver", "tail", "the next row")
RING_HEAD = own_site("ring sender", "head", "a free slot")
MODELS = ("sc", "delayed", "checked")


@device_function
def send_row(peers, bounds, slot, i):
    wait_at_least(buffer_of(peers, 0) + HEAD, i + 1 - NUM_SLOTS, bounds, RING_HEAD, 1)
    st_weak_s32(slot, i)
    syncwarp(FULL_MASK)  # lane 0 speaks for all lanes
    if thread_idx() == 0:
        st_release_sys_s32(buffer_of(peers, 1) + TAIL, i + 1)


@device_function
def receive_row(peers, bounds, slot, i):
    wait_at_least(buffer_of(peers, 1) + TAIL, i + 1, bounds, RING_TAIL, 0)
    ld_weak_s32(slot)
    syncwarp(FULL_MASK)
    if thread_idx() == 0:
        st_release_sys_s32(buffer_of(peers, 0) + HEAD, i + 1)


@kernel(max_threads=LANES)
def ring(peers: Peers, bounds: Bounds, num_rows: I32):
    for i in range(num_rows):
        slot = buffer_of(peers, 1) + SLOTS + ROW_BYTES * (i % NUM_SLOTS) + 4 * thread_idx()
        if peers.rank == 0:
            send_row(peers, bounds, slot, i)
        else:
            receive_row(peers, bounds, slot, i)


@kernel(max_threads=LANES)
def barriers(peers: Peers, bounds: Bounds, number: I32):
    for _ in range(number):
        barrier_block(peers, bounds)


def launched(comm: Any, function: Any, number: int) -> None:
    """A kernel between ranks that share memory."""
    memory = nbep.SharedMemory.create(comm, SLOTS + NUM_SLOTS * ROW_BYTES, timeout_ms=5000)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, function, 1, LANES, 0, memory.peers, memory.bounds, number)
    memory.wait()
    memory.close()


def scenario(name: str, **parameters: int) -> Main:
    plain = SCENARIOS[name]
    return partial(plain.main, **accepted(plain.main, {**plain.parameters, **parameters}))


WORKLOADS: dict[str, Main] = {
    "low-latency call": scenario("low_latency", tokens=8, hidden=1024, topk=3),
    "call inside a node": scenario("intranode.combine", tokens=24, hidden=512),
    "ring": partial(launched, function=ring, number=150),
}
PROGRAMS: dict[str, Main] = {
    "ring of 6 rows": partial(launched, function=ring, number=6),
    "two barriers": partial(launched, function=barriers, number=2),
    "low-latency token": scenario("low_latency", tokens=1, topk=1, experts=1, blocks=1),
}


def times_of(name: str, repeats: int) -> Row:
    """CPU seconds of a workload under each memory model, the least of several runs."""
    least = {model: min(run_once(WORKLOADS[name], model) for _ in range(repeats)) for model in MODELS}
    return {"name": name, **least}


def run_once(main: Main, memory_model: str) -> float:
    start = time.process_time()
    nbep.spawn(main, 2, "emulator", seed=1, memory_model=memory_model)
    return time.process_time() - start


def rate_of(name: str, repeats: int) -> Row:
    """How many schedules of a program `--all` runs in a second of CPU, with those that turn out to be repetitions."""
    counted = [run_all(PROGRAMS[name]) for _ in range(repeats)]
    return {"name": name, "runs": counted[0][0], "runs_per_second": max(runs / seconds for runs, seconds in counted)}


def run_all(main: Main) -> tuple[int, float]:
    """Every schedule of a program: how many runs, and their CPU seconds."""
    tree, start = Tree(), time.process_time()
    with few_collections():
        while tree.begin():
            is_redundant = True
            with suppress(Redundant):
                nbep.spawn(main, 2, "emulator", memory_model="checked", strategy=Every(tree))
                is_redundant = False
            tree.end(is_redundant=is_redundant)
    return tree.schedules + tree.redundant, time.process_time() - start
