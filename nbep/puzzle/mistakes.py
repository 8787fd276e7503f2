"""What a programmer who is new to nbep types, and what to write instead.

Some of it shows in Python's error, the rest in the source of the holes: each rule below returns a sentence, or "".
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from types import FunctionType

from nbep.device import primitives
from nbep.emulator.machine.source import edited
from nbep.puzzle.frame import Clue

SIZES = {"u8": 1, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "v2": 8, "v4": 16}
OPPOSITE = {"Eq": "!=", "NotEq": "==", "Lt": ">=", "LtE": ">", "Gt": "<=", "GtE": "<"}
CUDA = {
    "syncthreads": "syncthreads()",
    "syncwarp": "syncwarp(FULL_MASK)",
    "threadfence_system": "fence_acq_rel_sys()",
    "threadfence": "fence_acq_rel_gpu()",
    "threadfence_block": "fence_acq_rel_cta()",
    "atomicAdd": "atom_add_relaxed_{scope}_s32(address, value)",
    "atomicExch": "atom_exch_acq_rel_sys_s32(address, value)",
    "atomicCAS": "atom_cas_acq_rel_sys_s32(address, compare, value)",
    "atomic": "atom_add_relaxed_{scope}_s32(address, value)",
    "threadIdx": "thread_idx()",
    "blockIdx": "block_idx()",
    "blockDim": "block_dim()",
    "gridDim": "grid_dim()",
    "laneid": "lane_id()",
    "warpsize": "32",
    "grid": "block_idx() * block_dim() + thread_idx()",
    "shfl_sync": "shfl_idx_s32(FULL_MASK, value, lane)",
    "shfl_up_sync": "shfl_up_s32(FULL_MASK, value, delta)",
    "shfl_down_sync": "shfl_down_s32(FULL_MASK, value, delta)",
    "shfl_xor_sync": "shfl_xor_s32(FULL_MASK, value, lane_mask)",
    "ballot_sync": "vote_ballot(FULL_MASK, predicate)",
    "shared": "smem_base()",
}


def mistake(clue: Clue) -> str:
    """A sentence about what stands in the holes and cannot be meant; "" if nothing there looks like that."""
    if words := unknown_name(clue) or wrong_arguments(clue):
        return words
    trees = {name: tree_of(clue.puzzle.scope[name]) for name in clue.puzzle.holes}
    for rule in (
        subscript,
        assignment,
        address_returned,
        nothing_returned,
        address_compared,
        not_called,
        no_wait,
        not_shared,
    ):
        for name, tree in trees.items():
            if words := rule(clue, name, tree):
                return words
    for late in (unscaled, exchanged):
        for tree in trees.values():
            if words := late(clue, tree):
                return words
    return ""


def tree_of(function: Callable) -> ast.FunctionDef:
    """The syntax tree of a function, as it runs now."""
    _, lines = edited.get(function.__code__, (1, None))
    source = inspect.getsource(function) if lines is None else "\n".join(lines)
    [tree] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


# --- what Python's error says --------------------------------------------------------------------------------------


def unknown_name(clue: Clue) -> str:
    """A name that nothing defines: a primitive without kind or scope, or a word of CUDA."""
    found = re.match(r"NameError: name '(\w+)' is not defined", clue.report)
    if found is None:
        return ""
    name = found[1]
    scope = "sys" if clue.puzzle.num_ranks > 1 else "gpu"
    if name == "cuda":
        for text in (ast.unparse(node) for hole in clue.puzzle.holes for node in attributes(clue, hole)):
            words = next((CUDA[part] for part in reversed(text.split(".")) if part in CUDA), "")
            if words:
                return f"`{text}` is Numba-CUDA's. In nbep's kernels write `{words.format(scope=scope)}`."
    if written := CUDA.get(name.strip("_")):
        return f"`{name}` is CUDA's. In nbep's kernels write `{written.format(scope=scope)}`."
    right = name.replace("st_acquire", "st_release").replace("ld_release", "ld_acquire")
    if right != name:
        right = complete(right, scope) or right
        return f"A store can release and a load can acquire; there is no `{name}`. Write `{right}`."
    if whole := complete(name, scope, [kind.rpartition("_")[2] for kind in clue.puzzle.addresses.values()]):
        stem, _, kind = whole.rpartition("_")
        others = [each[len(stem) + 1 :] for each in primitives.__all__ if each.rpartition("_")[0] == stem]
        more = ", ".join(each for each in others if each != kind)
        if "_relaxed_" in whole and "_relaxed" not in name:
            return (
                f"`{name}` is not the whole name. A name says operation, order, scope and kind: write `{whole}`, or "
                f"the one with the order that you need in place of `relaxed`."
            )
        return (
            f"`{name}` is not the whole name. A name says operation, order, scope if there is one, and kind: write "
            f"`{whole}` ({meaning(whole)}){f', or another kind: {more}' if more else ''}."
        )
    near = get_close_matches(name, [*clue.puzzle.scope], n=1, cutoff=0.7)
    return f"There is no `{name}`." + (
        f" Do you mean `{near[0]}`?" if near else " docs/primitives.md lists what there is."
    )


def attributes(clue: Clue, hole: str) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree_of(clue.puzzle.scope[hole])) if isinstance(node, ast.Attribute))


def complete(name: str, scope: str, kinds: Sequence[str] = ()) -> str:
    """The primitive that a name without its end stands for; "" if there is none. kinds: those that the puzzle uses"""
    names = [each for each in primitives.__all__ if each == name or each.startswith(f"{name}_")]
    likely = [*kinds, "s32"]

    def order(each: str) -> tuple:
        kind = each.rpartition("_")[2]
        return (
            f"_{scope}" not in each,
            "_relaxed_" not in each,
            likely.index(kind) if kind in likely else len(likely),
            len(each),
        )

    return min(names, key=order, default="")


def meaning(primitive: str) -> str:
    kinds = {"s32": "4 bytes, an integer", "s64": "8 bytes, an integer", "f32": "4 bytes, a float", "v4": "16 bytes"}
    return kinds.get(primitive.rpartition("_")[2], inspect.getdoc(getattr(primitives, primitive)) or "")


def wrong_arguments(clue: Clue) -> str:
    """Too few arguments, or too many."""
    found = re.match(r"TypeError: (\w+)\(\) (?:missing|takes|got)", clue.report)
    if found is None or not callable(function := clue.puzzle.scope.get(found[1])):
        return ""
    if found[1] in clue.puzzle.holes:
        return f"`{found[1]}` is called by the kernel below it: leave its parameters as they were."
    taken = [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]
    wanted = f"{found[1]}({', '.join(taken)})".replace("(mask", "(FULL_MASK")
    return f"Write `{wanted}`: the number of arguments is wrong." + (
        " FULL_MASK names all 32 lanes." if "FULL_MASK" in wanted else ""
    )


# --- what stands in a hole -----------------------------------------------------------------------------------------


def subscript(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """data[0] = value."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        base, text = node.value.id, ast.unparse(node)
        if base == "peers":
            return f"`peers` is no array. Write `buffer_of(peers, {ast.unparse(node.slice)})` for `{text}`."
        kind = clue.puzzle.addresses.get(base)
        if kind is None:
            continue
        index = ast.unparse(node.slice)
        size = SIZES[kind.rpartition("_")[2]]
        outer = next((n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and n.value is node), None)
        if outer is not None:
            return (
                f"`{base}` is an address, which is a number, and not an array of rows. The address of "
                f"`{ast.unparse(outer)}` is `{base} + ROW_BYTES * {index} + {size} * {ast.unparse(outer.slice)}`: give "
                f"that to `ld_{kind}` or `st_{kind}`."
            )
        inner = index if isinstance(node.slice, (ast.Name, ast.Constant)) else f"({index})"
        at = base if index == "0" else f"{base} + {size} * {inner}"
        stored = next(
            (
                with_loads(clue, each.value)
                for each in ast.walk(tree)
                if (isinstance(each, ast.Assign) and node in each.targets)
                or (isinstance(each, ast.AugAssign) and node is each.target)
            ),
            None,
        )
        what = f"`{base}` is an address, which is a number, and not an array."
        if stored is None:
            return f"{what} To read `{text}`, write `ld_{kind}({at})`."
        if any(isinstance(each, ast.AugAssign) and node is each.target for each in ast.walk(tree)):
            scope = "sys" if clue.puzzle.num_ranks > 1 else "gpu"
            if kind.startswith("shared"):
                return f"{what} To add to `{text}`, write `st_{kind}({at}, ld_{kind}({at}) + {stored})`."
            return f"{what} To add to `{text}`, write `atom_add_relaxed_{scope}_s32({at}, {stored})`."
        order = ""
        if "relaxed" in kind:
            order = " Another order is another function, such as `st_release_sys_s32`."
        elif kind.startswith("shared"):
            order = " For a cell that another thread polls, take a function with an order, such as "
            order += "`atom_exch_release_cta_shared_s32`."
        return f"{what} To store into `{text}`, write `st_{kind}({at}, {stored})`.{order}"
    return ""


def with_loads(clue: Clue, value: ast.expr) -> str:
    """A value as it has to be written: `src[i]` becomes a load."""

    class Loads(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            base = ast.unparse(node.value)
            if base not in clue.puzzle.addresses:
                return node
            kind = clue.puzzle.addresses[base]
            at = f"{base} + {SIZES[kind.rpartition('_')[2]]} * {ast.unparse(node.slice)}"
            return ast.parse(f"ld_{kind}({at})", mode="eval").body

    return ast.unparse(Loads().visit(ast.parse(ast.unparse(value), mode="eval").body))


def not_shared(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """ld_weak_s32(stage)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            base, called = bare_address(clue, node.args[0]), node.func.id
            is_access = called.startswith(("ld_", "st_", "atom_")) and "shared" not in called
            if base and is_access and clue.puzzle.addresses[base].startswith("shared"):
                return (
                    f"`{base}` lies in shared memory, whose functions have `shared` in their names: write "
                    f"`ld_shared_s32` and `st_shared_s32`, or one with an order, in place of `{called}`."
                )
    return ""


def assignment(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """flag = 1."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, store = node.targets[0], "st_{kind}({name}, {value})"
        elif isinstance(node, ast.AugAssign):
            target, store = node.target, "atom_add_relaxed_{scope}_s32({name}, {value})"
        else:
            continue
        if not isinstance(target, ast.Name) or target.id not in clue.puzzle.addresses:
            continue
        later = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and each.lineno > node.lineno]
        used = any(has_name(argument, target.id) for call in later for argument in call.args)
        if not used:
            scope = "sys" if clue.puzzle.num_ranks > 1 else "gpu"
            kind, value = clue.puzzle.addresses[target.id], ast.unparse(node.value)
            written = store.format(kind=kind, name=target.id, value=value, scope=scope)
            return (
                f"`{ast.unparse(node)}` changes a name of Python and no memory: `{target.id}` is an address. To store "
                f"there, write `{written}`, or the function with the order that you need."
            )
    return ""


def address_returned(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """Return data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None and (base := bare_address(clue, node.value)):
            text = ast.unparse(node.value)
            return (
                f"`{name}` returns an address, the place where the number lies. To return the number, write "
                f"`return ld_{clue.puzzle.addresses[base]}({text})`."
            )
    return ""


def nothing_returned(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """A function whose value the kernel uses."""
    kernel = tree_of(clue.puzzle.kernel)
    alone = [node.value for node in ast.walk(kernel) if isinstance(node, ast.Expr)]
    calls = [
        n for n in ast.walk(kernel) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name
    ]
    used = [call for call in calls if call not in alone]
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))
    if used and (not returns or isinstance(tree.body[-1], (ast.Expr, ast.Assign, ast.AugAssign))):
        return f"`{name}` can end without a value, and the kernel uses its value: write `return` before it."
    return ""


def address_compared(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """While flag != 1."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.test] if isinstance(node, (ast.While, ast.If)) else []
        for side in sides:
            inner = side.operand if isinstance(side, ast.UnaryOp) else side
            if not isinstance(inner, ast.Compare) and (base := bare_address(clue, inner)):
                kind = clue.puzzle.addresses[base].replace("weak", "acquire_sys")
                return (
                    f"`{ast.unparse(inner)}` is an address and does not change. To ask what lies there, load it, with "
                    f"`ld_{kind}({ast.unparse(inner)})` or another order."
                )
    return ""


def not_called(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """grid_dim - 1."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called and not isinstance(node.ctx, ast.Store):
            if node.id in primitives.__all__ and isinstance(clue.puzzle.scope.get(node.id), FunctionType):
                if node not in tree.decorator_list:
                    return f"`{node.id}` is a function: call it, `{node.id}(...)`."
    return ""


def no_wait(clue: Clue, name: str, tree: ast.FunctionDef) -> str:
    """A polling loop that ends while its cell is still 0."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.While) or not isinstance(node.test, ast.Compare) or len(node.test.ops) != 1:
            continue
        left, right = node.test.left, node.test.comparators[0]
        if is_load(left) and isinstance(right, ast.Constant):
            replaced = ast.Compare(ast.Constant(0), node.test.ops, node.test.comparators)
            if not eval(compile(ast.fix_missing_locations(ast.Expression(replaced)), "<condition>", "eval")):
                operator = OPPOSITE.get(type(node.test.ops[0]).__name__, "!=")
                return (
                    f"The loop `while {ast.unparse(node.test)}` is turned around. It has to run as long as the value "
                    f"is not there, and each cell is 0 before the launch: write `while {ast.unparse(left)} {operator} "
                    f"{ast.unparse(right)}`."
                )
    return ""


def unscaled(clue: Clue, tree: ast.FunctionDef) -> str:
    """Data + lane."""
    if not clue.about("Misaligned"):
        return ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        at, kind = node.args[0], node.func.id.rpartition("_")[2]
        if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Add) or kind not in SIZES:
            continue
        index, factor = at.right, 1
        if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Mult) and isinstance(index.left, ast.Constant):
            factor, index = int(ast.unparse(index.left)), index.right
        if isinstance(index, ast.Name) and factor % SIZES[kind]:
            right = f"{ast.unparse(at.left)} + {SIZES[kind]} * {index.id}"
            return (
                f"An address counts bytes, and one {kind} has {SIZES[kind]}. Write `{right}` in place of "
                f"`{ast.unparse(at)}`."
            )
    return ""


def exchanged(clue: Clue, tree: ast.FunctionDef) -> str:
    """st_weak_s32(value, data)."""
    if not clue.about("Unmapped"):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            first, second = node.args
            if (
                node.func.id.startswith(("st_", "atom_"))
                and bare_address(clue, second)
                and not bare_address(clue, first)
            ):
                written = f"{node.func.id}({ast.unparse(second)}, {ast.unparse(first)})"
                return f"The address comes first: write `{written}`."
    return ""


def other_error(clue: Clue) -> str:
    """What is left: a float where an int must be, a loop that polls nothing, an access that is not aligned."""
    trees = [tree_of(clue.puzzle.scope[name]) for name in clue.puzzle.holes]
    if any(isinstance(node, ast.Div) for tree in trees for node in ast.walk(tree)) and clue.kind in ("error", "memory"):
        return "`/` makes a float. Numbers of ranks, bytes and lanes are ints: write `//`."
    if clue.about("waits without polling"):
        return (
            "The condition of the loop loads nothing. Load the cell there, as in `while ld_acquire_sys_s32(cell) == 0`."
        )
    if clue.about("cannot unpack") or clue.about("values to unpack"):
        return "The kernel takes a tuple from your function: return all of its values, as in `return first, second`."
    if clue.about("is not iterable"):
        return "An address is a number, and not a list: load each element, at address + 4 * i."
    if clue.about("has no attribute"):
        return (
            "Addresses and values are plain numbers: what reads and writes memory is a function, `ld_...` or `st_...`."
        )
    if clue.about("Misaligned"):
        return "An address counts bytes: element i of an array of s32 is at address + 4 * i, of s64 at address + 8 * i."
    return ""


# --- trees ---------------------------------------------------------------------------------------------------------


def has_name(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("ld_")


def bare_address(clue: Clue, node: ast.AST) -> str:
    """The address in an expression that calls nothing: that of `data + 4 * lane` is `data`. "" if there is none."""
    inside = list(ast.walk(node))
    if any(isinstance(each, (ast.Call, ast.Compare, ast.Subscript)) for each in inside):
        return ""
    return next((each.id for each in inside if isinstance(each, ast.Name) and each.id in clue.puzzle.addresses), "")
