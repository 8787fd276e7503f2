"""An oracle for small programs: all interleavings, and the data-races that PTX's memory consistency model sees in them.

It shares nothing with the emulator that it judges: a program is data, and this module interprets it. States of the
interpreter that are equal are one, so that all interleavings of a small program are few.

Of two events the words are those of PTX: *base causality*, *observation*, *morally strong*. A set of events is an int
with a bit for each. What a host queues comes before the kernel that it starts.
nbep's own rule is added: a load is over before its thread stores anything behind it, also with a relaxed store.

Source: PTX ISA 9.1, Memory Consistency Model: 8.7 Morally strong operations, 8.7.1 Conflict and data-races, 8.8 Release
and acquire patterns, 8.9.2 Observation order, 8.9.4 Memory synchronization (API synchronization too), 8.9.5 Causality
order, 8.10.6 Causality
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oracle_state import State, bits, union

REACH = {"cta": 1, "gpu": 2, "sys": 3}
RELEASING, ACQUIRING = ("release", "acq_rel"), ("acquire", "acq_rel")
ATOMIC, TURNS = ("add", "exch", "cas"), ("wait", "either", "both", "again", "lock")
READING, WRITING, MODIFYING = ("ld", *TURNS, *ATOMIC), ("st", "lock", "free", *ATOMIC), ("lock", *ATOMIC)


class Op(NamedTuple):
    """A step of a thread or of a host.

        ld, st, add, exch, cas     at `size` bytes from `cell` on; cas compares with `other`
        wait                       load until it is `value` or more
        lock                       cas in a loop, until it succeeds
        either, both               the first look of a wait for `value` in one cell of two, or in both; the next step
        again                      is the second look; if that fails, all begins again
        fence                      acq_rel
        syncwarp, vote, shfl       of the lanes in `other`; tells whether any last answer, or the first lane's, was true
        bar, arrive                at the barrier `cell` of the block, for `value` warps
    Of a host alone, at stream `cell` or event `cell`:
        launch                     kernel `value`
        record, follow             the event `value` in the stream; have the stream wait for it
        sync, join, ask            wait for the stream; for the event; ask whether it is done
        meet                       the meeting `value` of all hosts
        free                       all of the memory: a weak write, and whoever accesses it later is in a race
    asks: what becomes of a value: "all" of it; "bit": its lowest one; "least": whether it is `other` or more,
    "late": at the end of the thread; "none"
    given: the number of the answer, of this thread, that must be true; -1: it is done in any case
    """

    what: str
    order: str = ""
    cell: int = 0
    value: int = 0
    scope: str = "sys"
    size: int = 4
    other: int = 0
    asks: str = "all"
    given: int = -1


def after(op: Op, at: int, value: int) -> int | None:
    """The step behind a look of a wait, which is number `at`; None if the turn fails."""
    if op.what == "wait":
        return at + 1 if value >= op.value else None
    if op.what == "either":
        return at + 2 if value == op.value else at + 1
    return at + 1 if value == (op.other if op.what == "lock" else op.value) else None


Thread = tuple[Op, ...]
Block = tuple[tuple[Thread, ...], ...]  # threads by warp and lane


class Program(NamedTuple):
    """kernels: of each its rank and its blocks; hosts: what that of each rank does; num_bytes: of the memory"""

    kernels: tuple[tuple[int, tuple[Block, ...]], ...]
    hosts: tuple[Thread, ...]
    num_bytes: int


class Verdict(NamedTuple):
    """faults: "race", "hang"; outcomes: memory and answers of all interleavings that end without one"""

    faults: set[str]
    outcomes: set[tuple]


class Fault(Exception):
    pass


class Oracle:
    """All interleavings of a program.

    reads_old: a read may take an older write if its answer is the same and no axiom forbids it. Else it takes the
    latest one. What has a race in an interleaving has one here; what has none here has none by PTX.
    """

    def __init__(self, program: Program, reads_old: bool = False):
        self.program, self.reads_old = program, reads_old
        self.threads: list[Thread] = []
        self.place: list[tuple[int, int, int]] = []  # rank, block, thread of it
        self.warp: list[list[int]] = []  # the threads of its warp
        self.of_kernel: list[list[int]] = []
        blocks = 0
        for rank, of_kernel in program.kernels:
            first = len(self.threads)
            for block in of_kernel:
                blocks += 1
                for w, lanes in enumerate(block):
                    here = list(range(len(self.threads), len(self.threads) + len(lanes)))
                    for lane, thread in enumerate(lanes):
                        self.threads.append(thread)
                        self.place.append((rank, blocks, 32 * w + lane))
                        self.warp.append(here)
            self.of_kernel.append(list(range(first, len(self.threads))))
        self.first_host = len(self.threads)
        for rank, host in enumerate(program.hosts):
            self.threads.append(host)
            self.place.append((-1 - rank, -1, -1))
        starts = [sum(map(len, self.threads[:i])) for i in range(len(self.threads))]
        self.starts, self.num_events = starts, sum(map(len, self.threads))
        self.ops = [op for thread in self.threads for op in thread]
        self.owner = [self.place[i] for i, thread in enumerate(self.threads) for _ in thread]
        self.tasks: dict[tuple[int, int], list[int]] = {}  # the events that are queued in each stream of each rank
        for rank, host in enumerate(program.hosts):
            for n, op in enumerate(host):
                if op.what in ("launch", "record", "follow"):
                    self.tasks.setdefault((rank, op.cell), []).append(starts[self.first_host + rank] + n)
        self.asked = {(rank, op.value) for rank, host in enumerate(program.hosts) for op in host if op.what == "ask"}

    def begin(self) -> State:
        state, count = State(), len(self.threads)
        state.memory, state.writers = [0] * self.program.num_bytes, [-1] * self.program.num_bytes
        state.at = [-1] * self.first_host + [0] * len(self.program.hosts)
        state.parked, state.base, state.over = [False] * count, [0] * count, [0] * count
        state.answers = [()] * count
        for name in ("before", "overs", "seen", "chain", "heads"):
            setattr(state, name, [0] * self.num_events)
        state.made, state.failed, state.happened, state.writes, state.met = 0, 0, 0, {}, {}
        state.places = dict.fromkeys(self.tasks, 0)
        state.points = dict.fromkeys(self.tasks, (0, 0))
        return state

    def verdict(self) -> Verdict:
        faults: set[str] = set()
        outcomes: set[tuple] = set()
        known, left = set(), [self.begin()]
        while left:
            state = left.pop()
            try:
                self.advance(state)
                if (key := state.key()) in known:
                    continue
                known.add(key)
                successors = list(self.steps(state))
            except Fault as fault:
                faults.add(str(fault))
                continue
            left += successors
            if all(one.is_in_vain for one in successors):
                hosts = enumerate(self.threads[self.first_host :], self.first_host)
                is_over = all(state.at[i] == len(thread) for i, thread in hosts)
                is_over &= all(state.places[stream] == len(tasks) for stream, tasks in self.tasks.items())
                if is_over and not state.met:  # a barrier that somebody has left for good can never fill
                    outcomes.add((tuple(state.memory), tuple(state.answers)))
                else:
                    faults.add("hang")
        return Verdict(faults, outcomes)

    # --- streams ------------------------------------------------------------------------------------------------------

    def advance(self, state: State) -> None:
        """Have all streams do what is not observable."""
        moved = True
        while moved:
            moved = False
            for stream in self.tasks:
                event = self.task(state, stream)
                if event is not None and not (
                    self.ops[event].what == "record" and (stream[0], self.ops[event].value) in self.asked
                ):
                    moved |= self.do_task(state, stream, event)

    def task(self, state: State, stream: tuple[int, int]) -> int | None:
        """The next task of a stream, if it has been queued."""
        left, host = self.tasks[stream][state.places[stream] :], self.first_host + stream[0]
        return left[0] if left and left[0] < self.starts[host] + state.at[host] else None

    def do_task(self, state: State, stream: tuple[int, int], event: int) -> bool:
        """Whether it is done."""
        op, point = self.ops[event], state.points[stream]
        queued = state.before[event] | 1 << event, state.overs[event] | 1 << event
        point = union(point, queued)
        if op.what == "launch":
            threads = self.of_kernel[op.value]
            for i in threads:
                if state.at[i] < 0:
                    state.at[i] = 0
                    state.base[i], state.over[i] = point
                    self.skip(state, i)
            if any(state.at[i] < len(self.threads[i]) for i in threads):
                return False
            for i in threads:
                point = union(point, (state.base[i], state.over[i]))
        elif op.what == "record":
            state.points[stream[0], "event", op.value] = point
        else:
            done = state.points.get((stream[0], "event", op.value))
            if done is None:
                return False
            point = union(point, done)
        state.points[stream] = point
        state.places[stream] += 1
        return True

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[State]:
        for stream in self.tasks:
            event = self.task(state, stream)
            if event is not None and self.ops[event].what == "record":  # others are done, or cannot be yet
                new = state.copy()
                self.do_task(new, stream, event)
                yield new
        for i, thread in enumerate(self.threads):
            if 0 <= state.at[i] < len(thread) and not state.parked[i]:
                yield from self.step(state, i, thread[state.at[i]], self.starts[i] + state.at[i])

    def step(self, state: State, i: int, op: Op, event: int) -> Iterator[State]:
        if op.what in READING or op.what == "st":
            yield from self.access(state, i, op, event)
            return
        new = state.copy()
        if op.what == "fence":
            for read in self.earlier(new, i, READING):
                self.acquire(new, i, event, read)
        elif op.what in ("sync", "join"):
            stream = (i - self.first_host, op.cell)
            if op.what == "sync":
                queued = sum(task < event for task in self.tasks.get(stream, ()))
                done = state.points.get(stream, (0, 0)) if state.places.get(stream, 0) >= queued else None
            else:
                done = state.points.get((stream[0], "event", op.value))
            if done is None:
                return
            self.learn(new, i, done)
        elif op.what == "ask":
            done = state.points.get((i - self.first_host, "event", op.value))
            new.answers[i] += (done is not None,)
            if done is not None:
                self.learn(new, i, done)
        elif op.what not in ("launch", "record", "follow", "free"):
            self.happen(new, i, event)
            self.meet(new, i, op)
            yield new
            return
        self.happen(new, i, event)
        if op.what == "free":
            self.check(new, op, event)
            new.memory = []
        self.go_on(new, i)
        yield new

    def happen(self, state: State, i: int, event: int) -> None:
        """An event, which all before it in its thread comes before."""
        state.happened |= 1 << event
        state.before[event], state.overs[event] = state.base[i], state.over[i]
        self.learn(state, i, (1 << event, 1 << event))

    def learn(self, state: State, i: int, point: tuple[int, int]) -> None:
        state.base[i] |= point[0]
        state.over[i] |= point[1]

    def go_on(self, state: State, i: int, to: int | None = None) -> None:
        state.at[i] = state.at[i] + 1 if to is None else to
        self.skip(state, i)

    def skip(self, state: State, i: int) -> None:
        """What is done only if an answer was true."""
        thread = self.threads[i]
        while state.at[i] < len(thread) and (given := thread[state.at[i]].given) >= 0:
            if given < len(state.answers[i]) and state.answers[i][given]:
                break
            state.at[i] += 1

    # --- where threads meet -------------------------------------------------------------------------------------------

    def meet(self, state: State, i: int, op: Op) -> None:
        """It arrives at a barrier, a collective or a meeting; who comes last has all go on."""
        _, block, index = self.place[i]
        is_barrier = op.what in ("bar", "arrive")
        key = (block, op.cell) if is_barrier else (block, index // 32, op.what, op.other)
        here = state.met.get(key, ())
        if op.what == "meet":
            key, here = ("hosts", op.value), state.met.get(("hosts", op.value), ())
        if any(one == i for one, _, _, waits in here):
            raise Fault("hang")  # nothing has made it wait for the others, of whom some may never come
        last = state.answers[i][-1] if state.answers[i] else 0
        here, state.parked[i] = (*here, (i, (state.base[i], state.over[i]), bool(last), op.what != "arrive")), True
        if is_barrier:  # a warp arrives as one, when its last lane has come
            warps = {tuple(self.warp[one]) for one, *_ in here}
            came = [one for one, *_ in here]
            if all(lane in came for lane in self.warp[i]):
                for lane in self.warp[i] if op.what == "arrive" else ():
                    self.leave(state, lane)
            is_full = sum(all(lane in came for lane in warp) for warp in warps) == op.value
        else:
            is_full = len(here) == (len(self.program.hosts) if op.what == "meet" else op.other.bit_count())
        if not is_full:
            state.met[key] = here
            return
        state.met.pop(key, None)
        together = (0, 0)
        for _, point, *_ in here:
            together = union(together, point)
        for one, _, _, waits in here:
            if waits:
                if op.what in ("vote", "shfl"):
                    told = [value for *_, value, _ in sorted(here)]
                    state.answers[one] += (any(told) if op.what == "vote" else told[0],)
                else:
                    self.learn(state, one, together)
                self.leave(state, one)

    def leave(self, state: State, i: int) -> None:
        state.parked[i] = False
        self.go_on(state, i)

    # --- accesses -----------------------------------------------------------------------------------------------------

    def access(self, state: State, i: int, op: Op, event: int) -> Iterator[State]:
        sources = self.sources(state, op) if op.what in READING else [None]
        for write in sources:
            new = state.copy()
            old = self.value(state, op, write)
            if write is not None and write >= 0 and self.is_strong(write, event):
                new.seen[event] = 1 << write | (state.chain[write] if self.ops[write].what in MODIFYING else 0)
            new.chain[event] = new.seen[event]
            last = sources[0]  # what an atomic passes on
            if last is not None and last >= 0 and self.is_strong(last, event):
                new.chain[event] = 1 << last | (state.chain[last] if self.ops[last].what in MODIFYING else 0)
            if op.asks == "none" and op.what not in TURNS and self.reads_old:
                new.seen[event] = 0
            if op.order in ACQUIRING:
                for read in (event, *self.earlier(state, i, READING)):
                    if self.location(read) == (op.cell, op.size):
                        self.acquire(new, i, event, read)
            for one in bits(new.seen[event]):
                self.learn(new, i, (0, state.overs[one] | 1 << one))
            self.happen(new, i, event)
            if self.reads_old and self.is_forbidden(new, op, event, write):
                continue
            if op.what in ("cas", "lock") and old != op.other:  # it only reads
                new.failed |= 1 << event
            self.check(new, op, event)
            new.made |= 1 << event
            to = after(op, state.at[i], old) if op.what in TURNS else state.at[i] + 1
            if op.what in ("either", "both") and to == state.at[i] + 1:
                again = self.threads[i][to]
                new.is_in_vain = after(again, to, self.value(state, again, -2)) is None
            if to is None and op.what != "again":
                continue  # a look that fails is none of the events, but may be a race
            if self.writes(new, event):
                self.check_polls(state, i, op, event)
                self.write(new, i, op, event, self.value(state, op, sources[0]))
            if op.what not in ("st", *TURNS) and op.asks != "none":
                new.answers[i] += (self.told(op, old),)
            self.go_on(new, i, state.at[i] - 1 if to is None else to)
            yield new

    def sources(self, state: State, op: Op) -> list[int]:
        """The writes that it may read from, the latest one first: -1 if that is none, -2 for bytes of several.

        An atomic that reads an older one comes earlier in coherence order, too: its answer is the same.
        """
        now = {state.writers[byte] for byte in range(op.cell, op.cell + op.size)}
        if len(now) > 1 or any(one >= 0 and self.location(one) != (op.cell, op.size) for one in now):
            return [-2]
        order = [-1, *state.writes.get((op.cell, op.size), ())]
        found = [order[-1]]
        if self.reads_old:
            mixed = any(self.meets(op, one) and self.location(one) != (op.cell, op.size) for one in bits(state.made))
            for write in reversed(order[:-1] if not mixed else []):
                if self.told(op, self.value(state, op, write)) != self.told(op, self.value(state, op, order[-1])):
                    break
                found.append(write)
        return found

    def is_forbidden(self, state: State, op: Op, event: int, write: int | None) -> bool:
        """Whether a later write to the cell comes before the read in causality order, or was read before: 8.10.5, 6."""
        order = [-1, *state.writes.get((op.cell, op.size), ())]
        if write not in order:
            return False
        later = sum(1 << one for one in order[order.index(write) + 1 :])
        return bool(later & self.causes(state, event))

    def told(self, op: Op, value: int) -> object:
        known = {"none": None, "all": value, "bit": value & 1}
        return after(op, 0, value) if op.what in TURNS else known.get(op.asks, value >= op.other)

    def value(self, state: State, op: Op, write: int | None) -> int:
        if write == -1:
            return 0
        if write is None or write == -2 or state.writes[op.cell, op.size][-1] == write:
            data = state.memory[op.cell : op.cell + op.size]
            return int.from_bytes(bytes(data), "little", signed=True)
        return state.writes[op.cell, op.size, write]

    def write(self, state: State, i: int, op: Op, event: int, old: int) -> None:
        value = {"add": old + op.value, "cas": op.value if old == op.other else old}.get(op.what, op.value)
        data = (value % (1 << 8 * op.size)).to_bytes(op.size, "little")
        state.memory[op.cell : op.cell + op.size] = data
        state.writers[op.cell : op.cell + op.size] = [event] * op.size
        before = state.writes.get((op.cell, op.size), ()) if self.reads_old else ()
        state.writes[op.cell, op.size] = (*before, event)
        state.writes[op.cell, op.size, event] = int.from_bytes(data, "little", signed=True)
        if op.order == "weak":
            return
        heads = self.earlier(state, i, ("fence",)) + [event] * (op.order in RELEASING)
        here = [one for one in self.earlier(state, i, WRITING) if self.location(one) == (op.cell, op.size)]
        heads += [one for one in here if self.writes(state, one)]
        state.heads[event] = sum(1 << one for one in {*heads} if self.ops[one].order in RELEASING)

    def acquire(self, state: State, i: int, event: int, read: int) -> None:
        """An acquire pattern from `read` to `event` has been completed."""
        for write in bits(state.seen[read]):
            for head in bits(state.heads[write]):
                if self.reaches(head, event):
                    self.learn(state, i, (state.before[head] | 1 << head, state.overs[head] | 1 << head))

    def check(self, state: State, op: Op, event: int) -> None:
        """Whether the event is in a data-race with an earlier one."""
        if not state.memory:
            raise Fault("race")
        known = self.causes(state, event)
        for one in bits(state.made & ~known):
            if not self.meets(op, one):
                continue
            if not self.writes(state, one) and (not self.writes(state, event) or state.overs[event] >> one & 1):
                continue
            if not self.is_strong(one, event):
                raise Fault("race")

    def check_polls(self, state: State, i: int, op: Op, event: int) -> None:
        """Others who poll may have looked right before this write."""
        for j, thread in enumerate(self.threads):
            if j != i and 0 <= state.at[j] < len(thread) and not state.parked[j]:
                poll = self.starts[j] + state.at[j]
                other = thread[state.at[j]]
                if other.what in TURNS and self.meets(other, event) and not self.is_strong(poll, event):
                    if after(other, 0, self.value(state, other, -2)) is None and self.place[j] != self.place[i]:
                        raise Fault("race")

    def causes(self, state: State, event: int) -> int:
        """What comes before an event in causality order."""
        base = state.before[event]
        for one in bits(base):
            base |= state.seen[one]
        return base

    def earlier(self, state: State, i: int, kinds: tuple[str, ...]) -> list[int]:
        """What its thread has done so far, of these kinds."""
        events = [self.starts[i] + n for n in range(max(state.at[i], 0))]
        return [one for one in events if self.ops[one].what in kinds and state.happened >> one & 1]

    def writes(self, state: State, event: int) -> bool:
        return self.ops[event].what in WRITING and not state.failed >> event & 1

    def location(self, event: int) -> tuple[int, int]:
        return self.ops[event].cell, self.ops[event].size

    def meets(self, op: Op, event: int) -> bool:
        other = self.ops[event]
        return op.cell < other.cell + other.size and other.cell < op.cell + op.size

    def is_strong(self, a: int, b: int) -> bool:
        """Whether two accesses are morally strong."""
        if self.owner[a] == self.owner[b]:
            return True
        return self.location(a) == self.location(b) and self.reaches(a, b)

    def reaches(self, a: int, b: int) -> bool:
        """Whether both are strong, with scopes that have the other one's thread in them."""
        (rank, block, _), (other, other_block, _) = self.owner[a], self.owner[b]
        distance = 3 if rank != other else 2 if block != other_block else 1
        one, two = self.ops[a], self.ops[b]
        return "weak" not in (one.order, two.order) and min(REACH[one.scope], REACH[two.scope]) >= distance
