"""How many forks lie behind this process. What was made before one belongs to the parent."""

import os

_num_forks = 0


def num_forks() -> int:
    return _num_forks


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)
