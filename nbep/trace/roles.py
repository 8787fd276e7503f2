"""What a thread of a kernel is there for. Where the kernel's code says it, that code is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from contextvars import copy_context
from types import FrameType, SimpleNamespace
from typing import Any

from nbep.device.kernels.intranode.direct_combine import DirectCombineSizes
from nbep.device.kernels.intranode.dispatch import DispatchSizes, join_team
from nbep.device.layout.intranode import RingShape
from nbep.emulator.machine.carrier import CURRENT


def _as_thread(launch: Any, block: int, thread: int, function: Callable, *args: Any) -> Any:
    """What a function of device code returns that asks for nothing but the numbers of its thread."""
    stand_in = SimpleNamespace(block_dim=launch.block, block_idx=block, thread_idx=thread)
    context = copy_context()
    context.run(CURRENT.set, stand_in)
    return context.run(function, *args)


def function_of(thread: Any, names: Container[str]) -> FrameType | None:
    """The outermost function with one of these names that a thread is in."""
    frame: FrameType | None = sys._getframe(1) if CURRENT.get() is thread else thread.gr_frame
    found = None
    while frame is not None:
        if frame.f_code.co_name in names:
            found = frame
        frame = frame.f_back
    return found


def role_of(launch: Any, block: int, thread: int) -> str:
    """The role of a thread of a running launch; the kernel's name where all threads do the same."""
    args = {type(arg): arg for arg in launch.args}
    if launch.name == "dispatch" and DispatchSizes in args:
        shape, sizes = args[RingShape], args[DispatchSizes]
        team = _as_thread(launch, block, thread, join_team, shape.num_ranks, sizes.mix_roles)
        if team.peer == launch.rank:
            return "copier"
        return "sender" if team.sends else "receiver"
    if launch.name == "combine":
        if block % 2 == 0:
            return "sender"
        return "coordinator" if thread < 32 else "receiver"
    if launch.name == "direct_dispatch":
        return "sender"
    if launch.name == "direct_combine" and DirectCombineSizes in args:
        return "sender" if thread // 32 < args[DirectCombineSizes].num_push_warps else "receiver"
    return launch.name
