"""What is to be given back together with the other ranks, and what happens if one of them does not come to that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from nbep.host.ranks.timeouts import PeerTimeout


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
