"""Run a function once per rank in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from nbep.emulator import World
from nbep.emulator.engine import MODELS, Stopped, check_explained
from nbep.emulator.run import MEMORY_MODELS
from nbep.emulator.schedule.strategies import Strategy
from nbep.host.arguments import integer
from nbep.host.ranks.comm import CommGroup, InProcessComm
from nbep.host.target.base import set_current_runtime
from nbep.host.target.emulator import EmulatorRuntime
from nbep.host.target.resolve import resolve_target

ENGINES = "python", "compiled", "auto"
COMPILED_STRATEGIES = "uniform", "starved", "late"
LONG = 1_000_000  # primitive calls that Python runs in about the time of compiling: after them "auto" compiles
_run_by_python = 0


def spawn(
    fn: Callable[..., Any],
    num_ranks: int,
    target: str = "auto",
    args: Sequence[Any] = (),
    seed: int = 0,
    *,
    memory_model: str = "sc",
    on_deadlock: str = "raise",
    tracer: Any = None,
    strategy: str | Strategy = "uniform",
    num_sms: int | None = None,
    on_failure: Callable[[BaseException], object] | None = None,
    engine: str | None = None,
) -> list[Any]:
    """Run fn(comm, *args) once per rank and return the results, by rank.

    Args:
        target: "emulator", "cuda", or "auto": cuda where it can run, else the emulator
        seed: decides the order in which the emulator runs threads; the same seed replays the same run
        memory_model: "sc": stores are seen at once; "delayed": as late as their order allows, and loads early;
            "checked": at once, and two accesses to the same bytes, one of them a store, that nothing orders are an
            error
        on_deadlock: "raise", or "expire": waits that nothing can end time out, as on a GPU; "raise" lets only those
            time out that go on without a fault then
        tracer: sees every access to memory; see nbep.emulator
        strategy: how the emulator chooses who runs next: "uniform", "few_preemptions", "starved" or "late"; see
            nbep.emulator.schedule.strategies
        num_sms: the SMs of each emulated rank: so many blocks are there at once, others wait; None: no limit
        on_failure: is called with the first error, while all threads of the emulator still stand where they were
        engine: what runs kernels on the emulator. "python": Python, which explains what goes wrong. "compiled": machine
            code, many times as fast. "auto": the same where all of it is in the cache, or Python has run LONG calls in
            this process, else Python. None: what the environment variable NBEP_ENGINE says, or "python". A seed gives
            one run on all.
            What goes wrong in compiled code is run again by Python from the beginning, fn included, to explain it.

    Raises:
        ValueError: for bad arguments
        RuntimeError: if target "cuda" cannot run. The first exception of a rank ends all ranks and is raised here,
            with its own traceback and a note that names the rank.
    """
    if not callable(fn):
        raise ValueError(f"fn: got {type(fn).__name__}; must be callable")
    num_ranks, seed = integer("num_ranks", num_ranks, 1), integer("seed", seed)
    target = resolve_target(target)
    if not isinstance(memory_model, str) or memory_model not in MEMORY_MODELS:
        raise ValueError(f"memory_model: got {memory_model!r}; must be {', '.join(MEMORY_MODELS)}")
    if not isinstance(on_deadlock, str) or on_deadlock not in ("raise", "expire"):
        raise ValueError(f"on_deadlock: got {on_deadlock!r}; must be raise or expire")
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise ValueError(f"args: got {type(args).__name__}; must be a tuple or a list, what fn takes besides comm")
    if on_failure is not None and not callable(on_failure):
        raise ValueError(f"on_failure: got {type(on_failure).__name__}; must be callable, or None")
    if target == "cuda":
        from nbep.host.target.cuda.runtime import run_virtual_ranks

        return run_virtual_ranks(fn, num_ranks, args)

    options = {
        "memory_model": memory_model,
        "on_deadlock": on_deadlock,
        "strategy": strategy,
        "num_sms": None if num_sms is None else integer("num_sms", num_sms, 1),
    }
    world = World(num_ranks, seed, tracer=tracer, on_failure=on_failure, **options)
    name = engine_for(engine, memory_model, strategy, tracer)
    if name == "python":
        return _run(fn, args, world)
    from nbep.device.engine import Code
    from nbep.device.terminal import progress

    code = Code(only_kept=name == "auto" and _run_by_python < LONG, model=memory_model)
    try:
        return _run(fn, args, _compiled_world(memory_model)(num_ranks, seed, code=code, **options))
    except Stopped as stopped:
        reason = stopped
    except Exception as error:
        if name == "compiled" if type(error).__name__ == "CompileError" else on_failure is None:
            raise
        reason = None  # a host's own error: on_failure looks at threads that Python runs
    with progress("running again with Python", None):
        results = _run(fn, args, World(num_ranks, seed, on_failure=on_failure, **options))
    check_explained(reason, seed)
    return results


def engine_for(
    engine: str | None, memory_model: str, strategy: Any, tracer: Any, models: Sequence[str] = MODELS
) -> str:
    """The name of the engine that runs kernels: "python" where "auto" finds that others cannot. models: that it can

    Raises: ValueError for a name that there is not, and for "compiled" where that cannot be
    """
    name = os.environ.get("NBEP_ENGINE", "python") if engine is None else engine
    if name not in ENGINES:
        raise ValueError(f"{'NBEP_ENGINE' if engine is None else 'engine'}: got {name!r}; must be {', '.join(ENGINES)}")
    why_not = None if name == "python" else _why_not_compiled(memory_model, models, strategy, tracer)
    if name == "compiled" and why_not is not None:
        raise ValueError(f"engine: got 'compiled'; {why_not}; 'auto' takes Python then")
    return "python" if why_not is not None else name


def _compiled_world(memory_model: str) -> Any:
    from nbep.emulator.engine.checked_world import CheckedWorld
    from nbep.emulator.engine.delayed_world import DelayedWorld
    from nbep.emulator.engine.world import CompiledWorld

    return {one.model: one for one in (CompiledWorld, CheckedWorld, DelayedWorld)}[memory_model]


def _why_not_compiled(memory_model: str, models: Sequence[str], strategy: Any, tracer: Any) -> str | None:
    """Why kernels of such a run cannot be compiled; None if they can."""
    if memory_model not in models:
        return f"memory_model {memory_model!r} is interpreted"
    if tracer is not None:
        return "a tracer sees threads that Python runs"
    if strategy not in COMPILED_STRATEGIES:
        return f"strategy {strategy!r} is interpreted"
    from nbep.emulator.engine.switch import why_not

    return why_not()


def _run(fn: Callable[..., Any], args: Sequence[Any], world: Any) -> list[Any]:
    group = CommGroup(range(world.num_ranks))

    def main_of(rank: int) -> Callable[[], Any]:
        def main() -> Any:
            runtime = EmulatorRuntime(world, rank)
            set_current_runtime(runtime)
            return runtime.run(lambda: fn(InProcessComm(group, rank, runtime), *args))

        return main

    global _run_by_python
    try:
        return world.run([main_of(rank) for rank in range(world.num_ranks)])
    finally:
        _run_by_python += world.calls if type(world) is World else 0
