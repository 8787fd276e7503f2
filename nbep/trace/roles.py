"""What a thread of a kernel is there for. Where the kernel's code says it, that code is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from types import FrameType
from typing import Any

from greenlet import getcurrent, greenlet

from nbep.device.kernels.intranode.direct_combine import DirectCombineSizes
from nbep.device.kernels.intranode.dispatch import DispatchSizes, join_team
from nbep.device.layout.intranode import RingShape


class _StandIn(greenlet):
    """Whom device code takes for a thread of the launch, as long as it only asks for its numbers."""

    def __init__(self, launch: Any, block: int, thread: int, function: Callable):
        greenlet.__init__(self, function, getcurrent())
        self.block_dim = launch.block
        self.block_idx = block
        self.thread_idx = thread


def function_of(thread: Any, names: Container[str]) -> FrameType | None:
    """The outermost function with one of these names that a thread is in."""
    frame: FrameType | None = sys._getframe(1) if getcurrent() is thread else thread.gr_frame
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
        team = _StandIn(launch, block, thread, join_team).switch(
            args[RingShape].num_ranks, args[DispatchSizes].mix_roles
        )
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
