"""Which `while` loops of kernels never end: a turn that begins as the one before, and looks at what has not changed.

The compiler finds the variables that decide how a turn goes: those of tests, of indices and of calls, and what these
are made of. What is only stored does not count, so a loop that counts its turns is known again. A loop whose variables
are the same in two turns has its next turn noted: what it loads, stores and where it meets others. That turn comes
again as long as what it has loaded stays, and nobody else is there to change it if all others are in such a loop, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from nbep.emulator.machine.errors import EmulatorError
from nbep.emulator.machine.kinds import KINDS
from nbep.emulator.reports.expected import Seen
from nbep.emulator.schedule.strategies import Alone

from .code import build
from .env import Env, calls
from .types import Known

MOST_LOOKS = 1000  # of a turn that is noted


class Look(NamedTuple):
    """An access of a turn, or a meeting. verb: load, atomic, store or meet; cell: see `machine.access`"""

    verb: str
    cell: Any = None


# --- compiled ---------------------------------------------------------------------------------------------------------
def deciding(loop: ast.While) -> list[str]:
    """The variables that a loop changes and that decide how its turns go."""
    makes: dict[str, set[str]] = {}  # variable -> what it is made of
    decide = set(_names([loop.test]))
    for node in (one for statement in loop.body for one in ast.walk(statement)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (part for target in targets for part in ast.walk(target)):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    made = makes.setdefault(one.id, set())
                    made.update(_names([node.value]), [one.id] if isinstance(node, ast.AugAssign) else ())
        elif isinstance(node, ast.For):
            bound = _names([node.iter])
            decide.update(bound)
            for name in _names([node.target]):
                makes.setdefault(name, set()).update(bound)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            decide.update(_names([node.test]))
        elif isinstance(node, (ast.Call, ast.Return, ast.Raise, ast.BoolOp, ast.Subscript, ast.Attribute)):
            decide.update(_names([node]))
    while more := {name for one in decide & makes.keys() for name in makes[one]} - decide:
        decide |= more
    return sorted(decide & makes.keys())


SILENT = {"ld": "ld_silently", "atomic": "change"}


def silence(c: Any, code: ast.expr) -> None:
    """In a loop, note no loads of a value that is only stored: no turn depends on it, but for functions it calls."""
    waiting: list[ast.AST] = [code] if any(one.is_while for one in c.loops) else []
    while waiting:
        node = waiting.pop()
        if not calls(node, "run"):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Attribute):
            node.attr = SILENT.get(node.attr, node.attr)


def watched(c: Any, node: ast.While, head: Env) -> tuple[ast.stmt, ast.stmt]:
    """What stands before a loop, and at the beginning of each turn."""
    turns_of_loop = c.temporary()
    begin = c.named(turns_of_loop, build(f"{c.keep(turns)}(_t)"))
    state = [name for name in deciding(node) if name in head and not isinstance(head[name].t, Known)]
    turn = ast.Expr(build(f"{turns_of_loop}({', '.join(state)})"))
    unbound = build("UnboundLocalError")
    nothing = ast.ExceptHandler(unbound, None, [ast.Pass()])
    return begin, ast.Try([turn], [nothing], [], [])


def _names(nodes: Iterable[ast.AST | None]) -> list[str]:
    return [one.id for node in nodes if node is not None for one in ast.walk(node) if isinstance(one, ast.Name)]


# --- running ----------------------------------------------------------------------------------------------------------
def turns(thread: Any) -> Callable[..., None]:
    """What a loop that begins calls at each turn, with the variables that decide how it goes."""
    return _same_turns if isinstance(thread.world.strategy, Alone) else Turns(thread)


def _same_turns(*state: Any) -> None:
    """Where all schedules are run, loops that wait are found there."""


class Turns:
    """The turns of a loop. state: of the variables that decide, as its latest turn began; site: where that was"""

    __slots__ = ("site", "state", "thread")

    def __init__(self, thread: Any):
        self.thread = thread
        self.state: Any = None

    def __call__(self, *state: Any) -> None:
        thread = self.thread
        thread.left -= 1
        if thread.left < 0:
            thread.pause()
        try:
            is_same = state == self.state
        except EmulatorError:  # a value of which CUDA leaves open what it is
            is_same = False
        if not is_same:
            self.state = state
            if thread.looker is self:
                thread.forget_turn()
            return
        frame = sys._getframe(1)
        self.site = frame.f_code, frame.f_lasti
        thread.turn = thread.looks if thread.looker is self else None
        thread.looker, thread.looks = self, []


class LoopingThread:
    """A thread of a kernel whose loops are watched.

    looks: in the turn that is being noted, None if none is; looker: its loop; turn: the looks of its turn before
    is_silent: what it loads now is only stored; notes: what the values that it has loaded are compared with, if asked
    """

    if not TYPE_CHECKING:
        __slots__ = ()
    looks: list[Look] | None
    looker: Turns | None
    turn: list[Look] | None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.notes: Any = None
        self.is_silent = False
        self.forget_turn()

    def forget_turn(self) -> None:
        self.looker = self.looks = self.turn = None

    def note(self, verb: str, *cell: Any) -> Any:
        """An access in a turn that is noted. Returns: the value that it has loaded, as the kernel is to have it"""
        value = cell[3]
        if self.is_silent and verb != "store":
            return value
        assert self.looks is not None
        self.looks.append(Look(verb, cell))
        if len(self.looks) > MOST_LOOKS:
            self.forget_turn()
        return Seen.of(value, self.notes, cell[:2]) if self.notes is not None and type(value) is int else value

    def converge(self, *args: Any) -> Any:
        if self.looks is not None:
            self.looks.append(Look("meet"))
        return super().converge(*args)  # type: ignore[misc]

    def arrive(self, *args: Any, **given: Any) -> Any:
        if self.looks is not None:
            self.looks.append(Look("meet"))
        return super().arrive(*args, **given)  # type: ignore[misc]

    @property
    def cells(self) -> list[Any]:
        """What its loop looks at."""
        return list(dict.fromkeys(one.cell for one in self.turn or () if one.verb in ("load", "atomic")))

    def loops_in_vain(self) -> bool:
        """Whether the next turn of its loop goes as the one before, unless another thread changes what it looks at."""
        if self.turn is None or self.looks is None or self.looks != self.turn[: len(self.looks)]:
            return False
        return not self.changed(self.cells)  # type: ignore[attr-defined]


def is_endless(world: Any) -> bool:
    """Whether all threads that can run loop, and none of them changes what ends the loop of another one."""
    threads = [*world.runnable, *world.slow]
    if world.operations or not threads or not all(one.loops_in_vain() for one in threads):
        return False
    meeting = [one.block.launch for one in threads if Look("meet") in one.turn]  # at grid.sync() all of a launch
    for launch in dict.fromkeys(meeting):
        if not all(one.exited or one.loops_in_vain() for block in launch.blocks for one in block.threads):
            return False
    looked_at = [cell for one in threads for cell in one.cells]
    looked_at += [cell for one in world.polling for cell in one.waits_for]
    stored = [look.cell for one in threads for look in one.turn if look.verb == "store"]
    return not _bytes(looked_at) & _bytes(stored) and not world._look_again()


def _bytes(cells: list[Any]) -> set[Any]:
    return {(cell[0], cell[1] + i) for cell in cells for i in range(KINDS[cell[2]].size)}
