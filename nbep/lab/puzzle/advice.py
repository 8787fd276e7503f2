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
OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
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
    "Misaligned": "An address counts bytes: element i of an array of s32 is at address + 4 * i, of s64 at address + "
    "8 * i.",
}


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
    return next((words for tree in trees for words in sentences(clue, tree)), "")


def last_words(clue: Clue) -> str:
    return next((words for what, words in LAST_WORDS.items() if clue.about(what)), "")


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
    no_array = "`{}` is an address, which is a number, and not an array."

    def size(base: str) -> int:
        return SIZES[addresses[base].rpartition("_")[2]]

    def at(base: str, index: ast.expr) -> str:
        number = text(index) if isinstance(index, (ast.Name, ast.Constant)) else f"({text(index)})"
        return base if number == "0" else f"{base} + {size(base)} * {number}"

    def load(base: str, index: ast.expr) -> str:
        return f"ld_{addresses[base]}({at(base, index)})"

    def value_of(node: ast.expr) -> str:
        """As it has to be written: `src[i]` is a load."""
        written = text(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Subscript) and (base := text(each.value)) in addresses:
                written = written.replace(text(each), load(base, each.slice))
        return written

    def add(base: str, where: str, value: str) -> str:
        if addresses[base].startswith("shared"):
            return f"st_{addresses[base]}({where}, ld_{addresses[base]}({where}) + {value})"
        return f"atom_add_relaxed_{scope_of(clue)}_s32({where}, {value})"

    for node in nodes:
        match node:
            case ast.Subscript(ast.Name("peers"), index):
                yield f"`peers` is no array. Write `buffer_of(peers, {text(index)})` for `{text(node)}`."
            case ast.Subscript(ast.Subscript(ast.Name(base), row), column) if base in addresses:
                element = f"{base} + ROW_BYTES * {text(row)} + {size(base)} * {text(column)}"
                yield (
                    f"{no_array.format(base)} Nor has it rows. The address of `{text(node)}` is `{element}`: give that "
                    f"to `ld_{addresses[base]}` or `st_{addresses[base]}`."
                )
            case ast.Assign([ast.Subscript(ast.Name(base), index) as cell], value) if base in addresses:
                order = "" if "weak" in addresses[base] else " Another order is another function."
                store = f"st_{addresses[base]}({at(base, index)}, {value_of(value)})"
                yield f"{no_array.format(base)} To store into `{text(cell)}`, write `{store}`.{order}"
            case ast.AugAssign(ast.Subscript(ast.Name(base), index) as cell, _, value) if base in addresses:
                sum_ = add(base, at(base, index), value_of(value))
                yield f"{no_array.format(base)} To add to `{text(cell)}`, write `{sum_}`."
            case ast.Subscript(ast.Name(base), index) if base in addresses:
                yield f"{no_array.format(base)} To read `{text(node)}`, write `{load(base, index)}`."
            case ast.Assign([ast.Name(base)], value) | ast.AugAssign(ast.Name(base), _, value) if base in addresses:
                if not any(isinstance(n, ast.Name) and n.id == base and n.lineno > node.lineno for n in nodes):
                    store = f"st_{addresses[base]}({base}, {text(value)})"
                    yield (
                        f"`{text(node)}` changes a name of Python and no memory: `{base}` is an address. To store "
                        f"there, write `{store if isinstance(node, ast.Assign) else add(base, base, text(value))}`, or "
                        "the function with the order that you need."
                    )
            case ast.Return(ast.expr() as value) if base := address_in(clue, value):
                yield (
                    f"`{tree.name}` returns an address, the place where the number lies. To return the number, write "
                    f"`return ld_{addresses[base]}({text(value)})`."
                )
            case ast.Compare(side) | ast.While(side) | ast.If(side) | ast.UnaryOp(ast.Not(), side) if (
                base := address_in(clue, side)
            ):
                kind = addresses[base].replace("weak", "acquire_sys")
                yield (
                    f"`{text(side)}` is an address and does not change. To ask what lies there, load it, with "
                    f"`ld_{kind}({text(side)})` or another order."
                )
            case ast.While(ast.Compare(ast.Call(ast.Name(name)), [_], [ast.Constant()]) as test) if name[:3] == "ld_":
                polled, sign, wanted = text(test).rsplit(" ", 2)
                if sign in OPPOSITE and not eval(f"0 {sign} {wanted}"):
                    yield (
                        f"The loop `while {text(test)}` is turned around. It has to run as long as the value is not "
                        f"there, and each cell is 0 before the launch: write `while {polled} {OPPOSITE[sign]} "
                        f"{wanted}`."
                    )
            case ast.Name(name, ast.Load()) if name in primitives.__all__ and node not in called:
                if isinstance(clue.puzzle.scope.get(name), FunctionType):
                    yield f"`{name}` is a function: call it, `{name}(...)`."
            case ast.BinOp(_, ast.Div(), _) if clue.kind in ("error", "memory"):
                yield "`/` makes a float. Numbers of ranks, bytes and lanes are ints: write `//`."
            case ast.Call(ast.Name(name), [where, *values]) if name.startswith(("ld_", "st_", "atom_")):
                base, width = address_in(clue, where), SIZES.get(name.rpartition("_")[2], 1)
                if base and addresses[base].startswith("shared") and "shared" not in name:
                    yield (
                        f"`{base}` lies in shared memory, whose functions have `shared` in their names: write "
                        f"`ld_shared_s32` and `st_shared_s32`, or one with an order, in place of `{name}`."
                    )
                match where:
                    case ast.BinOp(
                        left, ast.Add(), ast.Name() | ast.BinOp(ast.Constant(int()), ast.Mult(), ast.Name()) as number
                    ):
                        *factor, lane = text(number).split(" * ")
                        if clue.about("Misaligned") and (not factor or int(factor[0]) % width):
                            yield (
                                f"An address counts bytes, and one {name.rpartition('_')[2]} has {width}. Write "
                                f"`{text(left)} + {width} * {lane}` in place of `{text(where)}`."
                            )
                if clue.about("Unmapped") and len(values) == 1 and not base and address_in(clue, values[0]):
                    yield f"The address comes first: write `{name}({text(values[0])}, {text(where)})`."
    ends = isinstance(tree.body[-1], (ast.Expr, ast.Assign, ast.AugAssign))
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in nodes)
    if (ends or not returns) and is_value_used(clue, tree.name):
        yield f"`{tree.name}` can end without a value, and the kernel uses its value: write `return` before it."


def is_value_used(clue: Clue, hole: str) -> bool:
    nodes = list(ast.walk(tree_of(clue.puzzle.kernel)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == hole]
    return len(calls) > sum(isinstance(node, ast.Expr) and node.value in calls for node in nodes)


def address_in(clue: Clue, node: ast.AST) -> str:
    """The address in an expression that calls nothing: that of `data + 4 * lane` is `data`. "" if there is none."""
    inside = list(ast.walk(node))
    if any(isinstance(each, (ast.Call, ast.Compare, ast.Subscript, ast.UnaryOp)) for each in inside):
        return ""
    return next((each.id for each in inside if isinstance(each, ast.Name) and each.id in clue.puzzle.addresses), "")


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
