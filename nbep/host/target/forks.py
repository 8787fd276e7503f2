"""How many forks lie behind this process. What was made before one belongs to the parent."""

import os

num_forks = 0  # read as forks.num_forks


def _count_fork() -> None:
    global num_forks
    num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)
