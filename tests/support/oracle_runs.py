"""The programs of `oracle` as kernels and hosts of nbep, under every schedule or under seeds, and what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from oracle import Block, Op, Oracle, Program, Thread, Verdict

from nbep.emulator import DataRace, DeadlockError, UseAfterFree, World, current_thread
from nbep.emulator.machine.errors import Divergence
from nbep.emulator.schedule.every import Every, Redundant, Tree

NEVER_NS = 1 << 62
WARP = 32
KINDS = {1: "s8", 2: "s16", 4: "s32", 8: "s64"}
TYPES = {4: np.int32, 8: np.int64}
FAULTS = {DataRace: "race", UseAfterFree: "race", DeadlockError: "hang", Divergence: "hang"}


def run(program: Program, strategy: Any, seed: int = 0) -> tuple:
    """One run: the memory at the end, and all answers.

    Raises: DataRace, UseAfterFree, DeadlockError, Divergence
    """
    memory_model = getattr(strategy, "memory_model", "checked")
    world = World(len(program.hosts), seed, memory_model=memory_model, strategy=strategy)
    answers: list[list[list[Any]]] = []
    kernels = [kernel_of(blocks, answers) for _, blocks in program.kernels]

    def launch(stream: Any, number: int, base: int) -> None:
        blocks = program.kernels[number][1]
        stream.launch(kernels[number], (base,), len(blocks), num_threads(blocks[0]), 64, f"kernel_{number}")

    left, of_hosts = run_hosts(world, program.hosts, program.num_bytes, launch)
    return left, tuple(tuple(map(told_of, thread)) for kernel in answers for thread in kernel) + of_hosts


def run_hosts(world: Any, hosts: Sequence[Sequence[Op]], num_bytes: int, launch: Callable) -> tuple[tuple, tuple]:
    """Run what hosts do: the memory at the end, and their answers. launch: kernel, with the base of memory"""
    num_ranks = len(hosts)
    space = world.ranks[0].space
    memory = space.allocate(num_bytes, "memory", zero=True)
    bases = [memory.address, *(world.ranks[rank].space.open(memory).address for rank in range(1, num_ranks))]
    come: Counter[int] = Counter()  # by meeting
    of_hosts: list[list[Any]] = [[] for _ in hosts]

    def host(rank: int) -> Callable[[], None]:
        def word(op: Op, polls: bool = True) -> int:
            kind = np.dtype(TYPES.get(op.size, np.int32))
            return int(space.read(memory, kind.type, op.cell, op.size // kind.itemsize, polls=polls)[0])

        def main() -> None:
            context = world.ranks[rank]
            streams: dict[int, Any] = {}
            events: dict[int, Any] = {}
            for op in hosts[rank]:
                stream = streams.get(op.cell)
                if op.what in ("launch", "record", "follow", "sync") and stream is None:
                    stream = streams[op.cell] = context.create_stream(f"stream {op.cell}")
                if op.what == "launch":
                    launch(stream, op.value, bases[rank])
                elif op.what == "record":
                    events[op.value] = stream.record()
                elif op.what == "follow":
                    stream.wait(events[op.value])
                elif op.what == "sync":
                    stream.synchronize()
                elif op.what == "join":
                    world.host_wait(lambda op=op: events[op.value].done, "an event")
                    events[op.value].tell_host()
                elif op.what == "ask":
                    of_hosts[rank].append(bool(events[op.value].done))
                    if of_hosts[rank][-1]:
                        events[op.value].tell_host()
                elif op.what == "wait":
                    world.host_wait(lambda op=op: word(op) >= op.value, "a word")
                elif op.what == "meet":
                    come[op.value] += 1
                    world.host_wait(lambda op=op: come[op.value] == num_ranks, "other hosts")
                elif op.what == "free":
                    space.free(memory)
                elif op.what == "ld":
                    of_hosts[rank].append(word(op, op.order != "weak"))
                else:
                    kind = np.dtype(TYPES.get(op.size, np.int32))
                    space.write(memory, op.cell, np.full(op.size // kind.itemsize, op.value, kind))

        return main

    world.run([host(rank) for rank in range(num_ranks)])
    left = () if memory.freed else tuple(memory.memory)  # no view: hosts see what they have one of
    return left, tuple(map(tuple, of_hosts))


def told_of(answer: Any) -> Any:
    return answer() if callable(answer) else answer


def num_threads(block: Block) -> int:
    return WARP * len(block) if len(block) > 1 else len(block[0])


def kernel_of(blocks: tuple[Block, ...], answers: list) -> Callable[[int], None]:
    """The kernel. Threads that a warp has besides come to its barriers."""
    lanes = [
        (b, WARP * w + lane)
        for b, block in enumerate(blocks)
        for w in range(len(block))
        for lane in range(len(block[w]))
    ]
    mine: dict[tuple[int, int], list[Any]] = {who: [] for who in lanes}
    answers.append([mine[who] for who in lanes])

    def kernel(base: int) -> None:
        t = current_thread()
        block = blocks[t.block_idx]
        warp = block[t.warp]
        if t.lane < len(warp):
            go_on(t, base, warp[t.lane], 0, mine[t.block_idx, t.thread_idx], block)
        else:
            go_on(t, base, tuple(op for op in warp[0] if op.what in ("bar", "arrive")), 0, [], block)

    return kernel


def go_on(t: Any, base: int, thread: Thread, number: int, answers: list[Any], block: Block) -> None:
    """The steps from a number on. No loop: a look in its next turn would count as a poll."""
    if number == len(thread):
        for i, answer in enumerate(answers):
            answers[i] = told_of(answer)
        return
    op = thread[number]
    if op.given < 0 or (op.given < len(answers) and told_of(answers[op.given])):
        if op.what in ("either", "both"):
            wait_for_two(t, base, op, thread[number + 1])
            number += 1
        else:
            do(t, base + op.cell, op, answers, block)
    go_on(t, base, thread, number + 1, answers, block)


def wait_for_two(t: Any, base: int, one: Op, other: Op) -> None:
    if one.what == "either":
        while True:
            if t.load(base + one.cell, "s32", one.order, one.scope) == one.value:
                break
            if t.load(base + other.cell, "s32", other.order, other.scope) == other.value:
                break
            t.spin(NEVER_NS)
        return
    while not (
        t.load(base + one.cell, "s32", one.order, one.scope) == one.value
        and t.load(base + other.cell, "s32", other.order, other.scope) == other.value
    ):
        t.spin(NEVER_NS)


class Late:
    """Whether a value is a number or more, asked once it is called."""

    def __init__(self, value: Any, least: int):
        self.value, self.least = value, least

    def __call__(self) -> bool:
        return bool(self.value >= self.least)


def do(t: Any, address: int, op: Op, answers: list[Any], block: Block) -> None:
    kind = KINDS[op.size]
    if op.what == "st":
        t.store(address, kind, op.value, op.order, op.scope)
    elif op.what == "wait":
        while t.load(address, kind, op.order, op.scope) < op.value:
            t.spin(NEVER_NS)
    elif op.what == "lock":
        while t.atomic("cas", address, kind, op.value, op.order, op.scope, op.other) != op.other:
            t.spin(NEVER_NS)
    elif op.what == "fence":
        t.fence(op.order, op.scope)
    elif op.what == "syncwarp":
        t.syncwarp(op.other)
    elif op.what == "vote":
        last = bool(told_of(answers[-1])) if answers else False
        answers.append(bool(t.vote("any", op.other, last)))
    elif op.what == "shfl":
        value = answers[-1].value if answers and isinstance(answers[-1], Late) else 0
        first = (op.other & -op.other).bit_length() - 1
        answers.append(bool(t.shfl("idx", op.other, value, first) >= op.value))
    elif op.what in ("bar", "arrive"):
        count = WARP * op.value if len(block) > 1 else t.block_dim
        (t.barrier if op.what == "bar" else t.barrier_arrive)(op.cell, count)
    else:
        if op.what == "ld":
            value = t.load(address, kind, op.order, op.scope)
        else:
            value = t.atomic(
                op.what, address, kind, op.value, op.order, op.scope, op.other if op.what == "cas" else None
            )
        if op.asks != "none":
            whole = {"all": int, "bit": lambda one: bool(one & 1)}.get(op.asks)
            answers.append(whole(value) if whole else Late(value, op.other))
            if op.asks == "least":
                answers[-1] = told_of(answers[-1])


# --- both sides -----------------------------------------------------------------------------------------------------


def under_all(program: Program, most: int = 2000, tree: Tree | None = None) -> tuple[Verdict, bool]:
    """What nbep says under every schedule, up to the first race; and whether that were all schedules."""
    tree, faults, outcomes = tree or Tree(finds_races=True), set[str](), set[tuple]()
    while tree.begin():
        try:
            outcomes.add(run(program, Every(tree)))
        except Redundant:
            tree.end(is_redundant=True)
            continue
        except tuple(FAULTS) as error:
            faults.add(FAULTS[type(error)])
            if FAULTS[type(error)] == "race":
                return Verdict(faults, outcomes), True
        tree.end()
        if tree.schedules + tree.redundant >= most:
            return Verdict(faults, outcomes), False
    return Verdict(faults, outcomes), True


def under_seeds(program: Program, seeds: range) -> Verdict:
    """What nbep says under some seeds."""
    faults, outcomes = set[str](), set[tuple]()
    for seed in seeds:
        try:
            outcomes.add(run(program, "uniform", seed))
        except tuple(FAULTS) as error:
            faults.add(FAULTS[type(error)])
    return Verdict(faults, outcomes)


def difference(program: Program, seeds: range = range(2)) -> str:
    """What nbep says and the oracle does not, or the other way round; "" if nothing."""
    exact, old = Oracle(program).verdict(), Oracle(program, reads_old=True).verdict()
    found, is_whole = under_all(program)
    some = under_seeds(program, seeds)
    for name, one in (("--all", found), ("seeds", some)):
        if "race" not in old.faults and (more := one.faults - old.faults):  # what comes behind a race may be anything
            return f"{name}: {more} is false"
        if not old.faults and one.outcomes - exact.outcomes:
            return f"{name}: outcomes {one.outcomes - exact.outcomes} cannot be"
    if is_whole and not found.faults:  # else that stops a run, and may hide another one
        if exact.faults:
            return f"--all: {exact.faults} is missed"
        if exact.outcomes - found.outcomes:
            return f"--all: outcomes {exact.outcomes - found.outcomes} are missed"
    return ""
