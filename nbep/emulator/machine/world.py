"""What threads, launches and streams need of the world that they are in. The world itself is above them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

NEVER = 1 << 62  # a deadline that does not come
SKIPPED = object()  # returned by an operation that had happened before its turn came


class World(Protocol):
    """See the classes `World`, `Run` and `Scheduler`, which have all of it."""

    thread_class: Any
    hub: Any
    strategy: Any
    hooks: Any
    cpu: Any
    order: Any
    compute_capability: tuple[int, int]
    has_changed: bool
    parks: int
    current: Any
    runnable: Any
    launches: dict[Any, None]
    spaces: dict[int, Any]
    polling: dict[Any, None]
    read_report: Any
    # For the memory models.
    signals: int
    observed: tuple[Any, set[Any]]
    history: Any
    has_failed: bool
    moment: int
    early: Any
    early_rate: float
    gpu_stores: dict[int, dict[Any, None]]

    @property
    def step(self) -> int: ...

    @property
    def host_rank(self) -> int | None: ...

    def start_block(self, launch: Any) -> None: ...

    def count_block(self) -> int: ...

    def count_launch(self, rank: int, kernel: str) -> int: ...

    def submit(self, operation: Callable[[], object]) -> None: ...

    def now(self, thread: Any) -> int: ...

    def overdue(self, thread: Any, deadline_ns: int) -> bool: ...

    def host_wait(
        self, predicate: Callable[[], bool], describe: Any, timeout_ns: int | None = None, told: Any = None
    ) -> bool: ...

    def error_of(self, fact: Any) -> Exception:
        """The error that says in words what a fact means: an AccessFault, a Race and the like."""
        ...
