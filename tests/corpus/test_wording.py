"""The words of reports about races, by kind: here alone, so that the corpus asserts kinds and cells.

Those that a small kernel shows are asked of it; the others of the table.
"""

import blocks
import flags
import pytest
import rings
from entries import beginning

from nbep.emulator import DataRace
from nbep.emulator.reports.causes import SENTENCES, Cause

pytestmark = [pytest.mark.emulator_only("the kernels are broken in Python"), pytest.mark.usefixtures("held_reports")]

ENTRIES = {str(race): race for race in (*flags.ENTRIES, *blocks.ENTRIES, *rings.ENTRIES)}
# kind: an entry that shows it, under which seed, and what its report says
SAID = {
    "store too weak": (
        "flag: relaxed store", 0,
        """the store to `memory` of rank 1: flag (byte 512) is too weak to order the store before this load: with
        relaxed.sys order it releases nothing, and no fence comes before it""",
    ),
    "load too weak": (
        "flag: relaxed load", 0,
        """the load of `memory` of rank 1: flag (byte 512) is too weak to order the store before this load: with
        relaxed.sys order it acquires nothing, and no fence comes after it""",
    ),
    "both too weak": (
        "flag: both ends relaxed", 0,
        """the store to and the load of `memory` of rank 1: flag (byte 512) are both too weak to order the store
        before this load: with relaxed.sys order they release and acquire nothing, and no fence does it for them""",
    ),
    "store fence scope": (
        "flag: fence of the GPU before the store", 0,
        """the scope of the fence before the store to `memory` of rank 1: flag (byte 512) is too small to order the
        store before this load: gpu, but between ranks it takes sys""",
    ),
    "load fence scope": (
        "flag: fence of the GPU after the load", 0,
        """the scope of the fence after the load of `memory` of rank 1: flag (byte 512) is too small to order the
        store before this load: gpu, but between ranks it takes sys""",
    ),
    "racing store's scope": (
        "flag: release of the GPU between ranks", 0,
        """the scope of this store to `memory` of rank 1: flag (byte 512) is too small: gpu, but between ranks it
        takes sys""",
    ),
    "racing load's scope": (
        "flag: acquire of the GPU between ranks", 0,
        """the scope of the load of `memory` of rank 1: flag (byte 512) is too small: gpu, but between ranks it takes
        sys""",
    ),
    "weak store": (
        "flag: weak store", 0,
        """this store to `memory` of rank 1: flag (byte 512) is too weak: it has weak order, but another thread loads
        it with acquire.sys order, as a cell that threads wait for""",
    ),
    "weak load": (
        "flag: weak load", 0,
        """the load of `memory` of rank 1: flag (byte 512) is too weak: it has weak order, but another thread stores
        to it with release.sys order, as a cell that threads wait for""",
    ),
    "shuffle": (
        "reduction: lanes, a shuffle in place of a syncwarp", 0,
        """no syncwarp is between the store and this load of `shared memory`: byte 124: a shfl.xor brings lanes
        together, but orders no memory""",
    ),
    "shuffle passes on": (
        "flag: a lane waits, a shuffle tells the others", 0,
        """no syncwarp passes on to the other lanes what one has acquired by `memory` of rank 1: flag (byte 512): a
        shfl.idx brings lanes together, but orders no memory""",
    ),
    "no syncwarp": (
        "warp: no syncwarp before the loads", 0,
        """no syncwarp is between the load and this store of `shared memory`: byte 64: the two lanes of a warp have
        not met since""",
    ),
    "no barrier": (
        "block: no barrier before the loads", 0,
        """no barrier is between the load and this store of `shared memory`: byte 104: the two warps of a block have
        not met since""",
    ),
    "warps not met": (
        "reduction: a total is read while others add", 0,
        """nothing orders the load and this store of `memory` of rank 0: other flag (byte 528): the two warps of a
        block have not met since, and this thread has waited for nothing that the other one, or its warp, has stored
        since""",
    ),
    "another lane signals": (
        "flag: lanes write, no syncwarp", 0,
        """no syncwarp orders the store before the store to `memory` of rank 1: flag (byte 512), which another thread
        of its block makes without waiting for it""",
    ),
    "heard by another warp": (
        "block: no barrier behind the thread that waits", 2,
        """no barrier or syncwarp orders this load behind the load of `memory` of rank 1: flag (byte 512): another
        thread of its block has made that load, and this thread has not waited for it""",
    ),
    "no proxy fence": (
        "double buffer: the copy engine is not told", 0,
        """the copy engine does not know what this thread has learned from `memory` of rank 1: tail (byte 544): no
        fence.proxy.async.global comes before the bulk load of `memory` of rank 1: data[0] (byte 0)""",
    ),
    "copy reads": (
        "double buffer: a stage is filled while a copy reads it", 0,
        """the bulk copy that reads `shared memory`: byte 0 has not been waited for: a wait_group.read is missing""",
    ),
    "copy writes": (
        "double buffer: the tail does not wait for the copy", 0,
        """the bulk copy that writes `memory` of rank 1: data[0] (byte 0) has not been waited for: a wait_group is
        missing before the store to `memory` of rank 1: tail (byte 544)""",
    ),
    "copy, mbarrier": (
        "double buffer: nobody waits on the mbarrier", 0,
        """no thread has waited on the mbarrier at shared byte 256, which says when the bulk copy that writes `shared
        memory`: byte 0 is done""",
    ),
    "copy, phase": (
        "double buffer: the parity of an mbarrier stays the same", 0,
        """this thread has waited on the mbarrier at shared byte 256, but for an earlier phase than that of the bulk
        copy that writes `shared memory`: byte 0""",
    ),
    "promised": (
        "ring: the tail says one too much", 0,
        """`memory` of rank 1: tail (byte 544) announces this store too early, or its reader goes beyond it: after the
        store to `memory` of rank 1: tail (byte 544) the reader's block loads `memory` of rank 1: data[1] (byte 4) a
        second time, before this store is made""",
    ),
    "old signal, loader": (
        "flag: raised before the data is written", 1,
        """nothing orders the load of `memory` of rank 1: data[0] (byte 0) behind this store: the last signal that the
        loading thread has seen from this block is `memory` of rank 1: flag (byte 512), stored before this store""",
    ),
    "old signal": (
        "flag: raised before the data is written", 0,
        """nothing at all orders the store before this load of `memory` of rank 1: data[0] (byte 0): the last signal
        that this thread has seen from the storing thread is `memory` of rank 1: flag (byte 512), stored before that
        store""",
    ),
    "two stores, not waited": (
        "all-to-all: two ranks put into one slot", 0,
        """two threads store to `memory` of rank 2: parts[0] (byte 128), and nothing at all orders one before the
        other: the second has waited for nothing that the first one, or its block, has stored, such as `memory` of
        rank 2: arrivals + 1 (byte 580)""",
    ),
    "gone on": (
        "flag: a lane waits, the others do not", 3,
        """nothing at all orders the store before this load of `memory` of rank 1: data[23] (byte 92): this thread has
        gone on while thread 0 of its block waits for `memory` of rank 1: flag (byte 512)""",
    ),
    "not waited": (
        "flag: nobody waits", 2,
        """nothing at all orders the store before this load of `memory` of rank 1: data[0] (byte 0): this thread has
        waited for nothing that the other one, or its block, has stored""",
    ),
    "neither waited": (
        "flag: a lane waits, the others do not", 0,
        """nothing at all orders the load and this store of `memory` of rank 1: data[14] (byte 56): neither of the two
        threads has waited for anything that the other one, or its block, has stored after its access""",
    ),
    "overwritten": (
        "ring: the sender does not wait", 4,
        """`memory` of rank 1: data[0] (byte 0) was overwritten before this load: this thread knows only of the
        earlier store, and the later one may come at any time""",
    ),
    "overwritten, heard": (
        "ring: the sender takes it for larger than it is", 1,
        """`memory` of rank 1: data[1] (byte 4) was overwritten before this load: this thread knows only of the
        earlier store, and the later one did not wait for this load: the last that its thread knew of this block was
        `memory` of rank 1: head (byte 560)""",
    ),
    "unread": (
        "ring: the sender does not wait", 6,
        """`memory` of rank 1: data[1] (byte 4) is overwritten by this store, which may come before the other thread
        has read the old value: the storing thread has waited for nothing that comes after the load""",
    ),
    "unread, heard": (
        "ring: the head moves before the load", 0,
        """`memory` of rank 1: data[1] (byte 4) is overwritten by this store, which may come before the other thread
        has read the old value: the last that the storing thread knows of the other block is `memory` of rank 1: head
        (byte 560), stored before the load""",
    ),
}  # fmt: skip
A, B, DATA = "`a`: byte 0", "`b`: byte 0", {"order": "the load before this store", "noun": "store", "before": "load"}
WORDED = [
    ("unordered", (A,), {"accesses": "the load and this store"},
     """nothing orders the load and this store of `a`: byte 0"""),
    ("store scope", (A,),
     {"storing": "the store to `a`: byte 0", "name": "gpu", "between": "between ranks it takes sys"},
     """the scope of the store to `a`: byte 0 is too small to order the load before this store: gpu, but between ranks
     it takes sys"""),
    ("load scope", (A,),
     {"loading": "the load of `a`: byte 0", "name": "gpu", "between": "between ranks it takes sys"},
     """the scope of the load of `a`: byte 0 is too small to order the load before this store: gpu, but between ranks
     it takes sys"""),
    ("both racing scopes", (A,), {"ends": "the scope of X and the scope of Y", "are": "are", "scopes": "cta and gpu",
      "between": "between ranks it takes sys"},
     """the scope of X and the scope of Y are too small: cta and gpu, but between ranks it takes sys"""),
    ("mixed sizes", ("`f`: byte 0",),
     {"accesses": "the store and this load", "before": "store", "noun": "load", "had": "bytes 0-7", "has": "bytes 0-3"},
     """the store and this load of `f`: byte 0 overlap in part: the store has bytes 0-7, this load bytes 0-3, and PTX
     orders only accesses of the same bytes, however strong they are"""),
    ("CPU under way", (A,), {"did": "stores to", "needed": "an order, and scope sys"},
     """the CPU stores to `a`: byte 0 while the kernel runs: this store needs an order, and scope sys"""),
    ("CPU under way", (A,), {"did": "polls", "needed": "a larger scope: sys"},
     """the CPU polls `a`: byte 0 while the kernel runs: this store needs a larger scope: sys"""),
    ("another warp signals", (A,), {"which": "this store", "telling": "store to `a`: byte 0"},
     """no barrier or syncwarp orders this store before the store to `a`: byte 0, which another thread of its block
     makes without waiting for it"""),
    ("heard by another lane", (A,), {},
     """no syncwarp orders this store behind the load of `a`: byte 0: another thread of its block has made that load,
     and this thread has not waited for it"""),
    ("early proxy fence", (A, B), {"known": "has stored itself", "unmet": ""},
     """the copy engine does not know what this thread has stored itself: its fence.proxy.async.global before the bulk
     load of `a`: byte 0 comes too early"""),
    ("no wait", (A,), {"kernel": "k", "who": "rank 0", "whom": "rank 1"},
     """a wait is missing in kernel `k`: rank 0 has stored its signal to `a`: byte 0, and has gone on without waiting
     for rank 1: it has loaded no signal with acquire order"""),
    ("queue pairs", (A, B), {"wrote": "entry 1 of queue pair 6", "heard": "entry 2 of queue pair 7"},
     """nothing at all orders the load before this store of `a`: byte 0: the NIC has stored it for entry 1 of queue
     pair 6; the last store of the NIC that this thread has seen is `b`: byte 0, for entry 2 of queue pair 7, and
     nothing orders two queue pairs"""),
    ("two stores", (A,), {},
     """two threads store to `a`: byte 0, and nothing at all orders one before the other"""),
    ("loader gone on", (A,), {"behind": "thread 1 of its block waits"},
     """nothing at all orders the load and this store of `a`: byte 0: the thread that loads has gone on while thread 1
     of its block waits"""),
    ("behind, polls", (A,), {"thread": 1},
     """thread 1 of its block waits for `a`: byte 0"""),
    ("behind, waits", (), {"thread": 1, "function": "wait_tail"},
     """thread 1 of its block waits in wait_tail"""),
    ("behind, on its way", (), {"thread": 1, "site": "k.py:3 (k)"},
     """thread 1 of its block is still at k.py:3 (k)"""),
    ("CPU after the launch", ("`x`: byte 0",),
     {"launch": "kernel `use`", "stream": "copies", "did": "stores", "does": "loads"},
     """the CPU stores `x`: byte 0 after it has queued kernel `use` on stream `copies`, which loads it, and before it
     has waited for that"""),
    ("CPU after the launch", ("`x`: byte 0",),
     {"launch": "kernel `use`", "stream": "a", "did": "reads", "does": "stores"},
     """the CPU reads `x`: byte 0 after it has queued kernel `use` on stream `a`, which stores it, and before it has
     waited for that"""),
    ("hosts", ("`x`: byte 0",),
     {"other": "rank 0", "did": "stores", "launch": "kernel `use`", "rank": "rank 1", "does": "loads"},
     """the host of rank 0 stores `x`: byte 0, and kernel `use` of rank 1 loads it: nothing orders the two, as neither
     its host nor a kernel before it has waited for that host since"""),
    ("streams", ("`x`: byte 0",),
     {"rank": "rank 1", "first": "kernel `fill` on stream `a`", "does": "stores", "also": "loads it",
      "second": "kernel `use` on stream `b`", "stream": "b", "other": "a",
      "instead": "it has waited for no event of stream `a`"},
     """on rank 1, kernel `fill` on stream `a` stores `x`: byte 0, kernel `use` on stream `b` loads it, and
     nothing orders the two: before the second, stream `b` must wait for the first; it has waited for no event of stream
     `a`"""),
]  # fmt: skip


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("kind", SAID)
def test_a_report_says_its_cause(kind):
    name, seed, sentence = SAID[kind]
    with pytest.raises(DataRace) as caught:
        ENTRIES[name].run(seed)
    assert [cause.kind for cause in caught.value.causes] == [kind]
    assert beginning(caught.value) == in_one_line(sentence)


@pytest.mark.parametrize(("kind", "cells", "words", "sentence"), WORDED)
def test_a_cause_is_a_sentence(kind, cells, words, sentence):
    assert Cause(kind, cells, (), {**DATA, **words}).sentence == in_one_line(sentence)


def test_all_kinds_are_here():
    assert {*SAID, *(kind for kind, *_ in WORDED)} == set(SENTENCES)
