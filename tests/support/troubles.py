"""One thing that goes wrong in a run: a rank that stops, a word that gets lost on its way, a wait that times out.

`planted` lets it happen at the `number`-th occasion of a rank, and counts the occasions.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nbep.emulator.machine.access import AccessingThread

LOST, EXPIRED, DEAD = "lost", "expired", "dead"
ANY_RANK = -1
# Functions on the way from a look at a deadline to the kernel that say nothing of who waits, and for what.
BETWEEN = {
    "wait_expired",
    "wait_until",
    "wait_for_peer",
    "wait_or_report",
    "wait_expired_together",
    "has_stalled",
    "chosen",
}


@dataclass(frozen=True)
class Trouble:
    """LOST: a store or an add of scope sys to another rank's memory; EXPIRED: a look at a deadline; DEAD: a call.

    site: of a look, the functions from the wait to the kernel, and its file: "wait_tail_past < receive_tokens in
    intranode/dispatch"; "" if it is any
    """

    kind: str
    rank: int
    number: int
    site: str = ""
    lasts: bool = False  # so does each later look there: a coordinator looks twice before it reports


def waiting_site() -> str:
    """Who looks at a deadline: of those who call this, the device functions but for the kernel itself, and its file."""
    frame, names, path = sys._getframe(1), [], Path()
    while frame is not None and (not names or "/nbep/device/" in frame.f_code.co_filename):
        if "/nbep/device/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
            path = Path(frame.f_code.co_filename)
        frame = frame.f_back
    return f"{' < '.join(name for name in names[:-1] if name not in BETWEEN)} in {path.parent.name}/{path.stem}"


@contextmanager
def planted(trouble: Trouble) -> Iterator[list[Trouble]]:
    """Let it happen. What is yielded fills with the occasions of its kind that there have been."""
    occasions: list[Trouble] = []

    def is_it(thread: AccessingThread, kind: str) -> bool:
        if kind != trouble.kind or trouble.rank not in (thread.rank, ANY_RANK):
            return False
        site = waiting_site() if kind == EXPIRED else ""
        if trouble.site not in ("", site):
            return False
        occasions.append(Trouble(kind, thread.rank, len(occasions), site))
        number = len(occasions) - 1
        return number == trouble.number or (trouble.lasts and number > trouble.number)

    def is_lost(thread: AccessingThread, address: int, scope: str) -> bool:
        allocation = thread.segments.get(address >> 32)
        goes_out = scope == "sys" and allocation is not None and allocation.rank != thread.rank
        return goes_out and is_it(thread, LOST)

    store, atomic, spin = AccessingThread.store, AccessingThread.atomic, AccessingThread.spin

    def losing_store(self, address, kind, value, order, scope):
        if not is_lost(self, address, scope):
            store(self, address, kind, value, order, scope)

    def losing_atomic(self, op, address, kind, operand, order, scope, compare=None):
        if is_lost(self, address, scope):
            return 0
        return atomic(self, op, address, kind, operand, order, scope, compare)

    def hasty_spin(self, deadline_ns):
        return True if is_it(self, EXPIRED) else spin(self, deadline_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AccessingThread, "store", losing_store)
        patch.setattr(AccessingThread, "atomic", losing_atomic)
        patch.setattr(AccessingThread, "spin", hasty_spin)
        yield occasions
