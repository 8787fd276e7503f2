"""Faults by name: each step of a kernel that keeps order can be left out, or made too weak, while the program runs.

    with broken("intranode.combine.send_tokens: release of combine-tail"):
        nbep.spawn(main, 2, "emulator", memory_model="checked")     # DataRace

A name is a place, which is a function of device code, and a step in it. `faults_of` finds the steps in the source, so
that none is written down twice. A function is changed for all who call it, and is as before when the block ends.

 kind        a step                                                    what comes in its place
 release     a store or an atomic that publishes                       the same, relaxed
 acquire     a load or an atomic that observes                         the same, relaxed
 scope       an access for other GPUs and the CPU, or other blocks     the next smaller scope
 fence       a fence, also one of the copy engine                      nothing
 barrier     threads, blocks or ranks that meet                        nothing; of a vote, the own opinion
 copies      a wait for the copy engine                                nothing, or a wait until it has read its source
 network     a wait for messages, or an order behind them              nothing, or no such order
 wait        a call of a function wait_...                             nothing, or one look that takes what it sees
 head        a wait for room, or what a reader says that it has read   no wait, or one slot more
 reset       cells that become empty                                   nothing: they stay as they are
 ring size   a number of slots                                         one slot more
 extent      the last of several slots for which a wait is             the one before
 turn        two places that rounds take in turn                       always the first
 coherent    the coherent loads of a function, ld_na                   ld_nc, for what is not written meanwhile

The emulator alone runs such kernels: a GPU's are compiled before.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from nbep.device import primitives
from nbep.device.alignment import matrix_cell
from nbep.device.jit import PRIMITIVES, variant_of
from nbep.emulator.machine.source import marks, wait_loops

Edit = Callable[[ast.FunctionDef], None]

# What comes in the place of a step.
NOTHING = "nothing"
OPINION = "its last argument"
TRUE = "True"
FALSE = "False"
ONCE = "one look, which takes what it sees"
ENDLESS = "a number that no ring reaches"
UNORDERED = "its last argument is False"
ONE_MORE = "one more"
ONE_LESS = "one less"
FIRST = "always the first"
CONSTANT = "ld_nc instead, which is for what is not written meanwhile"
UNTIL_READ = "tma_store_wait_read_all"  # in place of tma_store_wait_all
VALUES = {TRUE: True, FALSE: False, FIRST: 0, ENDLESS: 1 << 30}
WORDS = (NOTHING, OPINION, TRUE, FALSE, ONCE, ENDLESS, UNORDERED, ONE_MORE, ONE_LESS, FIRST, CONSTANT)


@dataclass(frozen=True)
class Fault:
    """One step of one function, and what comes in its place.

    Attributes:
        name: the place and the step, as `broken` takes it
        kind: see the table above
        step: the name of what is called there, or num_slots, or turns
        number: which of the steps of that name in the function it is, counted from 0
        instead: one of the constants above, or an order or a scope
    """

    name: str
    kind: str
    function: FunctionType = field(repr=False)
    step: str
    number: int
    instead: str

    def __str__(self) -> str:
        return self.name

    @property
    def change(self) -> str:
        """What is done, in a few words."""
        if self.instead in WORDS:
            return f"{self.step}: {self.instead}"
        return f"{self.step}: {self.instead} instead"

    def marks(self) -> dict[tuple[str, int], str]:
        """What reports say at the lines that it changes: the instruction there is not the one that runs."""
        if self.instead == CONSTANT:
            return {}
        node = steps_of(function_tree(self.function))[self.step][self.number]
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        return {(self.function.__code__.co_filename, line): self.change for line in lines}

    def apply(self, tree: ast.FunctionDef, steps: dict[str, list[ast.expr]]) -> None:
        """Change a function's tree; `steps` are those of the unchanged one."""
        if self.instead == CONSTANT:
            for name in coherent_loads_of(tree):
                name.id = weakened_name(name.id, name.id.replace("ld_na_", "ld_nc_"))
            return
        node = steps[self.step][self.number]
        if self.instead == NOTHING:
            _Replace(node, None).visit(tree)
        elif self.instead == OPINION:
            _Replace(node, node.args[-1]).visit(tree)  # type: ignore[attr-defined]
        elif self.instead in VALUES:
            _Replace(node, ast.Constant(VALUES[self.instead])).visit(tree)
        elif self.instead == ONE_LESS:
            node.args[-1] = ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1))  # type: ignore[attr-defined]
        elif self.instead == ONCE:
            node.func.id = weakened_name(self.step, "once")  # type: ignore[attr-defined]
        elif self.instead == UNORDERED:
            node.args[-1] = ast.copy_location(ast.Constant(False), node)  # type: ignore[attr-defined]
        elif self.instead == ONE_MORE and isinstance(node, ast.Call):
            node.args[1] = _plus_one(node.args[1])
        elif self.instead == ONE_MORE:
            _Replace(node, _plus_one(node)).visit(tree)
        else:
            node.func.id = weakened_name(self.step, self.instead)  # type: ignore[attr-defined]


def steps_of(tree: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """The steps of a function, by the names that faults give them."""
    return {**calls_of(tree), "num_slots": ring_sizes_of(tree), "turns": turns_of(tree)}


def _plus_one(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


class _Replace(ast.NodeTransformer):
    """Puts an expression in place of another one, or nothing in place of the statement that is the call."""

    def __init__(self, old: ast.expr, new: ast.expr | None):
        self.old = old
        self.new = None if new is None else ast.copy_location(new, old)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if self.new is None and node.value is self.old:
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        if node is self.old and self.new is not None:
            return self.new
        return super().visit(node)


_active: dict[FunctionType, list[Fault | Edit]] = {}  # what is changed now
_plain: dict[FunctionType, CodeType] = {}  # and what it was before


@contextmanager
def broken(*faults: str | Fault) -> Iterator[None]:
    """Run with faults, which are given by name or as `faults_of` lists them.

    Raises:
        LookupError: if nbep's kernels have no fault of that name; it names some that are alike
    """
    from nbep.lab.check.catalogue import fault_of

    with ExitStack() as stack:
        for fault in faults:
            fault = fault_of(fault) if isinstance(fault, str) else fault
            stack.enter_context(_changed(fault.function, fault))
        yield


def edited(function: FunctionType, edit: Edit) -> Any:
    """Run with a function whose tree is changed by `edit`: for faults that are no single step."""
    return _changed(function, edit)


@contextmanager
def _changed(function: FunctionType, change: Fault | Edit) -> Iterator[None]:
    _active.setdefault(function, []).append(change)
    marked: dict[tuple[str, int], str] = {}
    try:
        _plain.setdefault(function, function.__code__)
        _recompile(function)
        if isinstance(change, Fault):
            marked = change.marks()
            marks.update(marked)
        yield
    finally:
        for place in marked:
            marks.pop(place, None)
        _active[function].remove(change)
        _recompile(function)


def _recompile(function: FunctionType) -> None:
    """Let a function do what its source and all that is changed in it say."""
    changes = _active[function]
    if changes:
        tree = function_tree(function)
        steps = steps_of(tree)
        for change in changes:
            if isinstance(change, Fault):
                change.apply(tree, steps)
            else:
                change(tree)
        _provide(tree, function.__globals__)
        function.__code__ = _code_of(tree, function)
    else:
        function.__code__ = _plain.pop(function)
        del _active[function]
    if hasattr(function, "kernel_spec"):
        variant_of.cache_clear()  # its variants are copies of it


def _provide(tree: ast.FunctionDef, names: dict[str, Any]) -> None:
    """Make what a changed tree calls and its module does not have: primitives, weakened ones, waits that look once."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id in names:
            continue
        if hasattr(primitives, node.id):
            names[node.id] = getattr(primitives, node.id)
        elif "__" in node.id:
            name, _, weaker = node.id.partition("__")
            if weaker == "once":
                names[node.id] = looking_once(names[name])
            elif hasattr(primitives, name):
                names[node.id] = weakened(name, weaker)


def looking_once(function: FunctionType) -> FunctionType:
    """A wait that takes what it sees at its first look, as do the waits that it calls."""
    tree = function_tree(function)
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            found = [test for test in node.body if isinstance(test, ast.If)]
            (found[0] if found else node).test = ast.Constant(bool(found))
            for said in (
                one for one in node.body if isinstance(one, ast.Assign) and ast.unparse(one.value).startswith("holds(")
            ):
                said.value = ast.Constant(True)  # the loop of all waits returns it
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and is_wait(node.func.id):
            node.func.id = weakened_name(node.func.id, "once")
    _provide(tree, function.__globals__)
    return FunctionType(_code_of(tree, function), function.__globals__, function.__name__, function.__defaults__)


def _code_of(tree: ast.FunctionDef, function: FunctionType) -> CodeType:
    """The code of a changed tree; its lines are those of the function's source."""
    tree.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([tree], []))
    codes = compile(module, function.__code__.co_filename, "exec", dont_inherit=True).co_consts
    return next(code for code in codes if isinstance(code, CodeType) and code.co_name == function.__name__)


def weakened_name(primitive: str, weaker: str) -> str:
    """How a weakened primitive is called in a changed function."""
    return f"{primitive}__{weaker}"


def weakened(primitive: str, weaker: str) -> FunctionType:
    """A primitive with a weaker order or a smaller scope; another one if `weaker` is its name."""
    if hasattr(primitives, weaker):
        return getattr(primitives, weaker)
    plain = getattr(primitives, primitive)
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    words = ORDERS if weaker in ORDERS else SCOPES
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in words]
    assert len(said) == 1, primitive
    said[0].value = weaker
    ast.increment_lineno(tree, plain.__code__.co_firstlineno - 1)
    code = _code_of(tree, plain)
    return FunctionType(code, plain.__globals__, weakened_name(primitive, weaker), plain.__defaults__)


ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile")
SCOPES = ("cta", "gpu", "sys")


# The steps of a function of device code: what is called there, in the order of its lines; numbers of slots


POLLS = ("ld_acquire_", "ld_relaxed_", "ld_volatile_")  # what a wait polls with


def is_loop(step: str) -> bool:
    """Whether waits call this function to wait: what is left out is the wait, but for those that kernels call."""
    return step in wait_loops and step not in ("give_up", "wait_at_least")


def function_tree(function: FunctionType) -> ast.FunctionDef:
    """The tree of a function's source, with the line numbers of its file; nested functions have none of their own.

    `ptx.name` is `name` in it: a step has one name, however its file imports primitives.

    Raises: OSError if the source cannot be found
    """
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise OSError(f"{function.__name__} is not written with def")
    return _WithoutNamespace().visit(found)


class _WithoutNamespace(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "ptx":
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return self.generic_visit(node)


def calls_of(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """All calls of names in a tree, by the name; and where a load is named that a wait is to poll with."""
    found: dict[str, list[ast.expr]] = {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {id(call.func) for call in calls}
    cells = {id(call.args[0]): call.args[1:2] for call in calls if call.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.setdefault(node.func.id, []).append(node)
        elif isinstance(node, ast.Name) and id(node) not in called and node.id.startswith(POLLS):
            found.setdefault(node.id, []).append(ast.copy_location(ast.Call(node, cells.get(id(node), []), []), node))
    return {name: sorted(nodes, key=position) for name, nodes in found.items()}


def ring_sizes_of(tree: ast.AST) -> list[ast.expr]:
    """Where a tree reads the number of slots of a ring, but for what it only reports."""
    reported = {id(inner) for call in calls_of(tree).get("report_fault", []) for inner in ast.walk(call)}
    found = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "num_slots") and id(node) not in reported
    ]
    return sorted(found, key=position)


def turns_of(tree: ast.AST) -> list[ast.expr]:
    """Where a tree says which of two places a round takes: `round_ % 2`."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and ast.unparse(node) == "round_ % 2"]
    return sorted(found, key=position)


def is_wait(name: str) -> bool:
    """Whether a function of this name waits for something: but for `wait_expired`, it is written with primitives."""
    return name.startswith("wait_") and name not in PRIMITIVES


def is_zero(node: ast.expr) -> bool:
    """Whether a store of this makes a cell empty."""
    return ast.unparse(node) in ("0", "(0, 0, 0, 0)")


def coherent_loads_of(tree: ast.AST) -> list[ast.Name]:
    """Where a tree names a load that bypasses L1 and is coherent all the same: it calls it, or passes it on."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("ld_na_")]


def position(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def cell_of(call: ast.Call, lines: list[str], first: int) -> str:
    """What a call's address is called: the tag of its pair, or the constant or the name in it."""
    for number in range(call.lineno, (call.end_lineno or call.lineno) + 1):
        _, is_tagged, tag = lines[number - first].partition("# PAIR ")
        if is_tagged:
            return tag.split(":")[0].split()[0]
    if not call.args:
        return ""
    terms = _terms(call.args[0])
    constants = [term for term in terms if _is_constant(term)]
    address: ast.AST = constants[-1] if constants else terms[0]
    if isinstance(address, ast.Call) and ast.unparse(address.func).startswith("ld_"):  # a table says where it is
        address = next((name for name in ast.walk(address.args[0]) if _is_constant(name)), address)
    if isinstance(address, ast.Call):
        address = address.func
    return address.attr if isinstance(address, ast.Attribute) else ast.unparse(address)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id.isupper()


def _terms(node: ast.expr) -> list[ast.expr]:
    """What is added up; of an entry of a matrix, where the matrix begins."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == matrix_cell.__name__:
        return _terms(node.args[0])
    return [node]
