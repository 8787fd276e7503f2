"""The tables that a run consists of. All of its state lies there, and in its stacks and the memory of its ranks.

Numbers of threads are those of their stacks; a warp takes 32, a block its warps. 0 is the hub: Python's stack. Pointers
are addresses in this process. Lists are linked by the numbers of rows, of which 0 is none.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .switch import FLAGS, MOST_STACKS

TABLES_SYMBOL = "nbep_tables"
MOST_THREADS = MOST_STACKS
MOST_WARPS = MOST_THREADS // 32
NUM_QUANTA = 4096  # as long as a word of the generator is 12 bits: see `schedule.proceed`
TICK_STEPS = 64
GENERATOR_WORDS = 625  # the last one: how many are drawn
NUM_BARRIERS = 16
NUM_COLLECTIVES = 32  # of a warp at once
MOST_OPERATIONS = 1 << 16
MOST_LAUNCHES = 1 << 20  # in a run
MOST_CELLS = 1 << 22  # that all threads together have polled
MOST_SEGMENTS = 1 << 20  # of all ranks, in a run
MOST_GROUPS = MOST_MBARRIERS = 1 << 18
BUCKETS = 1 << 14
GRANULE_SHIFT = 3  # who polls is found by 8 bytes
MOST_CLOCKS = 4096
MOST_VECTORS = 1 << 16
MOST_KNOWLEDGE = 1 << 20
MOST_OWNERS = 1 << 20
MOST_EPOCHS = MOST_ACCESSES = 1 << 25
MOST_HOSTS = 4096
MOST_STAMPS = 1 << 16
MOST_STORES, MOST_VERSIONS = 1 << 24, 1 << 26
NEVER = 1 << 62  # a deadline that does not come
NO_DEADLINE = -(1 << 62)
# What cells belong to: a segment's `group`; above these the shared memory of a block, and an mbarrier.
OF_BLOCKS, OF_MBARRIERS = 1 << 24, 1 << 25

# Why a run is with Python now.
TICK, HOST, OPERATION, BLOCK_LEFT, COPIES_DONE, STOPPED = range(1, 7)
# What the hub does next.
PICK, AFTER = 0, 1
# Reasons to stop. The interpreted run says it in full.
REASONS = {
    1: "an access to an address that is no memory of the rank",
    2: "an access out of bounds",
    3: "a misaligned access",
    4: "a read of memory that was never written",
    5: "a store to an input of the host",
    6: "a store to memory that a kernel reads as constant",
    7: "threads that diverge at a collective or a barrier",
    8: "a trap",
    9: "a barrier that cannot fill",
    10: "a bulk store without a proxy fence",
    11: "an mbarrier that is none",
    12: "a thread that leaves while its bulk stores read shared memory",
    13: "an error that the kernel raised",
    14: "a division outside the range of u32",
    15: "an atomic of scope sys on memory of the host",
    16: "a wait that reports a fault",
    17: "a loop that waits without polling",
    18: "a stack that overflows",
    19: "more than the tables of the engine hold",
    20: "an access that nothing orders with another one",
    21: "an atomic whose result a function of its kernel returns",
}
(
    UNMAPPED, OUT_OF_BOUNDS, MISALIGNED, UNWRITTEN, READ_ONLY, NOT_CONSTANT, DIVERGED, TRAPPED, NEVER_FULL, UNFENCED,
    NO_MBARRIER, UNREAD, RAISED, DIVIDED, HOST_ATOMIC, FAULT_REPORTED, EMPTY_SPINS, OVERFLOWED, FULL_TABLE, RACE,
    PASSED_ON,
) = REASONS  # fmt: skip

# After these an interpreted run may end well; RAISED: Numba raises something where a value is None, too.
NO_FAILURES = RAISED, FAULT_REPORTED, FULL_TABLE, RACE, PASSED_ON


class Table(NamedTuple):
    dtype: np.dtype
    rows: int


def _records(count: int, words: str = "", halves: str = "", floats: str = "") -> Table:
    """A table of records: fields of 64 bits, then those of 32, then floats of 64."""
    kinds: Sequence[tuple[str, str]] = ((words, "i8"), (floats, "f8"), (halves, "i4"))
    fields: list[Any] = [(name, code) for names, code in kinds for name in names.split()]
    return Table(np.dtype(fields, align=True), count)


TABLES: dict[str, Table] = {
    # One row: the run. stacks: where they begin; old_action: what has handled faults of memory before; stage, event,
    # event_arg: of the hub; left: calls before the running thread gives way;
    # sequence: of threads that began to wait; fault and what follows: what has stopped it
    "run": _records(
        1,
        "calls left granted skipped parks steps sequence fault fault_address "
        "stacks old_action signals moment num_versions "
        "current stage event event_arg tick_at tick_left num_runnable num_slow num_operations turns "
        "num_polling has_changed fault_thread has_failed num_clocks "
        "operating resumes unfinished num_woken has_hole stamps_round",
        floats="operation_rate willing early_rate",
    ),
    "threads": _records(
        MOST_THREADS,
        "pointer deadline fault_deadline sequence segments space shared shared_bytes side result looked spins",
        "rank block warp thread_idx block_idx grid_dim block_dim lane launch next "
        "exited polling may_time_out num_time_outs expired waited_once has_looked_again has_news empty_spins "
        "fenced is_slow lost passed first_polled last_polled first_watched last_watched "
        "open_group oldest_group latest_group num_groups wanted wanted_reads looks",
    ),
    # site: of the barrier to which its lanes come in their phase
    "warps": _records(MOST_WARPS, "exited site", "num_lanes first num_pending end phase"),
    # missing: lanes; first, last: who waits, in the order of arrival; brought: lanes, -1 before a lane with news
    "collectives": _records(MOST_WARPS * NUM_COLLECTIVES, "mask missing brought site", "name first last told"),
    "values": Table(np.dtype("i8"), MOST_WARPS * NUM_COLLECTIVES * 32),  # that lanes pass
    "blocks": _records(
        MOST_WARPS,
        "shared side notes phase",
        "launch live num_threads first proxy_fences copies mbarriers group serial by_ptx",
    ),
    "barriers": _records(MOST_WARPS * NUM_BARRIERS, "", "expected arrived first last holds passed waiting told latest"),
    "launches": _records(MOST_LAUNCHES, "arguments entry", "live copies is_done known learned left"),
    "runnable": Table(np.dtype("i4"), 2 * MOST_THREADS),
    "slow": Table(np.dtype("i4"), 2 * MOST_THREADS),
    "hosts": Table(np.dtype("i4"), 4096),  # is it slow?
    "quanta": Table(np.dtype("i8"), NUM_QUANTA),
    "generator": Table(np.dtype("u4"), 2 * GENERATOR_WORDS),  # that of the scheduler, and that of early loads
    # shadow: a byte for each, whether it is written; constant: 8 bytes for 16, which kernel takes them for constant
    "segments": _records(
        MOST_SEGMENTS, "memory size shadow constant lowest end notes", "group is_writable on_host is_freed"
    ),
    # A cell that a thread has polled: of what (`key`), where it lies, and the value seen.
    "cells": _records(MOST_CELLS, "key place value", "size thread segment next before next_there before_there"),
    "buckets": _records(BUCKETS, "", "first last"),
    "woken": Table(np.dtype("i4"), 4 * MOST_THREADS),
    # Operations under way, in the order of Python's list: rows of copies, behind MOST_OPERATIONS those of stores, or
    # less than 0 what Python is to do.
    "operations": Table(np.dtype("i4"), MOST_OPERATIONS + MOST_STORES),
    # where, smem: offsets in a segment and in shared memory; goal: a mbarrier, or a bulk group
    "copies": _records(MOST_OPERATIONS, "where smem number buffer", "kind thread block launch segment goal next bulk"),
    "groups": _records(MOST_GROUPS, "", "reads writes next"),
    "mbarriers": _records(MOST_MBARRIERS, "phase", "count left expected next told phase_told there done"),
    "out": Table(np.dtype("i8"), 4),  # a vector on its way
    # By the number of a table: how many of its rows were ever used, and which is the first of those that are free.
    "pools": _records(64, "", "used free"),
}
# For `checked`; see `knowledge` and `races`.
CHECKED_TABLES: dict[str, Table] = {
    "numbers": Table(np.dtype("i4"), MOST_VECTORS * MOST_CLOCKS),
    "vectors": _records(MOST_VECTORS, "", "uses next"),
    "knowledge": _records(MOST_KNOWLEDGE, "", "stores engine loads shared read uses next"),
    "clocks": Table(np.dtype("i4"), MOST_CLOCKS),  # whose it is now: a row of owners
    "owners": _records(MOST_OWNERS, "", "slot stream rank block"),  # warps, the copy engines of warps, hosts
    # number: of the first signal that tells of it, 0 before; same: the epoch that it has become part of; fenced: the
    # number of its thread's first proxy fence behind it, for shared and for global memory; then: the one before it
    "epochs": _records(MOST_EPOCHS, "", "number owner lane same fenced_shared fenced_global then_shared then_global"),
    # of a thread or a host: who it is, what it knows, and what it has not told yet; `models.signals` says more
    "minds": _records(
        MOST_THREADS + MOST_HOSTS,
        "last_place",
        "owner lane engine known loading storing warp_known has_lanes fence1 fence2 fence3 heard "
        "unfenced_shared unfenced_global last_store last_how open first last num_groups",
    ),
    "lanes_known": Table(np.dtype("i4"), MOST_THREADS * 32),
    "heard": _records(MOST_KNOWLEDGE, "place", "where needed known next"),
    # where: bytes of 16, and the reach; see `races`
    "accesses": _records(MOST_ACCESSES, "", "epoch next where observed successor message"),
    "observers": _records(MOST_ACCESSES, "", "epoch next"),
    "messages": _records(
        MOST_KNOWLEDGE, "", "part1 part2 part3 own1 own2 own3 heard1 heard2 heard3 before after reach next"
    ),
    "overwritten": _records(MOST_KNOWLEDGE, "", "at first count limit where next"),
    "stamps": _records(MOST_STAMPS, "key round"),
    # bulk copies that are not over for their thread, and their groups; left: of a launch, what nobody has waited for
    "bulks": _records(MOST_KNOWLEDGE, "", "next load store"),
    "bulk_groups": _records(MOST_KNOWLEDGE, "", "next first owner lane"),
}
# For `delayed`; see there, and `models.pending`.
DELAYED_TABLES: dict[str, Table] = {
    # of 16 bytes, among the notes of a segment: versions in memory, stores on their way, how many of those arrive now,
    # what blocks have read, and whether the CPU has written a word there
    "granules": _records(1, "", "oldest newest count pending arriving views signal"),
    # before: the 16 bytes, and which of them were written; reach 0: a weak one; seen1, 2, 3: the moments
    "versions": _records(
        MOST_VERSIONS,
        "before before_high written written_high number",
        "rank block thread_idx begin end reach says seen1 seen2 seen3 next",
    ),
    # on their way. low, high: the bytes, or of an atomic (op is not -1) its operands; queue, after, before: of threads
    "stores": _records(
        MOST_STORES, "low high where granule", "segment thread version size op level done next queue after before"
    ),
    # what waits, of each thread its stores and its atomics, of each block, and of each rank
    "queues": _records(2 * MOST_THREADS + MOST_WARPS + MOST_HOSTS, "", "first last"),
    "views": _records(MOST_KNOWLEDGE, "number", "block version next"),
    "knowing": _records(
        MOST_THREADS,
        "",
        "floor block_floor first_moment released_floor released heard1 heard2 heard3 shared shared_block told",
    ),
    "seen": Table(np.dtype("i4"), MOST_STORES + 16),  # versions
    "scratch": Table(np.dtype("i8"), 4),  # bytes of a load, and which of them are written: `has_hole` if some are not
}
OF_MODELS = {"sc": TABLES, "checked": TABLES | CHECKED_TABLES, "delayed": TABLES | DELAYED_TABLES}
TABLES = TABLES | CHECKED_TABLES | DELAYED_TABLES
NUMBERS = {name: i for i, name in enumerate(TABLES)}  # also of the rows of `pools`

AT: dict[str, int] = {name: field[1] // 8 for name, field in (TABLES["run"].dtype.fields or {}).items()}


class Tables:
    """Those of one run: NumPy arrays by name. Zeros that take pages where they are touched."""

    def __init__(self, model: str = "sc") -> None:
        self._kept: list[np.ndarray] = []
        self.directory = np.zeros(len(TABLES), np.int64)
        self.rows: dict[str, np.ndarray] = {}
        for i, (name, table) in enumerate(TABLES.items()):
            if name not in OF_MODELS[model]:
                continue
            size = table.dtype.itemsize * table.rows
            raw = new_zeros(size)
            self.directory[i] = address_of(raw)
            self.rows[name] = raw.view(table.dtype)
        self.run = self.rows["run"][0]
        words: Any = self.rows["run"].view(np.int64)
        self.words = memoryview(words)  # the same; AT says where a field lies

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.rows[name]
        except KeyError:
            raise AttributeError(name) from None

    def zeros(self, nbytes: int) -> np.ndarray:
        """Bytes that last as long as the run."""
        self._kept.append(new_zeros(nbytes))
        return self._kept[-1]

    def end(self) -> None:
        """The run is over: only its counts and its generator are still asked for."""
        self.rows = {name: self.rows[name] for name in ("run", "generator")}
        self._kept.clear()

    def use(self) -> None:
        """Let compiled functions find them."""
        ctypes.memmove(address_of(DIRECTORY), address_of(self.directory), self.directory.nbytes)


DIRECTORY = np.zeros(len(TABLES), np.int64)  # at `nbep_tables`


def new_zeros(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), FLAGS), np.uint8)[:nbytes]


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
