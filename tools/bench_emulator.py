"""Primitive calls a second that the emulator makes on one core.

    nbep bench emulator [--seconds S] [--repeats N] [--json [FILE.json]]

"plain" rows never switch threads.  "switching" rows interleave 128 threads as finely as a seed may.  Collectives and
barriers count one call for each thread that takes part.  Each row takes the best of three runs.

The line below the table is of `nbep check --all`: two threads that take tickets, each order of which is a schedule.
Two more tables have whole runs under each memory model, and small programs of `--all`: CPU time, the best of N runs.
With --engines there is one of low-latency calls by Python and by compiled kernels, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import nbep
from nbep.bench.harness.command import Parser
from nbep.bench.harness.report import Report, Row
from nbep.device.terminal import progress
from nbep.emulator import World, current_thread
from nbep.emulator.engine import MODELS as COMPILED
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.emulator.schedule.scheduler import few_collections
from nbep.lab.check.scenario import accepted
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
from nbep.specimens.scenarios import SCENARIOS

# Whole runs: a low-latency call, a call inside a node, a ring; and small programs of `--all`


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


SIZES = (8, 1024), (128, 7168)  # tokens of a rank, columns
EXPERTS, CHOICES = 8, 4


def call_time(tokens: int, hidden: int, model: str, engine: str) -> tuple[float, int]:
    """CPU seconds of a dispatch and a combine between two ranks, behind a first one of each; and their calls."""
    marks: list[tuple[float, int]] = []

    def main(comm: Any) -> None:
        rng = np.random.default_rng(comm.rank)
        num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, 2, EXPERTS)
        buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=EXPERTS // 2)
        x = rng.standard_normal((tokens, hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
        topk_idx = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(tokens)])
        weights = rng.random((tokens, CHOICES), dtype=np.float32)
        for _ in range(2):
            comm.barrier()
            marks.append((time.process_time(), comm.runtime.world.calls))
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, EXPERTS, use_fp8=False)
            buffer.low_latency_combine(rows, topk_idx, weights, handle)
        comm.barrier()
        marks.append((time.process_time(), comm.runtime.world.calls))

    nbep.spawn(main, 2, "emulator", seed=0, memory_model=model, engine=engine)
    (start, calls_before), (end, calls) = marks[3], marks[5]  # of the rank that came last
    return end - start, calls - calls_before


def engines_of(tokens: int, hidden: int, model: str) -> Row:
    """Compiled, by Python, compiled: the better one of the two compiled runs."""
    engines = "compiled", "python", "compiled"
    (first, _), (python, calls), (last, _) = (call_time(tokens, hidden, model, engine) for engine in engines)
    compiled = min(first, last)
    row: Row = {"name": f"{tokens} x {hidden}", "model": model, "calls": calls}
    return row | {"python": python, "compiled": compiled, "ratio": python / compiled}


REPEATS = 3
COARSE, FINE = 0, 4  # seeds with the longest and the shortest quanta

COLUMNS = {
    "call": "name",
    "threads": "threads",
    "thousand calls/s": "thousand_per_second:,.0f",
    "us/call": "us:.2f",
}
RUN_COLUMNS = {"run": "name", "sc, s": "sc:.3f", "delayed, s": "delayed:.3f", "checked, s": "checked:.3f"}
ENGINE_COLUMNS = {
    "low latency": "name",
    "memory model": "model",
    "calls": "calls:,",
    "Python, s": "python:.3f",
    "compiled, s": "compiled:.3f",
    "times as fast": "ratio:.0f",
}
RATE_COLUMNS = {"program": "name", "runs": "runs", "runs/s": "runs_per_second:.1f"}


# Wrappers as nbep.device.primitives has them, so that a row costs what a kernel pays.
def _load_s32(address: int) -> int:
    return current_thread().load(address, "s32", "weak", "cta")


def _store_s32(address: int) -> None:
    current_thread().store(address, "s32", 1, "weak", "cta")


def _barrier(address: int) -> None:
    t = current_thread()
    t.barrier(0, t.block_dim)


def _nothing(address: int) -> None:
    return None


# name, primitive, threads of the block, seed, memory model
CASES: list[tuple[str, Callable[[int], Any], int, int, str]] = [
    ("load s32, plain", _load_s32, 1, COARSE, "sc"),
    ("load f32, plain", lambda a: current_thread().load(a, "f32", "weak", "cta"), 1, COARSE, "sc"),
    ("load v4, plain", lambda a: current_thread().load(a, "v4", "weak", "cta"), 1, COARSE, "sc"),
    ("load acquire, plain", lambda a: current_thread().load(a, "s32", "acquire", "sys"), 1, COARSE, "sc"),
    ("store s32, plain", _store_s32, 1, COARSE, "sc"),
    ("store v4, plain", lambda a: current_thread().store(a, "v4", (1, 2, 3, 4), "weak", "cta"), 1, COARSE, "sc"),
    ("store release, plain", lambda a: current_thread().store(a, "s32", 1, "release", "sys"), 1, COARSE, "sc"),
    ("atomic add, plain", lambda a: current_thread().atomic("add", a, "s32", 1, "relaxed", "sys"), 1, COARSE, "sc"),
    ("store s32, plain, delayed model", _store_s32, 1, COARSE, "delayed"),
    ("load s32, switching", _load_s32, 128, FINE, "sc"),
    ("store s32, switching", _store_s32, 128, FINE, "sc"),
    ("syncwarp", lambda _: current_thread().syncwarp(FULL_MASK), 128, COARSE, "sc"),
    ("shfl", lambda _: current_thread().shfl("xor", FULL_MASK, 1, 1), 128, COARSE, "sc"),
    ("barrier", _barrier, 128, COARSE, "sc"),
]


def _seconds(primitive: Callable[[int], Any], threads: int, seed: int, memory_model: str, count: int) -> float:
    """How long one launch takes whose threads call `primitive` `count` times each."""
    world = World(1, seed, memory_model=memory_model)
    memory = world.ranks[0].space.allocate(64, "memory", zero=True)
    stream = world.ranks[0].create_stream("main")

    def kernel(address: int) -> None:
        for _ in range(count):
            primitive(address)

    stream.launch(kernel, (memory.address,), 1, threads)
    start = time.perf_counter()
    stream.synchronize()
    return time.perf_counter() - start


def row_of(name: str, threads: int, calls_per_second: float) -> Row:
    us, thousand_per_second = 1e6 / calls_per_second, calls_per_second / 1e3
    return {"name": name, "threads": threads, "us": us, "thousand_per_second": thousand_per_second}


def measure(seconds: float, advance: Callable[..., None] = lambda: None) -> list[Row]:
    """All rows; each run takes about `seconds`. advance is called after each row but the last."""
    rows = []
    for name, primitive, threads, seed, memory_model in CASES:
        shape = (primitive, threads, seed, memory_model)
        count = 16
        while (elapsed := _seconds(*shape, count)) < seconds / 4:
            count *= 2
        count = max(1, int(count * seconds / elapsed))
        best = min(_seconds(*shape, count) for _ in range(REPEATS))
        rows.append(row_of(name, threads, threads * count / best))
        advance()
    threads = 1024
    best = min(_seconds(_nothing, threads, COARSE, "sc", 0) for _ in range(REPEATS))
    rows.append(row_of("thread created, run and left", threads, threads / best))
    return rows


def measure_every(seconds: float, tickets: int = 6) -> dict[str, float]:
    """What `nbep check --all` does in a second, of the orders in which two threads take so many tickets each."""
    tree, calls, start = Tree(), 0, time.perf_counter()

    def kernel(address: int) -> None:
        t = current_thread()
        for _ in range(tickets):
            ticket = t.atomic("add", address, "s32", 1, "relaxed", "gpu")
            t.store(address + 4 + 4 * ticket, "s32", t.block_idx, "weak", "cta")

    elapsed = 0.0
    while elapsed < seconds and tree.begin():
        world = World(1, memory_model="checked", strategy=Every(tree))
        memory = world.ranks[0].space.allocate(4 + 8 * tickets, "memory", zero=True)
        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (memory.address,), 2, 1)
        with suppress(Redundant):
            stream.synchronize()
            tree.end()
        calls += 4 * tickets  # an atomic and a store of each thread
        elapsed = time.perf_counter() - start
    return {"schedules_per_second": tree.schedules / elapsed, "calls_per_second": calls / elapsed}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:     argv without the program's name
    Returns:  0
    """
    parser = Parser("emulator", __doc__)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of one run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each program as a whole (default: %(default)s)")
    parser.add_argument("--engines", action="store_true", help="compare Python with compiled kernels, and no more")
    parser.add("json")
    options = parser.parse_args(argv)
    if options.engines:
        report = Report(options)
        with progress("engines", len(SIZES)) as advance:
            for tokens, hidden in SIZES:
                rows = [engines_of(tokens, hidden, model) for model in COMPILED]
                report.table(rows, ENGINE_COLUMNS, "Emulator: CPU seconds of a call")
                report.add(engines=rows)
                advance()
        report.close()
        return 0
    with progress("primitives", len(CASES) + 1) as advance:
        rows = measure(options.seconds, advance)
        every = measure_every(10 * options.seconds)
    with progress("whole runs", len(WORKLOADS) + len(PROGRAMS)) as advance:
        times, programs = [], []
        for name in WORKLOADS:
            times.append(times_of(name, options.repeats))
            advance()
        for name in PROGRAMS:
            programs.append(rate_of(name, options.repeats))
            advance()
    report = Report(
        options,
        calls_per_second={row["name"]: round(1e3 * row["thousand_per_second"]) for row in rows},
        every_schedule={name: round(rate) for name, rate in every.items()},
    )
    report.table(rows, COLUMNS, "Emulator: primitive calls on one core")
    schedules, calls = every.values()
    report.say(f"Every schedule: {schedules:,.0f} schedules/s, {calls / 1e3:,.0f} thousand calls/s")
    report.table(times, RUN_COLUMNS, "Whole runs: CPU seconds by memory model")
    report.table(programs, RATE_COLUMNS, "Small programs under `--all`: runs a second of CPU")
    report.add(cpu_seconds=times, all_schedules=programs)
    report.close()
    return 0
