"""nbep's own kernels, with one step left out or one access weaker."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
from cases import make_case
from entries import OVERWRITTEN, SLOT, Race
from intranode import Options, round_trip, run
from scenarios import scenario, with_edit
from target import spawn

import nbep
from nbep.device.kernels.intranode.dispatch import send_tokens
from nbep.device.protocols import barrier
from nbep.emulator import Uninitialized
from nbep.lab.check import broken
from nbep.lab.check.catalogue import faults_of
from nbep.lab.notebook import edit

DISPATCH, COMBINE = (f"nbep.device.kernels.intranode.{name}" for name in ("dispatch", "combine"))
LAYOUT = "nbep.device.kernels.get_dispatch_layout"
BARRIER, TEAMS, STAGING = (f"nbep.device.protocols.{name}" for name in ("barrier", "teams", "staging"))
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
SLOTS = nbep.Config(2, 2, 5)
TWICE = range(2), 2  # seeds, and how many of them find it
ENTRIES = [
    Race("barrier: its signal is relaxed",
         round_trips(left_out(BARRIER, "meet_by_adding", "atom_add_release_sys_s32")), "store too weak",
         (": barrier_signal[",), *TWICE),
    Race("barrier: its poll is relaxed", round_trips(left_out(BARRIER, "wait_call", "ld_acquire_sys_s32")),
         "load too weak", (": barrier_signal[",), *TWICE),
    Race("barrier: a fence and a relaxed signal, a volatile poll",
         round_trips(changed(lambda: edit(barrier.meet_by_adding, "ptx.atom_add_release_sys_s32", FENCE_AND_ADD),
                             lambda: edit(barrier.wait_call, "ptx.ld_acquire_sys_s32", "ptx.ld_volatile_s32"))),
         "load too weak", (": barrier_signal[",), *TWICE),
    Race("dispatch: relaxed tail", round_trips(left_out(TEAMS, "publish_tail", "st_release_sys_s32")),
         "store too weak", (": tail[",), *TWICE),
    Race("dispatch: relaxed poll of the tail", round_trips(left_out(TEAMS, "wait_tail_past", "ld_acquire_sys_s32")),
         "load too weak", (": tail[",), *TWICE),
    Race("dispatch: the copy engine is not told",
         round_trips(left_out(DISPATCH, "receive_tokens", "fence_proxy_async_global")), "no proxy fence",
         (SLOT, ": tail["), *TWICE),
    Race("dispatch: the tail does not wait for bulk stores",
         round_trips(left_out(TEAMS, "publish_tail", "tma_store_wait_all")), "copy writes",
         (": tail[", SLOT), range(3), 2),
    Race("dispatch: the tail does not wait for the team", round_trips(left_out(TEAMS, "publish_tail", "bar_red_and")),
         "another warp signals", (": tail[",), also=(Uninitialized,)),
    Race("dispatch: the ring overruns", round_trips(replaced(DISPATCH, "wait_free_slots", lambda *_: True), SLOTS),
         OVERWRITTEN, (SLOT,),
         range(6)),
    Race("dispatch: the tail says one too much",
         with_edit(send_tokens, "not publish_tail(ring, tail", "not publish_tail(ring, tail + (tail > shape.num_slots)",
                   partial(scenario("intranode.dispatch", slots=5, tokens=16, tma=0), memory_model="checked")),
         ("promised", "old signal"), (": tail[", SLOT)),
    Race("combine: the ring overruns", round_trips(replaced(COMBINE, "wait_free_slots", lambda *_: True), SLOTS),
         OVERWRITTEN, (SLOT,), range(6)),
    Race("combine: relaxed tail", round_trips(left_out(COMBINE, "send_tokens", "st_release_sys_s32")),
         "store too weak", (": tail[",), *TWICE),
    Race("combine: relaxed poll of the tail", round_trips(left_out(COMBINE, "coordinate", "ld_acquire_sys_s32")),
         "load too weak", (": tail[",), *TWICE),
    Race("combine: the shared tail is relaxed",
         round_trips(left_out(COMBINE, "coordinate", "atom_exch_release_cta_shared_s32")), "store too weak",
         (": shared_tails[",), *TWICE),
    Race("combine: the poll of the shared tail is relaxed",
         round_trips(left_out(COMBINE, "wait_shared_tail_past", "ld_acquire_cta_shared_s32")), "load too weak",
         (": shared_tails[",), *TWICE),
    Race("combine: the tail does not wait for the team", round_trips(left_out(COMBINE, "send_tokens", "bar_red_and")),
         ("no barrier", "another warp signals", "another lane signals"), ((": tail[", *SLOT),), least=2),
    Race("combine: the head does not wait for the warps",
         round_trips(left_out(COMBINE, "receive_tokens", "syncwarp", 1)), "another warp signals", (": head[",),
         range(3), least=2),
    Race("stages: stored to while a copy reads them",
         round_trips(left_out(STAGING, "load_stage", "tma_store_wait_read_all")), "copy reads", (": stage[",), least=2),
    Race("layout: arrivals are relaxed", layouts(left_out(LAYOUT, "get_dispatch_layout", "atom_add_acq_rel_gpu_s32")),
         "both too weak", (": layout arrivals",), least=2),
]  # fmt: skip
