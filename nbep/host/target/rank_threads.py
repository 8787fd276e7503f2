"""Ranks of `nbep.spawn` that use torch: each runs in a thread of Python's own, one at a time.

 greenlet of the rank          its thread
 go on ----------------------> calls nbep, torch; torch runs a backward pass
 host_wait(...), other ranks <---- waits; the thread stands still
 go on ----------------------> ...

What torch keeps for a thread is then a rank's own: gradients on or off, the modes and hooks of `with` statements, and
the engine of the backward pass, which takes what another rank of its thread asks for as a part of its own work. The
thread begins with the modes of the one that called spawn. The order of a run is the same as without threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import copy_context
from threading import Semaphore, Thread, get_ident
from typing import Any

from nbep.emulator.schedule.scheduler import Host, running_host, threads_of_hosts


class RankThread:
    """A thread that calls `function` for the rank whose greenlet calls `run`."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._to_thread, self._to_greenlet = Semaphore(0), Semaphore(0)
        self._asked: Callable[[], Any] | None = None  # what the greenlet is to do for the thread; None: it has ended
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> Any:
        """What the function returns. Called in the rank's greenlet, which does what the thread asks for meanwhile."""
        host = running_host()
        assert host is not None
        thread = Thread(target=copy_context().run, args=(self._main, host, _modes()), name=f"rank {host.rank}")
        thread.daemon = True
        thread.start()
        self._to_greenlet.acquire()
        while self._asked is not None:
            self._error = None
            try:
                self._result = self._asked()
            except BaseException as error:  # also that of a rank that has ended the run
                self._error = error
            self._to_thread.release()
            self._to_greenlet.acquire()
        thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def ask(self, what: Callable[[], Any]) -> Any:
        """What the greenlet gets of `what()`. Called in the thread."""
        self._asked = what
        self._to_greenlet.release()
        self._to_thread.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def _main(self, host: Host, modes: Callable[[], None]) -> None:
        threads_of_hosts[get_ident()], host.thread = host, get_ident()
        error = result = None
        try:
            modes()
            result = self._function()
        except BaseException as caught:
            error = caught
        del threads_of_hosts[get_ident()]
        host.thread = None
        self._asked, self._result, self._error = None, result, error
        self._to_greenlet.release()


def _modes() -> Callable[[], None]:
    """What gives another thread the modes that torch has in this one."""
    torch: Any = sys.modules["torch"]
    from torch.overrides import _get_current_function_mode_stack, _push_mode
    from torch.utils import _python_dispatch as dispatch

    with_gradients, in_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    functions, dispatches = _get_current_function_mode_stack(), dispatch._get_current_dispatch_mode_stack()

    def begin() -> None:
        if in_inference:
            torch.inference_mode().__enter__()
        torch._C._set_grad_enabled(with_gradients)
        for mode in functions:
            _push_mode(mode)
        for mode in dispatches:
            dispatch._push_mode(mode)

    return begin
