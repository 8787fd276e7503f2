"""Random programs for both engines.

Threads and hosts hand data on, in ways that are right; then some steps are changed, dropped or added.
"""

from __future__ import annotations

import random

import engine_programs
from engine_programs import NUM_BYTES, Steps, encoded, table_of
from oracle import Op

SHORT = {  # what a program draws -> the access that it is
    "ST": Op("st", "weak"), "ST_S64": Op("st", "weak", size=8),
    "LD": Op("ld", "weak"), "LD_S64": Op("ld", "weak", size=8),
    "ST_REL": Op("st", "release"), "ST_RLX": Op("st", "relaxed"), "ST_REL_GPU": Op("st", "release", scope="gpu"),
    "ST_RLX_GPU": Op("st", "relaxed", scope="gpu"), "ST_REL_S64": Op("st", "release", size=8),
    "LD_ACQ": Op("ld", "acquire"), "LD_RLX": Op("ld", "relaxed"), "LD_ACQ_GPU": Op("ld", "acquire", scope="gpu"),
    "LD_RLX_GPU": Op("ld", "relaxed", scope="gpu"), "LD_ACQ_S64": Op("ld", "acquire", size=8),
    "ADD_RLX": Op("add", "relaxed", asks="none"), "ADD_REL": Op("add", "release"), "ADD_ACQ_REL": Op("add", "acq_rel"),
    "ADD_RLX_GPU": Op("add", "relaxed", scope="gpu"), "ADD_REL_GPU": Op("add", "release", scope="gpu", asks="none"),
    "ADD_ACQ_REL_GPU": Op("add", "acq_rel", scope="gpu"), "EXCH": Op("exch", "acq_rel"), "CAS": Op("cas", "acq_rel"),
    "WAIT_ACQ": Op("wait", "acquire"), "WAIT_RLX": Op("wait", "relaxed"),
    "WAIT_ACQ_GPU": Op("wait", "acquire", scope="gpu"),
}  # fmt: skip
Step = tuple[str, int, int, int]
DATA, FLAGS = (0, 32, 64, 96), tuple(range(128, 512, 8))
LIKE = [  # what a change may make of a step
    ("ST", "LD", "ST_V4", "LD_V4", "ST_U8", "LD_U8", "ST_S64", "LD_S64", "LD_NC", "LD_RLX", "ST_RLX", "ADD_RLX"),
    ("ST_REL", "ST_RLX", "ST_REL_GPU", "ST_RLX_GPU", "ST_VOL", "ST"),
    ("ADD_REL", "ADD_RLX", "ADD_RLX_GPU", "ADD_REL_GPU", "EXCH", "CAS", "ST_RLX"),
    ("WAIT_ACQ", "WAIT_RLX", "WAIT_ACQ_GPU"),
    ("FENCE_CTA", "FENCE_GPU", "FENCE_SYS", "NOTHING"),
    ("S_ST", "S_LD", "S_ST_V4", "S_LD_V4", "S_RLX", "S_ACQ", "S_ADD", "S_EXCH"),
    ("FENCE_SHARED", "FENCE_GLOBAL", "NOTHING"),
    ("WAIT_READ", "WAIT_ALL", "NOTHING"),
]
WHOLE = ("ST_V4", "LD_V4")


class Draw:
    def __init__(self, seed: object, changed: float):
        self.random = random.Random(f"drawn {seed}")
        self.changed = changed
        self.steps: dict[tuple[int, int, int], list[Step]] = {}  # by kernel, block and thread
        self.flags = list(FLAGS)
        self.random.shuffle(self.flags)
        self.holders: dict[int, tuple[int, int, int]] = {}  # who has accessed a cell last
        self.values = dict.fromkeys(FLAGS, 0)

    def data(self, cell: int) -> Step:
        what = self.random.choice(("ST", "LD", "ST_V4", "LD_V4", "ST_U8", "LD_U8", "ST_S64", "LD_S64", "ST", "LD"))
        at = cell if what in WHOLE else cell + self.random.choice((0, 0, 8))
        return what, at, self.random.randrange(1, 9), 0

    def publish(self, flag: int) -> list[Step]:
        self.values[flag] += 1
        value = self.values[flag]
        return self.random.choice((
            [("ST_REL", flag, value, 0)], [("ST_REL", flag, value, 0)],
            [("ADD_REL", flag, 1, 0)], [("ADD_ACQ_REL", flag, 1, 0)],
            [("FENCE_SYS", 0, 0, 0), ("ST_RLX", flag, value, 0)], [("FENCE_SYS", 0, 0, 0), ("ADD_RLX", flag, 1, 0)],
            [("FENCE_SYS", 0, 0, 0), ("ST_VOL", flag, value, 0)], [("EXCH", flag, value, 0)], [("CAS", flag, value, 0)],
        ))  # fmt: skip

    def wait(self, flag: int) -> list[Step]:
        value = self.values[flag]
        return self.random.choice((
            [("WAIT_ACQ", flag, value, 0)], [("WAIT_ACQ", flag, value, 0)],
            [("WAIT_RLX", flag, value, 0), ("FENCE_SYS", 0, 0, 0)],
            [("WAIT_RLX", flag, value, 0), ("LD_ACQ", flag, 0, 0)],
        ))  # fmt: skip

    def message(self) -> None:
        """One thread accesses data and tells another one, which accesses it, too."""
        a, b = self.random.sample(list(self.steps), 2)
        cell = self.random.choice(DATA)
        a = self.holders.get(cell, a)
        if a == b:
            return
        self.holders[cell] = b
        flag = self.random.choice(self.flags[:3]) if self.random.random() < 0.1 else self.flags.pop()
        sends, waits = self.steps[a], self.steps[b]
        if self.random.random() < 0.3:
            stage = self.random.choice((0, 32, 64))
            sends += [("S_ST_V4", stage, 0, 0), ("S_ST_V4", stage + 16, 0, 0), ("FENCE_SHARED", 0, 0, 0)]
            sends += [("B_STORE", cell & ~31, stage, 0), ("COMMIT", 0, 0, 0), ("WAIT_ALL", 0, 0, 0)]
        else:
            sends += [self.data(cell) for _ in range(self.random.choice((1, 1, 2)))]
        sends += self.publish(flag)
        waits += self.wait(flag)
        number = sum(step[0] == "M_INIT" for step in waits)
        if self.random.random() < 0.3 and number < 4:
            mbarrier = 4 * (b[2] % 3) + number
            waits += [("M_INIT", 0, 0, mbarrier), ("FENCE_GLOBAL", 0, 0, 0), ("FENCE_SHARED", 0, 0, 0)]
            waits += [("M_EXPECT", 0, 0, mbarrier), ("B_LOAD", cell & ~31, 128 + 32 * (b[2] % 3), mbarrier)]
            waits += [("M_WAIT", 0, 0, mbarrier), ("S_LD", 128 + 32 * (b[2] % 3), 0, 0)]
        waits.append(self.data(cell))

    def change(self, steps: list[Step]) -> None:
        for n in reversed(range(len(steps))):
            what, at, value, more = steps[n]
            like = next((those for those in LIKE if what in those), None)
            if like is None or self.random.random() >= self.changed:
                continue
            if self.random.random() < 0.3:
                steps.insert(n, self.data(self.random.choice(DATA)))
            else:
                new = self.random.choice(like)
                steps[n] = new, at & ~15 if new in WHOLE or new in ("S_ST_V4", "S_LD_V4") else at, value, more


def draw(seed: object, changed: float = 0.06) -> Steps:
    """A program of one or two ranks, with one to three kernels in all, by which a host may be met."""
    made = Draw(seed, changed)
    choose = made.random
    num_ranks = choose.choice((1, 2))
    shapes = [
        (choose.randrange(num_ranks), choose.choice((1, 1, 2)), choose.choice((2, 32, 40, 64)))
        for _ in range(choose.choice((1, 2, 2, 3)))
    ]
    if sum(blocks for _, blocks, _ in shapes) == 1 and choose.random() < 0.5:
        shapes[0] = (shapes[0][0], 2, shapes[0][2])
    meets = choose.choice(("BAR", "BAR", "LANES", "SYNC_1", "NOTHING"))
    for k, (_, blocks, threads) in enumerate(shapes):
        for b in range(blocks):
            for thread in choose.sample(range(min(threads, 36)), min(threads, choose.choice((2, 2, 3)))):
                made.steps[k, b, thread] = []
    for _ in range(choose.choice((1, 2))):
        for _ in range(choose.choice((1, 2, 3, 4))):
            made.message()
        meet(made, shapes, meets)
    for _ in range(choose.choice((0, 1, 2))):
        made.message()
    for steps in made.steps.values():
        made.change(steps)
    kernels = []
    for k, (rank, blocks, threads) in enumerate(shapes):
        mine = {who[1:]: list(map(whole, steps)) for who, steps in made.steps.items() if who[0] == k}
        kernels.append((rank, blocks, threads, table_of(mine, blocks, threads)))
    return Steps(kernels, [of_host(made, rank, kernels) for rank in range(num_ranks)], NUM_BYTES)


def whole(step: Step) -> tuple[int, ...]:
    """A drawn step as the kernel reads it."""
    what, at, value, more = step
    if what in SHORT:
        return encoded(SHORT[what]._replace(cell=at, value=value, other=value - 1))
    return getattr(engine_programs, what), at, value, more


def meet(made: Draw, shapes: list[tuple[int, int, int]], how: str) -> None:
    """Let all threads of blocks meet, or lanes of a warp, some of which may have no other steps."""
    if how == "NOTHING":
        return
    choose = made.random
    for k, (_, blocks, threads) in enumerate(shapes):
        if how == "SYNC_1" and threads != 64:
            how = "BAR"
        for b in range(blocks):
            lanes = min(threads, 32)
            mask = choose.choice(((1 << lanes) - 1, 3, sum(1 << i for i in range(0, lanes, 2))))
            for thread in range(threads):
                steps = made.steps.get((k, b, thread))
                if how == "LANES" and (thread >= 32 or not mask >> thread & 1):
                    continue
                if steps is None:
                    steps = made.steps[k, b, thread] = []
                elif how == "LANES" and choose.random() < 0.3:
                    steps.append(("SHFL", 0, 1, 1 << thread))
                if how == "SYNC_1":
                    steps.append(("ARRIVE" if thread < 32 else "MEET", 1, 0, 64))
                else:
                    steps.append((how, 0, mask, 0))


OF_HOSTS = {  # what hosts do with memory
    "write": Op("st", "release", value=1), "block": Op("st", "release", value=1, size=16), "poll": Op("ld", "acquire"),
    "read": Op("ld", "weak", size=16),
}  # fmt: skip


def of_host(made: Draw, rank: int, kernels: list) -> list[Op]:
    choose = made.random
    steps: list[Op] = []

    def access(names: tuple[str, ...], cells: tuple[int, ...] = DATA) -> None:
        steps.append(OF_HOSTS[choose.choice(names)]._replace(cell=choose.choice(cells)))

    for k, (its_rank, *_) in enumerate(kernels):
        if its_rank == rank:
            if choose.random() < 0.3:
                access(("write", "block", "poll", "read"), DATA + FLAGS[-1:])
            steps.append(Op("launch", cell=choose.choice((0, 0, 1)), value=k))
            event = [Op("record", value=k), Op("follow", cell=1, value=k)]
            steps += choose.choice(([], [], [Op("sync", cell=choose.choice((0, 1)))], event))
    for _ in range(choose.choice((0, 0, 1, 2))):
        access(("read", "poll", "write", "block"))
    if choose.random() < 0.5:
        steps += [Op("sync"), Op("sync", cell=1)]
        access(("read", "poll", "write"))
    if choose.random() < 0.15 and rank == 0:
        steps.append(Op("free"))
    return steps
