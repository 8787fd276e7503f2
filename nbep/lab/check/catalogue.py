"""Which faults there are: found in the source of nbep's kernels, or of a user's."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any, cast

from nbep.device.jit import KERNELS, PRIMITIVES
from nbep.device.library import libraries, own_modules
from nbep.lab.check.faults import (
    CONSTANT,
    FIRST,
    NOTHING,
    ONCE,
    ONE_LESS,
    ONE_MORE,
    OPINION,
    ORDERS,
    SCOPES,
    TRUE,
    UNORDERED,
    UNTIL_READ,
    Fault,
    calls_of,
    cell_of,
    coherent_loads_of,
    function_tree,
    is_loop,
    is_wait,
    is_zero,
    position,
    ring_sizes_of,
    turns_of,
)
from nbep.registry import registered

DEVICE = "nbep.device."


class UnknownName(LookupError):
    """A kernel or a fault that no library has."""


# Steps that say by their name alone what they are: their kind, and what comes in their place. Others are registered.
BY_NAME = {
    **dict.fromkeys(("syncthreads", "bar_sync", "syncwarp", "team_barrier"), ("barrier", NOTHING)),
    **dict.fromkeys(("barrier_block", "barrier_grid"), ("barrier", NOTHING)),
    "bar_red_and": ("barrier", OPINION),
    **dict.fromkeys(("fence_acq_rel_cta", "fence_acq_rel_gpu", "fence_acq_rel_sys"), ("fence", NOTHING)),
    **dict.fromkeys(("fence_mbarrier_init", "fence_proxy_async_shared"), ("fence", NOTHING)),
    "fence_proxy_async_global": ("fence", NOTHING),
    "tma_store_wait_all": ("copies", NOTHING),
    **{f"tma_store_wait_read_{what}": ("copies", NOTHING) for what in ("all", "1", "3", "7")},
    "mbarrier_try_wait_parity": ("copies", TRUE),
    "quiet": ("network", NOTHING),
    "amo_add": ("network", UNORDERED),
    "wait_free_slots": ("head", TRUE),
    **dict.fromkeys(("wait_done", "wait_room", "wait_turn"), ("wait", TRUE)),  # whether all went well
}
RESETS = ("reset_", "clear_", "empty_")
EXTENTS = ("wait_room",)  # their last argument is the last slot of all that the wait is for
HALVES = {"release": "release", "acquire": "acquire", "acq_rel": "acquire and release"}
SMALLER = {"sys": "gpu", "gpu": "cta"}


def faults_of(*wholes: Any) -> list[Fault]:
    """All faults of a kernel, of a function that kernels call, or of a module.

    A kernel's are those of all functions that it calls, of nbep or of its own module.
    """
    functions: dict[FunctionType, None] = {}
    for whole in wholes:
        if isinstance(whole, ModuleType):
            own = [value for value in vars(whole).values() if isinstance(value, FunctionType)]
            own = [function for function in own if function.__module__ == whole.__name__]
            found: Iterable[FunctionType] = [function for function in own if not hasattr(function, "versions")]
        else:
            found = reached_from(whole) if hasattr(whole, "kernel_spec") else [whole]
        functions |= dict.fromkeys(found)
    return [fault for function in functions for fault in faults_of_function(function)]


@cache
def reached_from(kernel: FunctionType) -> tuple[FunctionType, ...]:
    """The device functions that a kernel calls, and itself; of a function with versions for networks, all of them."""
    own = kernel.__module__
    reached: dict[FunctionType, None] = {kernel: None}
    waiting = [kernel]
    while waiting:
        for function in _called_by(waiting.pop()):
            if function not in reached and (function.__module__ == own or function.__module__.startswith(DEVICE)):
                reached[function] = None
                waiting.append(function)
    return tuple(reached)


def _called_by(function: FunctionType) -> Iterator[FunctionType]:
    for name in function.__code__.co_names:
        value: Any = function.__globals__.get(name)
        if hasattr(value, "versions"):
            yield from value.versions.values()
        elif isinstance(value, FunctionType) and name not in PRIMITIVES and value.__name__ == name:
            yield value


@cache
def faults_of_function(function: FunctionType) -> tuple[Fault, ...]:
    """The faults of one function, in the order of its lines."""
    try:
        tree = function_tree(function)
    except (OSError, SyntaxError):
        return ()  # made by a program
    if function.__closure__ or function.__module__.startswith(f"{DEVICE}layout."):
        return ()  # one cannot be compiled without the function around it, the others only say where cells are
    lines, first = inspect.getsourcelines(function)
    place = _place(function)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[tuple[tuple[int, int], str, str, str, int, str]] = []
    for step, calls in calls_of(tree).items():
        for number, call in enumerate(calls):
            assert isinstance(call, ast.Call)
            for kind, what, instead in _ways(step, call, id(call) in statements, partial(cell_of, call, lines, first)):
                found.append(((call.lineno, call.col_offset), what, kind, step, number, instead))
    for number, node in enumerate(ring_sizes_of(tree)):
        where = (node.lineno, node.col_offset)
        found.append((where, f"ring size in {_use_of(tree, node)}", "ring size", "num_slots", number, ONE_MORE))
    for number, node in enumerate(turns_of(tree)):
        found.append(((node.lineno, node.col_offset), "place of a round", "turn", "turns", number, FIRST))
    loads = coherent_loads_of(tree)
    if loads:
        where = min(map(position, loads))
        found.append((where, "coherent loads", "coherent", "ld_na", 0, CONSTANT))
    faults, seen = [], {}  # type: ignore[var-annotated]
    for _, what, kind, step, number, instead in sorted(found):
        seen[what] = seen.get(what, 0) + 1
        name = f"{place}: {what}" + (f" {seen[what]}" if seen[what] > 1 else "")
        faults.append(Fault(name, kind, function, step, number, instead))
    return tuple(faults)


def _use_of(tree: ast.FunctionDef, node: ast.expr) -> str:
    """What a number of slots is for: the function that it is passed to, or what is written there."""
    around: list[ast.AST] = [n for n in ast.walk(tree) if any(child is node for child in ast.iter_child_nodes(n))]
    for parent in around:
        if isinstance(parent, ast.Call):
            return ast.unparse(parent.func)
        if isinstance(parent, ast.Compare):
            return "a comparison"
    return "the sums" if isinstance(around[0], ast.BinOp) else "the slots"


def _place(function: FunctionType) -> str:
    module = _module(function)
    if not function.__module__.startswith(DEVICE):
        return function.__name__
    return module if module.rpartition(".")[2] == function.__name__ else f"{module}.{function.__name__}"


def _module(function: FunctionType) -> str:
    """The module of a function of nbep, as users type it."""
    module = function.__module__.removeprefix(DEVICE)
    for prefix in (prefix for library in libraries() for prefix in library.names):
        module = module.removeprefix(prefix)
    return module


def _ways(step: str, call: ast.Call, is_statement: bool, cell: Callable[[], str]) -> Iterator[tuple[str, str, str]]:
    """(kind, step in words, what comes in its place) for each way to break a call."""
    if step in (by_name := ChainMap(BY_NAME, *registered("steps"))):
        kind, instead = by_name[step]
        if instead == UNORDERED and not (call.args and ast.unparse(call.args[-1]) == "True"):
            return
        if instead == NOTHING and not is_statement:
            return
        yield kind, f"wait for {cell()}" if kind == "head" else step, instead
        if step == "tma_store_wait_all":
            yield kind, "tma_store_wait_all until read", UNTIL_READ
        if step in EXTENTS:
            yield "extent", f"extent of {step}", ONE_LESS
    elif is_loop(step):
        return
    elif is_wait(step):
        yield "wait", step, NOTHING if is_statement else ONCE
    elif step.startswith(RESETS):
        if is_statement:
            yield "reset", step, NOTHING
    if step not in PRIMITIVES:
        return
    order, scope = _order_and_scope(step)
    if order in HALVES:
        if "fence" not in step:
            yield "acquire" if order == "acquire" else "release", f"{HALVES[order]} of {cell()}", "relaxed"
        if scope in SMALLER:
            what = "fence" if "fence" in step else f"{HALVES[order]} of {cell()}"
            yield "scope", f"scope of the {what}", SMALLER[scope]
    elif order == "relaxed":
        # A store to a head says how far its reader is; a constant says something else.
        is_head = step.startswith(("st_", "atom_exch")) and "head" in ast.unparse(call.args[0])
        if is_head and not ast.unparse(call.args[1]).isupper():
            yield "head", f"value of {cell()}", ONE_MORE
        if scope in SMALLER:
            yield "scope", f"scope of {cell()}", SMALLER[scope]
    if step.startswith("st_") and order not in HALVES and is_zero(call.args[1]):
        yield "reset", f"reset of {cell()}", NOTHING


@cache
def _order_and_scope(primitive: str) -> tuple[str, str]:
    """What the body of a primitive says; "" if it says nothing."""
    tree = function_tree(cast(FunctionType, PRIMITIVES[primitive].function))
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    order = next((word for word in words if word in ORDERS), "")
    return order, next((word for word in words if word in SCOPES), "")


# nbep's own kernels


@cache
def own_kernels() -> dict[str, FunctionType]:
    """nbep's kernels by the names that users type: intranode.dispatch; in a file of several: file and function."""
    own_modules()
    functions = [cast(FunctionType, spec.function) for spec in KERNELS.values()]
    in_file = Counter(map(_module, functions))
    return {_module(f) + (f".{f.__name__}" if in_file[_module(f)] > 1 else ""): f for f in functions}


@cache
def own_faults() -> dict[str, Fault]:
    """All faults of nbep's kernels by name, in the order of the kernels' names, whichever is imported first."""
    own_modules()
    functions = {f: None for _, kernel in sorted(own_kernels().items()) for f in reached_from(kernel)}
    return {fault.name: fault for function in functions for fault in faults_of_function(function)}


def kernels_named(name: str) -> list[FunctionType]:
    """The kernels of a name, or of a folder of them: intranode.

    Raises: UnknownName if there is none
    """
    found = [kernel for own, kernel in own_kernels().items() if own == name or own.startswith(f"{name}.")]
    if not found:
        raise UnknownName(f"no kernel {name!r}; there are {', '.join(own_kernels())}")
    return found


def fault_of(name: str, among: Sequence[Fault] = ()) -> Fault:
    """The fault of a name, of nbep's kernels or among others.

    Raises:
        UnknownName: if there is none; it names some that are alike
    """
    faults = {**own_faults(), **{fault.name: fault for fault in among}}
    if name not in faults:
        alike = difflib.get_close_matches(name, faults, 3, 0.4) or list(faults)[:3]
        raise UnknownName(f"no fault {name!r}; alike: {', '.join(map(repr, alike))}")
    return faults[name]
