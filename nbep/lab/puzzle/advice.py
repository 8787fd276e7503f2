"""What is wrong in the code of a puzzle's holes, and what to write instead.

`mistake` names what a programmer who is new to nbep types: some of it shows in Python's error, the rest in the source.
`order_advice` names the end of an order that is missing.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from types import FunctionType

from nbep.device import primitives
from nbep.emulator.machine.source import edited
from nbep.lab.puzzle.frame import Clue

SIZES = {"u8": 1, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "v2": 8, "v4": 16}
CUDA = {
    "syncthreads": "syncthreads()",
    "syncwarp": "syncwarp(FULL_MASK)",
    "threadfence_system": "fence_acq_rel_sys()",
    "threadfence": "fence_acq_rel_gpu()",
    "threadfence_block": "fence_acq_rel_cta()",
    "atomicExch": "atom_exch_acq_rel_sys_s32(address, value)",
    "atomicCAS": "atom_cas_acq_rel_sys_s32(address, compare, value)",
    **dict.fromkeys(("atomicAdd", "atomic"), "atom_add_relaxed_{scope}_s32(address, value)"),
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
# What a report has in it, and what to say if nothing better is known.
LAST_WORDS = {
    "waits without polling": "The condition of the loop loads nothing. Load the cell there, as in "
    "`while ld_acquire_sys_s32(cell) == 0`.",
    "unpack": "The kernel takes a tuple from your function: return all of its values, as in `return first, second`.",
    "is not iterable": "An address is a number, and not a list: load each element, at address + 4 * i.",
    "has no attribute": "Addresses and values are plain numbers: what reads and writes memory is a function, "
    "`ld_...` or `st_...`.",
}
COUNTS_BYTES = (
    "An address counts bytes: element i of an array of s32 is at address + 4 * i, of s64 at address + 8 * i, of v4 at "
    "address + 16 * i, and a row begins as many bytes behind the first one as the rows before it have."
)


def mistake(clue: Clue) -> str:
    """A sentence about what stands in the holes and cannot be meant; "" if nothing there looks like that."""
    trees = [tree_of(clue.puzzle.scope[name]) for name in clue.puzzle.holes]
    if found := re.match(r"NameError: name '(\w+)' is not defined", clue.report):
        return unknown_name(clue, found[1], "\n".join(map(ast.unparse, trees)))
    found = re.match(r"TypeError: (\w+)\(\) (?:missing|takes|got)", clue.report)
    if found and callable(function := clue.puzzle.scope.get(found[1])):
        if found[1] in clue.puzzle.holes:
            return f"`{found[1]}` is called by the kernel below it: leave its parameters as they were."
        taken = [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]
        wanted = f"{found[1]}({', '.join(taken)})".replace("(mask", "(FULL_MASK")
        mask = " FULL_MASK names all 32 lanes." if "FULL_MASK" in wanted else ""
        return f"Write `{wanted}`: the number of arguments is wrong.{mask}"
    words = next((words for tree in trees for words in sentences(clue, tree)), "")
    return words or (COUNTS_BYTES if clue.about("Misaligned") else "")


def tree_of(function: Callable) -> ast.FunctionDef:
    """The syntax tree of a function, as it runs now."""
    _, lines = edited.get(function.__code__, (1, None))
    source = inspect.getsource(function) if lines is None else "\n".join(lines)
    [tree] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def unknown_name(clue: Clue, name: str, source: str) -> str:
    """Of a name that nothing defines: a primitive without kind or scope, or a word of CUDA."""
    scope = scope_of(clue)
    for text in re.findall(r"cuda[.\w]+", source) if name == "cuda" else [name]:
        if written := next((CUDA[word] for word in reversed(text.strip("_").split(".")) if word in CUDA), ""):
            return f"`{text}` is CUDA's. In nbep's kernels write `{written.format(scope=scope)}`."
    right = name.replace("st_acquire", "st_release").replace("ld_release", "ld_acquire")
    kinds = [kind.rpartition("_")[2] for kind in clue.puzzle.addresses.values()]

    def fit(each: str) -> tuple:
        kind = each.rpartition("_")[2]
        return f"_{scope}" not in each, "_relaxed_" not in each, kind not in kinds, kind != "s32", len(each)

    whole = min((each for each in primitives.__all__ if f"{each}_".startswith(f"{right}_")), key=fit, default="")
    if right != name:
        return f"A store can release and a load can acquire; there is no `{name}`. Write `{whole or right}`."
    if whole:
        stem = whole.rpartition("_")[0]
        others = [each for each in primitives.__all__ if each.rpartition("_")[0] == stem and each != whole]
        more = ", ".join(each.removeprefix(f"{stem}_") for each in others)
        order = " `relaxed` is one of the orders." if "_relaxed_" in whole and "_relaxed" not in name else ""
        return (
            f"`{name}` is not the whole name. A name says operation, order, scope if there is one, and kind: write "
            f"`{whole}`{f', or another kind: {more}' if more else ''}.{order}"
        )
    near = get_close_matches(name, [*clue.puzzle.scope], n=1, cutoff=0.7)
    say = f"Do you mean `{near[0]}`?" if near else "docs/primitives.md lists what there is."
    return f"There is no `{name}`. {say}"


def sentences(clue: Clue, tree: ast.FunctionDef) -> Iterator[str]:
    """What the source of a hole cannot mean."""
    addresses, text = clue.puzzle.addresses, ast.unparse
    nodes = list(ast.walk(tree))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]

    def ways(base: str, at: str) -> str:
        kind = addresses[base]
        add = f"atom_add_relaxed_{scope_of(clue)}_s32({at}, value)"
        added = "" if kind.startswith("shared") else f"; to add to it, `{add}`"
        return f"to load from there, write `ld_{kind}({at})`; to store there, `st_{kind}({at}, value)`{added}."

    for node in nodes:
        match node:
            case ast.Subscript(ast.Name("peers"), index):
                yield f"`peers` is no array. Write `buffer_of(peers, {text(index)})` for `{text(node)}`."
            case ast.Subscript(ast.Name(base), index) if base in addresses:
                number = text(index) if isinstance(index, (ast.Name, ast.Constant)) else f"({text(index)})"
                size = SIZES[addresses[base].rpartition("_")[2]]
                at = base if number == "0" else f"{base} + {size} * {number}"
                yield f"`{base}` is an address, which is a number, and not an array: {ways(base, at)}"
            case ast.Assign([ast.Name(base)], _) | ast.AugAssign(ast.Name(base), _, _) if base in addresses:
                if not any(isinstance(n, ast.Name) and n.id == base and n.lineno > node.lineno for n in nodes):
                    yield (
                        f"`{text(node)}` changes a name of Python and no memory. `{base}` is an address: "
                        f"{ways(base, base)} Another order is another function."
                    )
            case ast.Return(ast.Name(base)) if base in addresses:
                yield f"`{base}` is an address. To return what lies there, write `return ld_{addresses[base]}({base})`."
            case ast.Name(name, ast.Load()) if name in primitives.__all__ and node not in called:
                if isinstance(clue.puzzle.scope.get(name), FunctionType):
                    yield f"`{name}` is a function: call it, `{name}(...)`."
    ends = isinstance(tree.body[-1], (ast.Expr, ast.Assign, ast.AugAssign))
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in nodes)
    if (ends or not returns) and is_value_used(clue, tree.name):
        yield f"`{tree.name}` can end without a value, and the kernel uses its value: write `return` before it."


def is_value_used(clue: Clue, hole: str) -> bool:
    nodes = list(ast.walk(tree_of(clue.puzzle.kernel)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == hole]
    return len(calls) > sum(isinstance(node, ast.Expr) and node.value in calls for node in nodes)


def scope_of(clue: Clue) -> str:
    return "sys" if clue.puzzle.num_ranks > 1 else "gpu"


# The order that is missing


RELEASES = (
    "st_release",
    "atom_add_release",
    "atom_add_acq_rel",
    "atom_exch_release",
    "atom_exch_acq_rel",
    "atom_cas_acq_rel",
    "fence_acq_rel",
)
ACQUIRES = (
    "wait_at_least",
    "ld_acquire",
    "atom_add_acq_rel",
    "atom_exch_acq_rel",
    "atom_cas_acq_rel",
    "fence_acq_rel",
)
NEAR = re.compile(r"(release|acquire|acq_rel)_(gpu|cta)")


def order_advice(clue: Clue, cell: str, writer: str = "", reader: str = "", polled: str = "") -> str:
    """For a race: which end of a cell's order is missing, or too near, in the holes.

    Args:
        writer, reader: the holes that store to the cell and that poll it; "": any
        polled: the cell that the holes poll, if it is another one

    Returns:
        "" if the code there has both ends, or something else is wrong
    """
    if clue.kind != "race":
        return ""
    if not clue.calls(*RELEASES, where=writer):
        return (
            f"Nothing in {_name(writer)} is a release. A weak, relaxed or volatile store to `{cell}` publishes its own "
            f"value and nothing else: a thread that sees it may still find old bytes where the writer stored before. "
            f"Write a store or an atomic with `release` in its name."
        )
    if not clue.calls(*ACQUIRES, where=reader):
        return (
            f"Nothing in {_name(reader)} is an acquire. A weak, relaxed or volatile load of `{polled or cell}` reads "
            f"its value and nothing else: what the thread reads next may be older. Write a load with `acquire` in its "
            "name."
        )
    first = clue.report.partition("\n")[0]
    if f"{cell} (byte" in first and "releases nothing" in first:
        return (
            f"The store to `{cell}` is no release, and its thread has no fence between it and what it stored before. "
            f"A fence orders what comes before it with what comes after it, so its place matters: put it before the "
            "store."
        )
    if f"{polled or cell} (byte" in first and "acquires nothing" in first:
        return (
            f"The load of `{polled or cell}` that ends the wait is no acquire, and its thread has no fence between it "
            f"and what it loads next: put the fence behind the loop."
        )
    near = sorted(name for name in clue.puzzle.called_names(clue.puzzle.holes) if NEAR.search(name))
    if near and clue.puzzle.num_ranks > 1:
        far = NEAR.sub(r"\1_sys", near[0])
        return (
            f"The scope of {near[0]} does not reach another rank: `cta` is the block, `gpu` is this GPU. Ranks are on "
            f"different GPUs, and both ends need `sys`: write `{far}`."
        )
    return ""


def stores_to(clue: Clue, address: str, how: tuple[str, ...] = ("st_", "atom_")) -> bool:
    """Whether the code in the holes stores to this parameter, or makes an atomic there; how: one of these alone."""
    for name in clue.puzzle.holes:
        for node in ast.walk(tree_of(clue.puzzle.scope[name])):
            if isinstance(node, ast.Call) and node.args and re.search(rf"\b{address}\b", ast.unparse(node.args[0])):
                if ast.unparse(node.func).startswith(how):
                    return True
    return False


def arguments_of(clue: Clue, function: str, where: str) -> list[list[str]]:
    """The arguments of each call of a function in a hole, as they are written."""
    return [
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(tree_of(clue.puzzle.scope[where]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


def _name(hole: str) -> str:
    return f"`{hole}`" if hole else "your code"
