"""What a thread knows of the accesses of others, for `checked`: numbers of signals, by block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .source import Site

NOT_YET = 1 << 62  # the number of a signal that has not been given
NOT_WAITED = NOT_YET + 1  # nor can it, before the thread has waited for its bulk copy
ALL_BLOCKS = 0  # in place of a block's number: of every block

Numbers = dict[int, int]  # block -> its latest signal that is known.  Never changed once made.


class Knowledge(NamedTuple):
    """Of stores, what a thread knows itself, and what the copy engine knows when it starts a copy; of loads."""

    stores: Numbers
    engine: Numbers
    loads: Numbers


class Owner(NamedTuple):
    """Who accessed.  Compared by identity: there is one for each thread of each launch, and one for its copy engine."""

    rank: int
    kernel: str
    block: int  # a number that no other block of the run has
    block_idx: int
    thread_idx: int


class Message(NamedTuple):
    """What the last store to a cell tells those who read it, if the scopes of both reach as far as the other."""

    knowledge: Knowledge
    scope: int
    rank: int
    block: int


class Access:
    """A store or a load of some bytes.

    number: of the first signal of its thread that tells of it; at_exit: that was the end of the kernel
    """

    __slots__ = ("owner", "verb", "begin", "end", "order", "site", "number", "at_exit")

    def __init__(self, owner: Owner, verb: str, begin: int, end: int, order: str, site: Site | None):
        self.owner = owner
        self.verb = verb
        self.begin = begin
        self.end = end
        self.order = order
        self.site = site
        self.number = NOT_YET
        self.at_exit = False


def join(knowledge: Iterable[Knowledge]) -> Knowledge:
    """What those who meet know together."""
    stores: Numbers = {}
    engine: Numbers = {}
    loads: Numbers = {}
    for one in {id(one): one for one in knowledge}.values():
        stores = later(stores, one.stores)
        engine = later(engine, one.engine)
        loads = later(loads, one.loads)
    return Knowledge(stores, engine, loads)


def later(a: Numbers, b: Numbers) -> Numbers:
    if not a or a is b:
        return b
    new = {block: number for block, number in b.items() if a.get(block, 0) < number}
    return {**a, **new} if new else a


NOTHING = Knowledge({}, {}, {})
