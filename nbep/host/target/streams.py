"""Streams of a target, and points in them."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Event(ABC):
    """A point in a stream."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the stream has got there."""

    @abstractmethod
    def current_stream_wait(self) -> None:
        """Hold back the caller's current stream until the event is done. On the emulator: wait for it."""


class PastEvent(Event):
    """A point that is behind everything: nothing was ever launched before it."""

    done = True

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class Stream(ABC):
    """Launches run in order within a stream."""

    name: str

    @property
    @abstractmethod
    def key(self) -> object:
        """Equal for objects that stand for the same stream."""

    @property
    def is_capturing(self) -> bool:
        """Whether it records work for later instead of doing it (a CUDA graph)."""
        return False

    @abstractmethod
    def record(self, event: Event | None = None) -> Event:
        """An event at the stream's present end. event: one to record again, for those who wait from now on."""

    def hand_over(self) -> Event:
        """As `record`, and the caller's current stream waits for the event at once."""
        event = self.record()
        event.current_stream_wait()
        return event

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Later work of this stream starts after the event."""

    @abstractmethod
    def wait_current_stream(self) -> None:
        """Later work of this stream starts after what the caller's current stream holds now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the caller until the stream is empty."""

    @abstractmethod
    def close(self) -> None:
        """Give the stream back. It is empty."""
