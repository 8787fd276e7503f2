"""Faults put back into nbep, one at a time, each with the shape of programs that is to find it.

python tests/support/oracle_faults.py        the table of records/every_schedule.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from oracle_programs import SHAPES
from oracle_runs import difference

from nbep.emulator.machine.stream import Order
from nbep.emulator.models import knowledge, races, signals
from nbep.emulator.models.host import CheckedHost, CheckedOrder
from nbep.emulator.models.knowledge import ALL_CLOCKS, Knowledge, Overwritten
from nbep.emulator.run import Run
from nbep.emulator.schedule import every_order
from nbep.emulator.schedule.every_choice import Choice, Tried
from nbep.emulator.schedule.every_copies import CopyChoices
from nbep.emulator.schedule.every_hosts import EveryHost, OrderChoices
from nbep.emulator.schedule.every_step import Step

MOST = 3000  # programs until a fault must have been found


class Fault(NamedTuple):
    """words: what nbep does with it; shape: of the programs"""

    words: str
    shape: str
    patch: Callable[[], Any]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    """A patch that puts make(the original) in its place."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def both(*patches: Callable[[], Any]) -> Callable[[], Any]:
    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            yield

    return together


def start_with_all(start: Any) -> Any:
    def start_launch(self: Any, launch: Any, queued: Any) -> None:
        start(self, launch, queued)
        numbers = {ALL_CLOCKS: self.world.signals}
        launch.known = launch.learned = launch.known._replace(stores=numbers, loads=numbers)

    return start_launch


def know_at_the_start(point: Any) -> Any:
    def point_now(self: Any, stream: Any, _: Any) -> Any:
        with mock.patch.object(self.world, "asking", stream.rank):
            return point(self, stream, CheckedOrder.queued(self, stream))

    return point_now


def end_without_learning(end: Any) -> Any:
    def end_launch(self: Any, launch: Any) -> None:
        launch.learned = launch.known
        end(self, launch)

    return end_launch


def keep_last_load(remember: Any) -> Any:
    def remember_load(self: Any, allocation: Any, load: Any, granule: int) -> None:
        remember(self, allocation, load, granule)
        loads = allocation.last_loads[granule]
        same = [
            key for key, one in loads.items() if (one.owner, one.begin, one.end) == (self.owner, load.begin, load.end)
        ]
        for key in same:
            if loads[key] is not load:
                del loads[key]

    return remember_load


def tell_in_a_vote(converge: Any) -> Any:
    def converge_all(self: Any, name: str, mask: int, value: Any, site: Any) -> Any:
        is_vote = name.startswith("vote")
        if is_vote:
            self.signal(True)
        signal = self.world.signals
        collective = converge(self, name, mask, value, site)
        if is_vote:
            collective.signals[self.thread_idx] = signal
            collective.knowledge.append(self.knowledge)
            collective.known = None  # until all have come
        return collective

    return converge_all


def hear_in_a_vote(collect: Any) -> Any:
    def collect_all(self: Any, name: str, mask: int, value: Any, site: Any) -> Any:
        collective = collect(self, name, mask, value, site)
        if name.startswith("vote"):
            known = signals.join(collective.knowledge), *self.known_of_lanes(collective)
            self.knowledge, self.warp_known, self.lanes_known = known
        return collective

    return collect_all


def fence_without_acquire(fence: Any) -> Any:
    def release_only(self: Any, order: str, scope: str) -> None:
        self.heard.clear()
        fence(self, order, scope)

    return release_only


def read_and_forget(read: Any) -> Any:
    def read_only(self: Any, allocation: Any, offset: int, nbytes: int, polls: bool) -> None:
        read(self, allocation, offset, nbytes, polls)
        for loads in allocation.last_loads.values():
            for key in [key for key, one in loads.items() if one.owner is self.owner]:
                del loads[key]

    return read_only


def last_that_begins(stores: Any, begin: int, end: int) -> Any:
    return next((store for store in reversed(tuple(stores)) if store.begin == begin), None)


FAULTS = (
    Fault(
        "a kernel that starts knows all that others have done so far",
        "ranks",
        replaced(CheckedOrder, "start", start_with_all),
    ),
    Fault(
        "a kernel knows what its host knows when it starts, not when it was queued",
        "streams",
        replaced(
            CheckedOrder,
            "point",
            know_at_the_start,
        ),
    ),
    Fault(
        "a kernel does not know what those before it have acquired",
        "ranks",
        replaced(CheckedOrder, "end", end_without_learning),
    ),
    Fault(
        "a stream that waits for an event knows nothing of it",
        "streams",
        replaced(CheckedOrder, "wait", lambda wait: lambda self, stream, mark, queued: None),
    ),
    Fault(
        "the order of arrival at a barrier is not tried",
        "barriers",
        replaced(
            CopyChoices,
            "arrive",
            lambda _: lambda self, *args, **options: super(CopyChoices, self).arrive(*args, **options),
        ),
    ),
    Fault(
        "what a thread has observed does not go on with its releases",
        "observed",
        replaced(
            signals.SignallingThread,
            "has_observed",
            lambda _: lambda self, store: any(one.owner is self.owner for one in store.observations()),
        ),
    ),
    Fault(
        "stores that a strong one has overwritten are forgotten",
        "observed",
        replaced(Overwritten, "add", lambda _: lambda self, store: None),
    ),
    Fault(
        "so are loads",
        "flags",
        both(
            replaced(
                races,
                "remember_store",
                lambda remember: lambda allocation, store, _: remember(allocation, store, lambda load: False),
            ),
            replaced(knowledge, "is_covered", lambda _: lambda earlier, later: True),
        ),
    ),
    Fault(
        "of a thread's loads of a cell the last one alone is kept",
        "flags",
        replaced(races.CheckingThread, "remember_load", keep_last_load),
    ),
    Fault(
        "a relaxed store releases",
        "flags",
        lambda: mock.patch.object(signals, "RELEASES", frozenset(("release", "acq_rel", "relaxed"))),
    ),
    Fault("no load acquires", "flags", lambda: mock.patch.object(signals, "ACQUIRES", frozenset())),
    Fault(
        "every scope reaches everybody",
        "scopes",
        both(
            replaced(races, "distance", lambda _: lambda a, b: 1),
            replaced(signals, "distance", lambda _: lambda a, b: 1),
        ),
    ),
    Fault(
        "an atomic passes nothing on",
        "flags",
        replaced(
            signals.SignallingThread,
            "send",
            lambda send: lambda self, allocation, store, modifies: send(self, allocation, store, False),
        ),
    ),
    Fault("a fence does not acquire", "flags", replaced(signals.SignallingThread, "fence", fence_without_acquire)),
    Fault(
        "lanes that meet know all that their warp has done",
        "lanes",
        replaced(
            signals.SignallingThread, "known_of_lanes", lambda _: lambda self, collective: (self.world.signals, {})
        ),
    ),
    Fault(
        "a vote orders memory",
        "lanes",
        both(
            replaced(signals.SignallingThread, "converge", tell_in_a_vote),
            replaced(signals.SignallingThread, "collect", hear_in_a_vote),
        ),
    ),
    Fault(
        "a load is not over before its thread stores",
        "flags",
        replaced(Knowledge, "with_loads", lambda _: lambda self, loads: self),
    ),
    Fault(
        "what is asleep stays asleep",
        "flags",
        replaced(
            Choice,
            "after",
            lambda _: (
                lambda self, step, waiting, parked: Choice(
                    waiting, parked, {who: one for who, one in {**self.asleep, **self.done}.items() if who != step.who}
                )
            ),
        ),
    ),
    Fault(
        "adds commute whose old values somebody asks for",
        "counters",
        lambda: mock.patch.object(Step, "commutes", property(lambda self: self.is_add)),
    ),
    Fault(
        "adds commute whatever they ask for, if not for the number",
        "tickets",
        both(
            lambda: mock.patch.object(every_order, "may_begin", return_value=True),
            lambda: mock.patch.object(Tried, "may_begin", return_value=True),
        ),
    ),
    Fault(
        "that a host asks for an event is no choice",
        "streams",
        replaced(OrderChoices, "is_done", lambda _: lambda self, mark: mark.done),
    ),
    Fault("what a host has read is forgotten", "hosts", replaced(CheckedHost, "read", read_and_forget)),
    Fault(
        "what one host knows all know",
        "meetings",
        lambda: mock.patch.object(Run, "host_rank", property(lambda self: None)),
    ),
    Fault(
        "a host that waits for an event knows what all hosts know",
        "meetings",
        replaced(Order, "is_done", lambda _: lambda self, mark: mark.done),
    ),
    Fault(
        "hosts that meet tell each other nothing",
        "meetings",
        replaced(EveryHost, "meet_all", lambda _: lambda self, ranks: None),
    ),
    Fault("to free memory is no access", "meetings", replaced(CheckedHost, "frees", lambda _: lambda self, _: None)),
    Fault(
        "an access observes those of other sizes that begin where it does",
        "sizes",
        replaced(signals, "last_to", lambda _: last_that_begins),
    ),
)


def programs_until_found(fault: Fault, most: int = MOST) -> int | None:
    """How many programs of its shape it takes; None if none of so many shows it."""
    with fault.patch():
        return next((number + 1 for number in range(most) if difference(SHAPES[fault.shape](number))), None)


if __name__ == "__main__":
    print("| what nbep does | shape | programs |\n| --- | --- | --- |")
    for one in FAULTS:
        print(f"| {one.words} | `{one.shape}` | {programs_until_found(one)} |", flush=True)
