"""nbep's own kernels, with one step left out or one access weaker."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
from cases import make_case
from entries import Broken
from intranode import Options, round_trip, run
from scenarios import scenario, with_edit
from target import spawn

import nbep
from nbep.check import broken
from nbep.check.catalogue import faults_of
from nbep.device.kernels.intranode.dispatch import send_tokens
from nbep.device.protocols import barrier, waits
from nbep.emulator import DataRace, Uninitialized
from nbep.notebook import edit

DISPATCH, COMBINE = (f"nbep.device.kernels.intranode.{name}" for name in ("dispatch", "combine"))
LAYOUT = "nbep.device.kernels.get_dispatch_layout"
BARRIER, WAITS, TEAMS, STAGING, TOTALS = (
    f"nbep.device.protocols.{name}" for name in ("barrier", "waits", "teams", "staging", "totals")
)
BLOCK_OF_TWO = nbep.Config(2, 4, 9, num_threads=128)
Change = Callable[[], AbstractContextManager]


def left_out(module: str, function: str, name: str, number: int = 0) -> Change:
    """Without the number-th call of a name in a function, or with a weaker one."""
    faults = faults_of(getattr(importlib.import_module(module), function))
    fault = next(fault for fault in faults if (fault.step, fault.number) == (name, number))
    return lambda: broken(fault)


def replaced(module: str, name: str, by: Callable) -> Change:
    @contextmanager
    def change() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module(module), name, by)
            yield

    return change


def changed(*changes: Change) -> Change:
    """Several at once."""

    @contextmanager
    def change() -> Iterator[None]:
        with ExitStack() as stack:
            for one in changes:
                stack.enter_context(one())
            yield

    return change


def round_trips(change: Change, config: nbep.Config = BLOCK_OF_TWO) -> Callable[[int], None]:
    """A round trip inside a node."""
    case = make_case(1, num_tokens=16, num_topk=2, routing="everywhere")

    def attempt(seed: int) -> None:
        with change():
            run(case, Options(config), fn=round_trip, seed=seed, memory_model="checked")

    return attempt


def layouts(change: Change) -> Callable[[int], None]:
    def layout(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
        buffer.get_dispatch_layout(np.zeros((300, 2), np.int64), num_experts=4)
        buffer.destroy()

    def attempt(seed: int) -> None:
        with change():
            spawn(layout, 2, (), seed, memory_model="checked")

    return attempt


# As DeepEP's barrier signals: a fence, and an atomic without an order.
FENCE_AND_ADD = "ptx.fence_acq_rel_sys()\n        ptx.atom_add_relaxed_sys_s32"
SIGNAL = "barrier_signal[rank "
RING = ("head[", "barrier_signal", "scope")
TWO_ENDS = ("both", "scope", "tail[")
SLOTS = nbep.Config(2, 2, 5)
TWICE = range(2), 2  # seeds, and how many of them find it
ENTRIES = [
    Broken("barrier: its signal is relaxed",
           round_trips(left_out(BARRIER, "meet_by_adding", "atom_add_release_sys_s32")), DataRace,
           ("the atomic on `nvl_buffer`", SIGNAL, "releases nothing"), ("rank_counts", *TWO_ENDS), *TWICE),
    Broken("barrier: its poll is relaxed",
           round_trips(left_out(WAITS, "wait_call", "ld_acquire_sys_s32")), DataRace,
           ("the load of `nvl_buffer`", SIGNAL, "acquires nothing"), ("rank_counts", *TWO_ENDS), *TWICE),
    Broken("barrier: a fence and a relaxed signal, a volatile poll",
           round_trips(changed(lambda: edit(barrier.meet_by_adding, "ptx.atom_add_release_sys_s32", FENCE_AND_ADD),
                               lambda: edit(waits.wait_call, "ptx.ld_acquire_sys_s32", "ptx.ld_volatile_s32"))),
           DataRace,
           ("the load of `nvl_buffer`", SIGNAL, "volatile.sys", "acquires nothing"),
           ("rank_counts", "releases nothing", "the atomic on", *TWO_ENDS), *TWICE),
    Broken("dispatch: relaxed tail", round_trips(left_out(TEAMS, "publish_tail", "st_release_sys_s32")), DataRace,
           ("the store to `nvl_buffer`", "tail[channel", "releases nothing"), ("load of", *RING), *TWICE),
    Broken("dispatch: relaxed poll of the tail", round_trips(left_out(WAITS, "wait_tail_past", "ld_acquire_sys_s32")),
           DataRace, ("the load of `nvl_buffer`", "tail[channel", "acquires nothing"), ("store to", *RING), *TWICE),
    Broken("dispatch: the copy engine is not told",
           round_trips(left_out(DISPATCH, "receive_tokens", "fence_proxy_async_global")), DataRace,
           ("the copy engine is not told", "tail[channel", "fence.proxy.async.global"), ("too weak", *RING), *TWICE),
    Broken("dispatch: the tail does not wait for bulk stores",
           round_trips(left_out(TEAMS, "publish_tail", "tma_store_wait_all")), DataRace,
           ("has not been waited for: a wait_group is missing before the store to", "tail[channel"),
           ("too weak", *RING), range(3), 2),
    Broken("dispatch: the tail does not wait for the team",
           round_trips(left_out(TEAMS, "publish_tail", "bar_red_and")), DataRace,
           ("no barrier or syncwarp orders", "before the store to `nvl_buffer`", "tail[channel"),
           ("too weak", *RING), also=(Uninitialized,)),
    Broken("dispatch: the ring overruns", round_trips(replaced(DISPATCH, "wait_free_slots", lambda *_: True), SLOTS),
           DataRace, ("channel", ("is overwritten, and nothing at all tells this thread that it has been read",
                                  "was overwritten before this load")),
           ("too weak", "scope", "wait_group"), range(6)),
    Broken("dispatch: the tail says one too much",
           with_edit(send_tokens,
                     "not publish_tail(ring, tail", "not publish_tail(ring, tail + (tail > shape.num_slots)",
                     partial(scenario("intranode.dispatch", slots=5, tokens=16, tma=0), memory_model="checked")),
           DataRace, ("tail[channel 0", ("tells of this store before it is made", "which was stored before")), RING),
    Broken("combine: the ring overruns", round_trips(replaced(COMBINE, "wait_free_slots", lambda *_: True), SLOTS),
           DataRace, ("channel", ("is overwritten, and nothing at all tells this thread that it has been read",
                                  "was overwritten before this load")),
           ("too weak", "scope", "wait_group"), range(6)),
    Broken("combine: relaxed tail", round_trips(left_out(COMBINE, "send_tokens", "st_release_sys_s32")), DataRace,
           ("the store to `nvl_buffer`", "tail[channel", "releases nothing"), ("load of", *RING), *TWICE),
    Broken("combine: relaxed poll of the tail", round_trips(left_out(COMBINE, "coordinate", "ld_acquire_sys_s32")),
           DataRace, ("the load of `nvl_buffer`", "tail[channel", "acquires nothing"), ("store to", *RING), *TWICE),
    Broken("combine: the shared tail is relaxed",
           round_trips(left_out(COMBINE, "coordinate", "atom_exch_release_cta_shared_s32")), DataRace,
           ("the atomic on `shared memory`: shared_tails[src ", "releases nothing"), ("nvl_buffer", "load of"), *TWICE),
    Broken("combine: the poll of the shared tail is relaxed",
           round_trips(left_out(WAITS, "wait_shared_tail_past", "ld_acquire_cta_shared_s32")), DataRace,
           ("the load of `shared memory`: shared_tails[src ", "acquires nothing"), ("nvl_buffer", "atomic"), *TWICE),
    Broken("combine: the tail does not wait for the team", round_trips(left_out(COMBINE, "send_tokens", "bar_red_and")),
           DataRace, (("orders the store before the store to `nvl_buffer`", "no barrier is between two stores of `nvl"),
                      ("tail[channel", "x[channel")), ("too weak", *RING), least=2),
    Broken("combine: the head does not wait for the warps",
           round_trips(left_out(COMBINE, "receive_tokens", "syncwarp", 1)),
           DataRace, ("no barrier or syncwarp orders the load before the store to `nvl_buffer`", "head[channel"),
           ("too weak", "tail["), range(3), least=2),
    Broken("stages: stored to while a copy reads them",
           round_trips(left_out(STAGING, "load_stage", "tma_store_wait_read_all")), DataRace,
           ("the bulk copy that reads `shared memory`", "wait_group.read is missing"), ("nvl_buffer", "too weak"),
           least=2),
    Broken("layout: arrivals are relaxed",
           layouts(left_out(LAYOUT, "get_dispatch_layout", "atom_add_acq_rel_gpu_s32")), DataRace,
           ("the atomics on `claim and layout workspace` of rank", ": layout arrivals (byte 64) are both too weak"),
           ("totals", "scope"), least=2),
]  # fmt: skip
