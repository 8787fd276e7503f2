"""What puzzles have in common to say about an order that is missing."""

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


def order_advice(clue: Clue, cell: str) -> str:
    """For a race: which end of a cell's order is missing in the holes.

    "" if the code there has both ends, or something else is wrong
    """
    if clue.kind != "race":
        return ""
    if not clue.calls(*RELEASES):
        return (
            f"Nothing in your code is a release. A store of weak, relaxed or volatile order tells its own value and "
            f"nothing else: whoever sees `{cell}` may still find old bytes where its writer has stored before."
        )
    if not clue.calls(*ACQUIRES):
        return (
            f"Nothing in your code is an acquire. Whoever polls `{cell}` with a weak, relaxed or volatile load learns "
            f"its value and nothing else: what comes next may be read too early."
        )
    return ""
