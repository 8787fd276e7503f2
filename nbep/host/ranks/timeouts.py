"""How long one rank waits for another, and what it raises then."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from nbep.device.protocols.waits import FaultReport
from nbep.host.arguments import refuse

DEFAULT_TIMEOUT_MS = 100_000.0  # DeepEP's 100 s
MAX_TIMEOUT_MS = 1e12  # 31 years: a GPU's clock, plus that in nanoseconds, fits into int64
MISSED_MEETING = "construction"  # role of a PeerTimeout: a rank did not come to make, or to destroy, a Buffer

saved_calls: list[str] = []  # the command that runs on the emulator what nbep.debug.save_call has kept, if it has


class PeerTimeout(RuntimeError):
    """This rank waited too long for a peer. What the call left behind is right or NaN; the buffer is of no use now.

    Attributes:
        rank: who waited
        peer: for whom, or for whom first
        role: the waiting role, e.g. "dispatch receiver"; "destroy" if the CPU waited for peers to destroy theirs,
            "zero copy" if it waited for its NIC, "atomic" if the emulator waited to make one
        cell: the cell that a kernel polled, e.g. "tail"; None if the CPU waited
        report: the whole FaultReport of a kernel; None if the CPU waited
        gone: ranks whose processes have ended or are stopped, as far as this host can tell
    """

    gone: tuple[int, ...] = ()

    def __init__(
        self, message: str, rank: int, peer: int, role: str, cell: str | None = None, report: FaultReport | None = None
    ):
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.role = role
        self.cell = cell
        self.report = report


def timeout_ns() -> int:
    """Longest time that a wait inside a kernel may take, as the environment says; a wrong one is refused elsewhere."""
    try:
        milliseconds = float(os.environ.get("NBEP_TIMEOUT_MS", DEFAULT_TIMEOUT_MS))
    except ValueError:
        milliseconds = DEFAULT_TIMEOUT_MS
    return int(1e6 * max(milliseconds, 1.0)) if milliseconds < MAX_TIMEOUT_MS else int(1e6 * MAX_TIMEOUT_MS)


def join_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def ranks_on_hosts(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """ "ranks 2, 3 (hostb)"; hosts: of all ranks."""
    return f"{join_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"


def timeout_ms(name: str, value: Any) -> float:
    """The value, a number or what spells one, as a float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number <= MAX_TIMEOUT_MS:
        refuse(name, repr(value), f"a positive number of milliseconds, at most {MAX_TIMEOUT_MS:g}")
    return number


# --- What is to be given back together with the other ranks, and what happens if one of them does not come to


class Undo(ExitStack):
    """An ExitStack that ends at a PeerTimeout: what is left stays as it is.

    The rank that is missing may use the memory still, and the steps that are left would wait for it too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    def callback(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return super().callback(self._call, call, *args, **kwargs)

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._is_over:
            return
        try:
            call(*args, **kwargs)
        except PeerTimeout:
            self._is_over = True
            raise

    def __exit__(self, *error: Any) -> bool | None:
        self._is_over = self._is_over or isinstance(error[1], PeerTimeout)
        return super().__exit__(*error)
