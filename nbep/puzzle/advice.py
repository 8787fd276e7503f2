"""What puzzles have in common to say about an order that is missing."""

import re

from nbep.puzzle.frame import Clue

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


def order_advice(clue: Clue, cell: str, writer: str = "", reader: str = "") -> str:
    """For a race: which end of a cell's order is missing, or too near, in the holes.

    Args: writer, reader  the holes that store to the cell and that poll it; "": any
    Returns: "" if the code there has both ends, or something else is wrong
    """
    if clue.kind != "race":
        return ""
    if not clue.calls(*RELEASES, where=writer):
        return (
            f"Nothing in {_name(writer)} is a release. A store of weak, relaxed or volatile order tells its own value "
            f"and nothing else: whoever sees `{cell}` may still find old bytes where its writer has stored before."
        )
    if not clue.calls(*ACQUIRES, where=reader):
        return (
            f"Nothing in {_name(reader)} is an acquire. Whoever polls `{cell}` with a weak, relaxed or volatile load "
            f"learns its value and nothing else: what comes next may be read too early."
        )
    first = clue.report.partition("\n")[0]
    if f"{cell} (byte" in first and "releases nothing" in first:
        return (
            f"The store to `{cell}` is no release, and no fence of its thread stands between it and what was stored "
            f"before. A fence orders what comes before it with what comes behind it, so its place matters."
        )
    if f"{cell} (byte" in first and "acquires nothing" in first:
        return (
            f"The load of `{cell}` that ends the wait is no acquire, and no fence of its thread stands between it and "
            f"what is loaded next."
        )
    near = sorted(name for name in clue.puzzle.called_names(clue.puzzle.holes) if NEAR.search(name))
    if near and clue.puzzle.num_ranks > 1:
        return (
            f"The scope of {near[0]} does not reach another rank: `cta` is the block, `gpu` is this GPU. Ranks are on "
            f"different GPUs, and both ends need `sys`."
        )
    return ""


def _name(hole: str) -> str:
    return f"`{hole}`" if hole else "your code"
