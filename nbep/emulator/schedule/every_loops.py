"""In which loop of its kernel's source a thread stands, for `every_thread`: what it has loaded there is a poll."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FrameType


def frames_above(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The frames of a thread from its kernel inwards, each with the instruction at which it is."""
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lasti))
        frame = frame.f_back
    return frames[::-1]


def is_in_loop(load: list[tuple[FrameType, int]], turn: list[tuple[FrameType, int]]) -> bool:
    """Whether a load lies in the loop of a turn: the innermost one of the innermost function that has one there."""
    for depth in reversed(range(len(turn))):
        frame, at = turn[depth]
        if loop := innermost(frame.f_code, at):
            if depth >= len(load) or load[depth][0] is not frame:
                return False
            return position_of(frame.f_code, load[depth][1]) in loop
    return False


def is_same_turn(before: list[tuple[FrameType, int]], turn: list[tuple[FrameType, int]]) -> bool:
    """Whether a thread stands where it stood before, and the innermost loop there has brought it back."""
    for depth in reversed(range(len(turn))):
        frame, at = turn[depth]
        if innermost(frame.f_code, at):
            if depth >= len(before) or before[depth][0] is not frame:
                return False
            return position_of(frame.f_code, before[depth][1]) == position_of(frame.f_code, at)
    return False


@cache
def positions(code: CodeType) -> list[tuple]:
    return list(code.co_positions())


def position_of(code: CodeType, at: int) -> tuple:
    """Where in its file an instruction comes from: a loop's condition is compiled twice."""
    return positions(code)[at // 2]


def is_nested(turn: list[tuple[FrameType, int]]) -> bool:
    """Whether the loop of a turn may have been entered before in the same frame: old loads look like its own."""
    for frame, at in reversed(turn):
        if loops := loops_around(frame.f_code, at):
            return len({begin for begin, _ in loops}) > 1
    return False


@cache
def loops_around(code: CodeType, at: int) -> list[tuple[int, int]]:
    """The loops that hold an instruction: the offsets of their first and last ones."""
    return [
        (instruction.argval, instruction.offset)
        for instruction in dis.get_instructions(code)
        if "JUMP" in instruction.opname
        and isinstance(instruction.argval, int)
        and instruction.argval <= at <= instruction.offset
    ]


@cache
def innermost(code: CodeType, at: int) -> frozenset[tuple]:
    """Where the instructions of the innermost loop come from that holds one of them; nothing if no loop does."""
    loops = loops_around(code, at)
    if not loops:
        return frozenset()
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    return frozenset(position_of(code, here) for here in range(begin, end + 2, 2))
