"""What is before what among the launches of a rank. Nothing is checked here; see `models.streams`."""

from typing import Any


class Order:
    """Called at each step of a stream. queued: what `queued` has returned when the host queued it."""

    def queued(self, stream: Any) -> Any:
        """What the host knows that queues something now."""

    def start(self, launch: Any, queued: Any) -> None:
        """A launch starts."""

    def start_block(self, block: Any) -> None:
        """A block of a launch starts; its threads are not there yet."""

    def end(self, launch: Any) -> None:
        """A launch is done."""

    def is_done(self, mark: Any) -> bool:
        """Whether a stream has come to a mark, if the host asks."""
        mark.stream.world.cpu.has_looked = True
        return mark.done

    def holds(self, stream: Any, mark: Any, queued: Any) -> bool:
        """Whether a stream, which is about to come to a mark, is to wait before it; then `advance` is called again."""
        return False

    def record(self, mark: Any, queued: Any) -> None:
        """A stream has come to a mark."""

    def wait(self, stream: Any, mark: Any, queued: Any) -> None:
        """A stream has waited for a mark, which is done."""

    def seen(self, mark: Any) -> None:
        """The host has seen that a mark is done."""

    def run_over(self) -> None:
        """All launches are done, and all hosts know it."""
