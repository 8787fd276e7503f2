"""One thread at a time in the verbs of a buffer.

Ranks have to make the same calls in the same order. A lock would let two threads of a rank go one after the other, but
in which order, the ranks would not agree. So who comes second is refused.

A verb also leaves torch's function modes aside; see target.torch_modes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

from nbep.host.target.torch_modes import mode_is_on, untraced, without_modes

Verb = TypeVar("Verb", bound=Callable[..., Any])


def in_turn(verb: Verb) -> Verb:
    """A verb of an object that has a lock `_turn`: a RuntimeError in a thread that comes while another is inside."""
    name = verb.__name__

    @wraps(verb)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        turn: Lock = self._turn
        if not turn.acquire(False):
            raise RuntimeError(f"{name}: called while another thread is in a call of this buffer; one thread at a time")
        try:
            if mode_is_on():
                with without_modes():
                    return verb(self, *args, **options)
            return verb(self, *args, **options)
        finally:
            turn.release()

    return untraced(guarded)  # type: ignore[return-value]
