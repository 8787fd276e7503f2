"""The engine: kernels compiled by Numba for the CPU, each thread a coroutine with a stack of its own.

 switch     stacks and the switch between them, in module assembly
 words      what compiled functions do with memory: words, records of a table, lists of them, calls by symbol
 state      the tables that a run consists of
 schedule   who runs next, as `schedule.scheduler` decides it
 cells      cells that threads poll, and who wakes them
 access     loads, stores and atomics
 meeting    collectives of warps, and barriers
 copies     mbarriers and bulk copies
 knowledge, notes, races, signals, copy_signals, host_signals: for `checked`, what threads know of each other, who has
            accessed which bytes, whether that is a race, and what stores, meetings, copies and hosts tell
 pending, delayed: for `delayed`, stores on their way, and what threads see of them and of older values
 build      Numba's code of functions, as objects that need no Numba
 stand_ins  what Python sees of the tables in place of the scheduler's lists
 world      a run whose threads are compiled; checked_world: and checked; delayed_world: with late stores

It runs all memory models, and makes the choices that the interpreted emulator makes: a seed gives one run
on both. It reports nothing: what goes wrong on it is run again interpreted, which explains it. See
records/decisions/0018.

All but this file, `switch` and `state` import llvmlite or numba.
"""

from nbep.emulator.machine.errors import EmulatorError

MODELS = "sc", "checked", "delayed"  # memory models: of each there is a machine, and kernels that call it


class Stopped(BaseException):
    """Compiled code has met what it cannot explain, or cannot do. must_fail: the same run fails when it is interpreted

    It is no Exception, so that a host's code does not take it for one of its own.
    """

    def __init__(self, reason: str, must_fail: bool = False):
        super().__init__(reason)
        self.must_fail = must_fail


class EngineError(EmulatorError):
    """Something that compiled kernels have met, and interpreted ones have not. One of the two is wrong."""


def check_explained(stopped: Stopped | None, seed: int) -> None:
    """Raises: EngineError if Python has run to its end what compiled code has stopped as a failure."""
    if stopped is not None and stopped.must_fail:
        raise EngineError(f"compiled kernels, seed {seed}: {stopped}; run by Python, the same seed fails nowhere")
