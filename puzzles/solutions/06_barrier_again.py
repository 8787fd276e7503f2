"""Puzzle 6, solved: the cell only grows, and so does what is awaited.

A quick rank's arrival for the next barrier may stand in for a slow rank's. It cannot do harm: the quick one has seen
the slow one arrive, and its release passes on what it knows.
"""

from nbep.lang import atom_add_release_sys_s32, buffer_of, device_function, wait_at_least

ARRIVED = 0


@device_function
def barrier(peers, turn, bounds):
    for rank in range(peers.num_ranks):
        atom_add_release_sys_s32(buffer_of(peers, rank) + ARRIVED, 1)
    wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks * (turn + 1), bounds)


HINTS = (
    "The cell is never set back. By how much does each barrier make it grow?",
    "Barrier 0 is complete at num_ranks, barrier 1 at 2 * num_ranks. At how much is barrier `turn`?",
)
