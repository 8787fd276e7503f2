"""A load of bytes that nobody has written yet: the report says that an order is missing, and who stores them later."""

from functools import partial

import pytest
from entries import Broken, check
from parts import both_parts
from scenarios import scenario, with_edit, with_fault

from nbep.device.primitives import (
    block_idx,
    ld_acquire_gpu_s32,
    ld_shared_s32,
    ld_weak_s32,
    smem_base,
    st_relaxed_gpu_s32,
    st_shared_s32,
    st_weak_s32,
    thread_idx,
    wait_expired,
)
from nbep.device.protocols.teams import publish_tail
from nbep.emulator import DataRace, Uninitialized, World

pytestmark = [pytest.mark.emulator_only("the kernels are broken in Python"), pytest.mark.usefixtures("held_reports")]
NEVER = 1 << 62
WAIT = "nothing makes this load wait for that: a "


def message(data, flag):
    """Block 0 sends 42 to block 1, and the flag is too weak."""
    if block_idx() == 0:
        st_weak_s32(data, 42)
        st_relaxed_gpu_s32(flag, 1)
    else:
        while ld_acquire_gpu_s32(flag) == 0:
            wait_expired(NEVER)
        ld_weak_s32(data)


def early(data, flag):
    """Block 1 does not wait at all."""
    if block_idx() == 0:
        st_weak_s32(data, 42)
    else:
        ld_weak_s32(data)


def counters(data, flag):
    """Thread 0 clears a counter of shared memory, and the others do not wait for it."""
    if thread_idx() == 0:
        st_shared_s32(smem_base(), 0)
    else:
        ld_shared_s32(smem_base())


def forgotten(data, flag):
    """Nobody stores what is loaded."""
    ld_weak_s32(data)


def launched(kernel, memory_model, grid=2, block=1):
    def run(seed):
        world = World(num_ranks=1, seed=seed, memory_model=memory_model)

        def host():
            rank = world.ranks[0]
            data = rank.space.allocate(4, "data")
            flag = rank.space.allocate(4, "flag", zero=True)
            stream = rank.create_stream("stream")
            stream.launch(kernel, (data.address, flag.address), grid, block, 64)
            stream.synchronize()

        world.run([host])

    return run


def unwritten(name, run, names, not_names=(), seeds=range(4), also=(DataRace,)):
    return Broken(name, run, Uninitialized, names, not_names, seeds, also=also)


ENTRIES = [
    unwritten("user: no wait at all", launched(early, "sc"), ("another block of its rank stores it", WAIT),
              seeds=range(12)),
    unwritten("user: a relaxed flag", launched(message, "delayed"), ("or the signal that it polls is too weak",),
              seeds=range(12)),
    unwritten("user: a counter that is not cleared", launched(counters, "sc", 1, 32),
              ("another thread of its block stores it", WAIT + "syncwarp or a wait is missing")),
    unwritten("user: a counter of another warp", launched(counters, "sc", 1, 64),
              ("another thread of its block stores it", (WAIT + "barrier or a wait", WAIT + "syncwarp or a wait"))),
    unwritten("user: bytes that nobody stores", launched(forgotten, "sc", 1), ("never written",), ("stores", "wait")),
    unwritten("layout: counters are counted before they are cleared",
              with_fault("get_dispatch_layout: syncthreads", scenario("intranode.layout", tokens=40)),
              ("another thread of its block stores it", WAIT + "syncwarp or a wait is missing")),
    unwritten("between nodes: the board is read before it is reset",
              with_fault("internode.coordinator.begin_block: bar_red_and", scenario("internode", ranks=2, tokens=3)),
              ("another thread of its block stores it", WAIT + "barrier or a wait is missing"), seeds=range(2)),
    unwritten("inside a node: the ring's cells are not reset",
              with_fault("intranode.notify_dispatch: reset_ring_cells", scenario("intranode.notify", rounds=1)),
              (", but this load comes first: its reset is missing",), ("nothing makes",)),
    unwritten("inside a node: a peer's counts are read without a barrier",
              with_fault("intranode.notify_dispatch: meet_block", scenario("intranode.notify", rounds=1)),
              ("nothing makes this load wait for ", ("has not launched this kernel yet", ": a syncwarp or a wait is",
                                                      "rank 0 stores it", "rank 1 stores it"))),
    unwritten("inside a node: the tail says one too much",
              with_edit(publish_tail, "ring.tail, tail)", "ring.tail, tail + 1)",
                        partial(scenario("intranode.dispatch", slots=5), memory_model="checked")),
              ("the last signal that let this thread go on is `nvl_buffer`", "tail[channel 0",
               "it may announce too much")),
]  # fmt: skip


@pytest.mark.parametrize("broken", both_parts([(e,) for e in ENTRIES[:6]], thorough=[(e,) for e in ENTRIES[6:]]))
def test_the_report_says_which_order_is_missing(broken):
    check(broken)
