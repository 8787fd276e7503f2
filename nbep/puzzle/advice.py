"""What puzzles have in common to say about an order that is missing."""

import ast
import re

from nbep.puzzle.frame import Clue
from nbep.puzzle.mistakes import has_name, tree_of

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
            if isinstance(node, ast.Call) and node.args and has_name(node.args[0], address):
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
