"""What kernels do besides computing: who a thread is, meetings, shuffles, votes, memory of the block."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from nbep.emulator.machine import errors
from nbep.emulator.machine.faults import error_at
from nbep.emulator.machine.source import Site, is_same_call, site_of
from nbep.emulator.machine.thread import Thread
from nbep.emulator.machine.warp import match_result, shfl_source, vote_result

from . import arrays
from .reports import UNDEFINED, different_barriers
from .types import BF16

MAX_LOOKS = 1000  # of a lane that asks who is with it


class BlockState:
    """What the threads of a block have together.

    shared: its arrays, by the place of their call; dynamic: bytes of the dynamic part that these take; votes: by phase;
    sites: by phase and warp
    """

    __slots__ = ("dynamic", "shared", "sites", "votes")

    def __init__(self) -> None:
        self.shared: dict[Any, arrays.KArray] = {}
        self.dynamic = 0
        self.votes: dict[int, list[bool]] = {}
        self.sites: dict[tuple[int, int], Any] = {}


class Who:
    """Who a thread is: t* in its block, b* of its block, d* the block's and g* the grid's size, x, y, z in the grid."""

    __slots__ = ("block", "bx", "by", "bz", "dx", "dy", "dz", "gx", "gy", "gz", "phase", "run", "tx", "ty", "tz",
                 "x", "y", "z")  # fmt: skip

    def __init__(self, thread: Thread, run: Any):
        self.run = run
        self.dx, self.dy, self.dz = run.block
        self.gx, self.gy, self.gz = run.grid
        rest, self.tx = divmod(thread.thread_idx, self.dx)
        self.tz, self.ty = divmod(rest, self.dy)
        rest, self.bx = divmod(thread.block_idx, self.gx)
        self.bz, self.by = divmod(rest, self.gy)
        self.x = self.bx * self.dx + self.tx
        self.y = self.by * self.dy + self.ty
        self.z = self.bz * self.dz + self.tz
        self.phase = 0
        self.block = run.state_of(thread.block)


# --- memory -----------------------------------------------------------------------------------------------------------
def shared_array(t: Thread, w: Who, site: Any, sizes: tuple[int, ...] = ()) -> arrays.KArray:
    """The array of the block that belongs to a call of cuda.shared.array; site: see `SharedSite`"""
    found = w.block.shared.get((site, sizes))
    if found is None:
        found = w.block.shared[site, sizes] = w.run.shared_array(t, site, w.block, sizes)
    return found


# --- meetings ---------------------------------------------------------------------------------------------------------
def syncthreads(t: Thread, w: Who) -> None:
    frame = sys._getframe(1)
    _meet(t, w, (frame.f_code, frame.f_lasti))


def _meet(t: Thread, w: Who, site: Site) -> Any:
    """Come to the barrier of the block. The lanes of a warp must come to the same call, or have left."""
    w.phase += 1
    key = w.phase, t.warp
    first = w.block.sites.get(key)
    if first is None:
        w.block.sites[key] = site, w.tx, w.ty, w.tz
        w.block.sites.pop((w.phase - 2, t.warp), None)
    elif first[0] != site and not is_same_call(first[0], site):
        raise different_barriers(t, first[1:], site, first[0])
    return t.meet(0, t.block_dim, True)


def _votes(count: Callable[[list[bool]], int]) -> Callable[[Thread, Who, Any], int]:
    """A barrier that counts the predicates of all threads that meet."""

    def vote_of_block(t: Thread, w: Who, predicate: Any) -> int:
        votes = w.block.votes.setdefault(w.phase, [])
        votes.append(bool(predicate))
        w.block.votes.pop(w.phase - 2, None)
        frame = sys._getframe(1)
        _meet(t, w, (frame.f_code, frame.f_lasti))
        return count(votes)

    return vote_of_block


syncthreads_count = _votes(sum)
syncthreads_and = _votes(lambda votes: int(all(votes)))
syncthreads_or = _votes(lambda votes: int(any(votes)))


def grid_sync(t: Thread, w: Who) -> int:
    """As cooperative groups do it: the block meets, one of its threads meets those of the others, the block meets."""
    run = w.run
    if run.grid_cell is None:
        raise error_at(t, errors.EmulatorError, "grid.sync(): the launch is not cooperative")
    frame = sys._getframe(1)
    site = frame.f_code, frame.f_lasti
    barrier = _meet(t, w, site)
    if barrier.arrived[0] == t.thread_idx:
        cell = run.grid_cell.address
        t.fence("acq_rel", "gpu")
        turn = t.atomic("add", cell, "s32", 1, "acq_rel", "gpu") // t.grid_dim + 1
        while t.load(cell, "s32", "acquire", "gpu") < turn * t.grid_dim:
            t.spin(1 << 62)
        t.fence("acq_rel", "gpu")
    _meet(t, w, site)
    return 0


def _real(t: Thread, mask: int) -> int:
    """A mask without the lanes that the block does not have, for which no thread waits."""
    return mask & 0xFFFFFFFF & (1 << len(t.warp_state.lanes)) - 1


def syncwarp(t: Thread, w: Who, mask: int = 0xFFFFFFFF) -> None:
    t.collect("syncwarp", _real(t, mask), None, site_of(sys._getframe(1)))


def shuffle(t: Thread, w: Who, mode: str, mask: int, value: Any, lane: int) -> Any:
    """What another lane passes; mode: idx, up, down, xor."""
    mask = _real(t, mask)
    values = t.collect(f"shfl.{mode}", mask, value, site_of(sys._getframe(1))).values
    source = shfl_source(mode, t.lane, lane)
    if source in values:
        return values[source]
    lanes = t.warp_state.lanes
    if source < len(lanes) and not lanes[source].exited and not mask >> source & 1:
        message = f"a shuffle by lane {t.lane} reads lane {source}, which the mask {mask:#010x} does not name"
        raise error_at(t, errors.Divergence, message)
    return UNDEFINED


def vote(t: Thread, w: Who, mode: str, mask: int, predicate: Any) -> Any:
    """Mode any, all: a bool; ballot: the mask of the lanes whose predicate holds; eq: whether all say the same."""
    collective = t.collect(f"vote.{mode}", _real(t, mask), bool(predicate), site_of(sys._getframe(1)))
    if mode == "eq":
        return len(set(collective.values.values())) == 1
    if collective.result is None:
        collective.result = vote_result(mode, collective.values)
    return collective.result


def match_any(t: Thread, w: Who, mask: int, value: Any) -> int:
    collective = t.collect("match_any", _real(t, mask), value, site_of(sys._getframe(1)))
    if collective.result is None:
        collective.result = match_result(collective.values)
    return collective.result[value]


def match_all(t: Thread, w: Who, mask: int, value: Any) -> tuple[int, bool]:
    collective = t.collect("match_all", _real(t, mask), value, site_of(sys._getframe(1)))
    same = len(set(collective.values.values())) == 1
    return (sum(1 << lane for lane in collective.values), True) if same else (0, False)


def activemask(t: Thread, w: Who) -> int:
    """The lanes that are here together. Which ones is left open by CUDA: all that come before they have to wait."""
    here = w.run.together.setdefault((t.warp_state, site_of(sys._getframe(1))), {})
    group = here.setdefault("open", set())
    group.add(t.lane)
    for _ in range(MAX_LOOKS):
        away = [one for one in t.warp_state.lanes if one.lane not in group and not one.exited and one.waits_for is None]
        if not away or here.get("open") is not group:
            break
        t.pause()
    if here.get("open") is group:
        del here["open"]
    return sum(1 << lane for lane in group)


def _fence(scope: str) -> Callable[[Thread, Who], None]:
    return lambda t, w: t.fence("acq_rel", scope)


threadfence, threadfence_block, threadfence_system = map(_fence, ("gpu", "cta", "sys"))


def nanosleep(t: Thread, w: Who, duration: int) -> None:
    t.pause()


def cbrt(value: float) -> float:
    return float(np.cbrt(value))


def print_line(t: Thread, w: Who, *values: Any) -> None:
    print(*[_shown(value) for value in values])


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return f"({', '.join(str(_shown(one)) for one in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, (np.float32, np.float16, BF16.dtype.type)):
        return f"{float(value):f}"
    return f"{value:f}" if isinstance(value, float) and math.isfinite(value) else value
