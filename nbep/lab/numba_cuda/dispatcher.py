"""Kernels: what @cuda.jit makes of a function."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types as python
from collections.abc import Callable
from typing import Any

from nbep.emulator.machine import errors
from nbep.emulator.machine.faults import error_at
from nbep.emulator.machine.sms import UNLIMITED
from nbep.emulator.machine.thread import CURRENT, current_thread

from . import ops
from .launch import (
    MAX_BLOCK,
    MAX_GRID,
    MAX_THREADS,
    Run,
    blocks_at_once,
    in_kernel,
    places_of,
    prepare,
)
from .loops import GRID_CELL
from .session import LOCK, current, launched, stream_of
from .types import Arr, Known, Num, Rec, Tup, dtype_of
from .unit import Unit, type_of


def _three(dims: Any, what: str, most: tuple[int, int, int]) -> tuple[int, int, int]:
    try:
        given = tuple(map(operator.index, dims)) if isinstance(dims, (tuple, list)) else (operator.index(dims),)
    except TypeError:
        raise TypeError(f"{what} must be a sequence of integers, got {dims!r}") from None
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{what} must be a sequence of 1, 2 or 3 integers, got {list(given)}")
    x, y, z = (*given, 1, 1)[:3]
    if x < 1 or y < 1 or z < 1 or x > most[0] or y > most[1] or z > most[2]:
        raise ValueError(f"{what}: {dims!r}; each must be at least 1, and at most {most}")
    return x, y, z


OURS = Num, Arr, Tup, Rec, Known


class Configured:
    """A kernel with its launch configuration."""

    def __init__(self, dispatcher: Dispatcher, grid: Any, block: Any, stream: Any, dynamic: int):
        self.dispatcher = dispatcher
        self.griddim = _three(grid, "griddim", MAX_GRID)
        self.blockdim = _three(block, "blockdim", MAX_BLOCK)
        if math.prod(self.blockdim) > MAX_THREADS:
            raise ValueError(f"blockdim: {block!r} has {math.prod(self.blockdim)} threads; at most {MAX_THREADS}")
        self.stream = stream_of(stream)
        self.sharedmem = operator.index(dynamic)

    def __call__(self, *args: Any) -> None:
        with LOCK:
            self.dispatcher.launch(self, args)


class Dispatcher:
    """What @cuda.jit makes of a function: a kernel, or a function that kernels call."""

    def __init__(
        self, function: python.FunctionType, signatures: list[Any] | None = None, device: bool = False, **options: Any
    ):
        functools.update_wrapper(self, function)
        self.py_func = function
        self.device = device
        self.declared: tuple[Any, list[Any]] | None = None
        self.sigs = signatures or []
        self.units: dict[Any, tuple[Unit, Any]] = {}
        self.targetoptions = {"device": device, **options}
        self.parsed: list[tuple[Any, list[Any]]] | None = None

    @property
    def signatures_given(self) -> list[tuple[Any, list[Any]]]:
        """What it returns and takes, of each signature that it was decorated with."""
        if self.parsed is None:
            self.parsed = [parsed(one) for one in self.sigs]
            if len(self.parsed) == 1:
                self.declared = self.parsed[0] if self.device else None
        return self.parsed

    def __getitem__(self, configuration: Any) -> Configured:
        if not isinstance(configuration, (tuple, list)) or not 2 <= len(configuration) <= 5:
            raise ValueError("must specify at least the griddim and blockdim: kernel[blocks, threads](...)")
        grid, block, *rest = configuration
        stream = rest[0] if rest else 0
        dynamic = rest[1] if len(rest) > 1 and rest[1] is not None else 0
        if self.device:
            name = self.py_func.__name__
            raise RuntimeError(f"Cannot compile a device function as a kernel: `{name}`; only kernels can be launched")
        return Configured(self, grid, block, stream, dynamic)

    def configure(self, griddim: Any, blockdim: Any, stream: Any = 0, sharedmem: int = 0, **_: Any) -> Configured:
        return self[griddim, blockdim, stream, sharedmem]

    def forall(self, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> Callable[..., None]:
        """The kernel for a number of threads, in blocks of a size that suits it."""
        if ntasks < 0:
            raise ValueError(f"Can't create ForAll with negative task count: {ntasks}")
        if ntasks == 0:
            return lambda *args: None
        size = tpb or min(128, ntasks)
        return self[-(-ntasks // size), size, stream, sharedmem]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.get() is None:
            if self.device:
                raise RuntimeError(f"`{self.py_func.__name__}` is a device function; only kernels can call it")
            raise RuntimeError(
                "Kernel launch configuration was not specified. Use the syntax:\n\n"
                "kernel_function[blockspergrid, threadsperblock](arg0, arg1, ...)\n"
            )
        return self.py_func(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self

    # --- launches ---------------------------------------------------------------------------------------------------

    def specialized(self, types: tuple[Any, ...]) -> tuple[Unit, Any]:
        """The kernel for arguments of these types."""
        found = self.units.get(types)
        if found is None:
            options = self.targetoptions
            unit = Unit(bool(options.get("debug")), options.get("fastmath"), bool(options.get("successor")))
            found = self.units[types] = unit, unit.function(self.py_func, self.types_of(types), is_kernel=True)
        return found

    def types_of(self, types: tuple[Any, ...]) -> dict[str, Any]:
        """Of each parameter."""
        named = self.bound(types).arguments.items()
        return {name: Tup(t) if isinstance(t, tuple) else t for name, t in named}

    def bound(self, args: tuple) -> inspect.BoundArguments:
        """The arguments, with defaults. Raises: TypeError if they are too many or too few"""
        signature = inspect.signature(self.py_func)
        try:
            bound = signature.bind(*args)
        except TypeError:
            count, name = len(signature.parameters), self.py_func.__name__
            what = "too many" if len(args) > count else "missing"
            raise TypeError(f"{name}: {what} arguments: takes {count}, {len(args)} given") from None
        bound.apply_defaults()
        return bound

    def launch(self, configured: Configured, args: tuple) -> None:
        if CURRENT.get() is not None:
            raise error_at(current_thread(), errors.EmulatorError, "a kernel cannot launch a kernel")
        args = self.bound(args).args
        back: list[Callable[[], None]] = []
        for extension in reversed(self.targetoptions.get("extensions") or []):
            args = tuple(extension.prepare_args(None, one, stream=configured.stream, retr=back)[1] for one in args)
        prepared = [prepare(one, back) for one in args]
        types = tuple(type_of(one) for one in prepared)
        if self.sigs:
            prepared, types = self.as_declared(prepared, types)
        unit, compiled = self.specialized(types)
        session = current()
        run = Run(session, unit, compiled, configured, prepared, types)
        if session.engine == "compiled":
            from .compiled import entry_of

            entry_of(run, True)
        of = self.types_of(types)
        named = self.bound(tuple(prepared)).arguments.items()
        values = tuple(in_kernel(one, of[name], session, name) for name, one in named)
        is_cooperative, blocks = "grid" in unit.uses, math.prod(configured.griddim)
        if is_cooperative:
            run.grid_cell = session.space.allocate(4, GRID_CELL, zero=True)
            if blocks > run.most_blocks:
                raise ValueError(
                    f"{self.py_func.__name__}: {blocks} blocks of a cooperative launch, which all wait for each other; "
                    f"at most {run.most_blocks} of this size are on the device at once: see max_cooperative_grid_blocks"
                )
        stream = configured.stream.real()
        session.order(stream)
        with session.guarded():
            launch = stream.launch(
                run, values, blocks, math.prod(configured.blockdim), run.smem_bytes, self.py_func.__name__,
                describe_shared=run.describe_shared, starts_together=is_cooperative,
            )  # fmt: skip
        launch.by_ptx = True
        name = f"{self.py_func.__module__}.{self.py_func.__qualname__}"
        launched[name] = launched.get(name, 0) + 1
        if session.options["num_sms"] is None:
            launch.share = UNLIMITED // run.most_blocks
        session.world.dims[launch.name, launch.number] = run.grid, run.block
        if is_cooperative:
            session.world.cooperative.add((launch.name, launch.number))
        if back or self.targetoptions.get("debug"):
            configured.stream.synchronize()
        for copy in back:
            copy()

    def as_declared(self, values: list[Any], types: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The arguments as a signature has them."""
        reasons = []
        for _, wanted in self.signatures_given:
            try:
                return [fitted(v, of, to) for v, of, to in zip(values, types, wanted, strict=True)], tuple(
                    _kept(of, to) for of, to in zip(types, wanted, strict=True)
                )
            except (TypeError, ValueError) as error:
                reasons.append(str(error))
        raise TypeError(f"No matching definition for argument type(s) {', '.join(map(str, types))}: {reasons}")

    # --- what tools ask for -----------------------------------------------------------------------------------------

    @property
    def signatures(self) -> list[tuple]:
        return list(self.units)

    nopython_signatures = signatures

    @property
    def overloads(self) -> dict[Any, Any]:
        there = {types: _Kernel(self, *made) for types, made in self.units.items()}
        return _Overloads(there or {(): _Kernel(self)})

    def specialize(self, *args: Any) -> Dispatcher:
        return self

    def compile(self, signature: Any = None) -> _Kernel:
        """Type it for a signature, so that errors show."""
        if signature is not None:
            arguments = signature if isinstance(signature, tuple) else parsed(signature)[1]
            types = tuple(one if isinstance(one, OURS) else type_from_numba(one) for one in arguments)
            return _Kernel(self, *self.specialized(types))
        return _Kernel(self)

    def compile_device(self, args: Any, return_type: Any = None) -> _Kernel:
        return _Kernel(self)

    @property
    def extensions(self) -> list[Any]:
        return self.targetoptions.setdefault("extensions", [])

    def disable_compile(self, val: bool = True) -> None:
        """Nothing to do: types are found when a kernel is launched."""

    def __getattr__(self, name: str) -> Any:
        if name == "inspect_sass" and self.device:
            raise RuntimeError("Cannot inspect SASS of a device function")
        if name.startswith(("inspect_", "get_")):
            raise NotImplementedError(f"{name}: the emulator makes no machine code")
        raise AttributeError(name)


class _Overloads(dict):
    def __missing__(self, key: Any) -> Any:
        return next(iter(self.values()))


class _Kernel:
    """A kernel for some types, as far as there is one without a GPU."""

    def __init__(self, dispatcher: Dispatcher, unit: Unit | None = None, compiled: Any = None):
        self.dispatcher = dispatcher
        self.unit = unit
        self.compiled = compiled
        self.cooperative = unit is not None and "grid" in unit.uses

    def __getattr__(self, name: str) -> Any:
        if name in ("fndesc", "_codelibrary", "library"):
            raise NotImplementedError(f"{name}: the emulator makes no machine code")
        raise AttributeError(name)

    @property
    def signature(self) -> Any:
        """What it takes and returns, in types of Numba."""
        returns, takes = self.dispatcher.signatures_given[0]
        if returns is None:
            names = inspect.signature(self.dispatcher.py_func).parameters
            returns = Unit().function(self.dispatcher.py_func, dict(zip(names, takes, strict=True))).returns
        return numba_type(returns)(*map(numba_type, takes))

    @property
    def _type_annotation(self) -> Any:
        variables = self.compiled.variables.items()
        return python.SimpleNamespace(
            typemap={name: numba_type(t) for name, t in variables if isinstance(t, (Num, Arr, Tup))}
        )

    def max_cooperative_grid_blocks(self, blockdim: Any, dynsmemsize: int = 0) -> int:
        """At most of a cooperative launch of this kernel."""
        threads = math.prod(_three(blockdim, "blockdim", MAX_BLOCK))
        _, end = places_of(self.unit.sites if self.unit else [], operator.index(dynsmemsize))
        successor = bool(self.dispatcher.targetoptions.get("successor"))
        return current().options["num_sms"] or blocks_at_once(threads, end, successor)


def jit(
    func_or_sig: Any = None,
    device: bool = False,
    inline: Any = "never",
    link: Any = (),
    debug: Any = None,
    opt: Any = None,
    **options: Any,
) -> Any:
    """As `numba.cuda.jit`: a decorator, or one with signatures and options."""
    if options.get("boundscheck"):
        raise NotImplementedError("bounds checking is not supported for CUDA")
    if options.get("argtypes") is not None or options.get("restype") is not None or options.get("bind") is not None:
        raise DeprecationWarning("argtypes, restype and bind are gone: pass a signature")
    if link:
        raise NotImplementedError("link: functions of C, C++ or PTX cannot run on the emulator")
    if func_or_sig is None:
        return functools.partial(jit, device=device, debug=debug, opt=opt, **options)
    if isinstance(func_or_sig, Dispatcher):
        return func_or_sig
    function = getattr(func_or_sig, "py_func", func_or_sig)
    if isinstance(function, python.FunctionType):
        return Dispatcher(function, None, device, debug=debug, opt=opt, **options)
    signatures = func_or_sig if isinstance(func_or_sig, list) else [func_or_sig]

    def decorate(function: python.FunctionType) -> Dispatcher:
        made = Dispatcher(function, signatures, device, debug=debug, opt=opt, **options)
        for returns, wanted in made.signatures_given:
            if not device and returns is not None:
                raise TypeError("CUDA kernel must have void return type.")
            if not device:
                made.specialized(tuple(wanted))
        return made

    return decorate


def declare_device(name: str, signature: Any = None, link: Any = None, **_: Any) -> Any:
    raise NotImplementedError(f"declare_device({name!r}): functions of C, C++ or PTX cannot run on the emulator")


# --- signatures of Numba, and arguments that are made to fit them -----------------------------------------------------
def parsed(signature: Any) -> tuple[Any, list[Any]]:
    """What a signature returns, None if that is nothing or open, and what it takes."""
    if isinstance(signature, str):
        import numba

        signature = eval(signature, {}, dict(vars(numba.types)) | {"void": numba.types.void})
    if isinstance(signature, tuple):
        return None, [type_from_numba(one) for one in signature]
    returns = getattr(signature, "return_type", None)
    gives = None if returns is None or str(returns) in ("none", "void") else type_from_numba(returns)
    return gives, [type_from_numba(one) for one in signature.args]


def type_from_numba(t: Any) -> Any:
    """A type of Numba as one of these."""
    if hasattr(t, "layout") and hasattr(t, "ndim"):
        return Arr(dtype_of(t.dtype), t.ndim, t.layout)
    if hasattr(t, "types") and not hasattr(t, "bitwidth"):
        return Tup(tuple(type_from_numba(one) for one in t.types))
    if getattr(t, "fields", None) is not None and hasattr(t, "aligned"):
        return Rec(dtype_of(t))
    if str(t) == "none":
        return Known(None)
    return Num(dtype_of(t))


def numba_type(t: Any) -> Any:
    """One of these types as Numba has it."""
    from numba import types
    from numba.np.numpy_support import from_dtype

    if isinstance(t, Arr):
        return types.Array(from_dtype(t.dtype), t.ndim, t.layout, readonly=t.is_const)
    if isinstance(t, Tup):
        return types.Tuple(tuple(map(numba_type, t.items)))
    if isinstance(t, (Num, Rec)):
        return from_dtype(t.dtype)
    return types.none if t == Known(None) else types.Omitted(t)


def _kept(of: Any, to: Any) -> Any:
    return Arr(to.dtype, of.ndim, of.layout, of.is_const) if isinstance(of, Arr) else to


def fitted(value: Any, of: Any, to: Any) -> Any:
    """An argument as one of a declared type."""
    if isinstance(to, Num) and isinstance(of, Num):
        if to.dtype.kind in "iub" and of.dtype.kind in "fc":
            raise TypeError(f"{of} cannot be passed as {to}")
        return ops.convert(ops.from_numpy(ops.to_numpy(value, of), of.dtype), of, to)
    if isinstance(to, Arr) and isinstance(of, Arr):
        if to.dtype != of.dtype or to.ndim != of.ndim or (to.layout != "A" and to.layout != of.layout and of.ndim):
            same_size = to.dtype.itemsize == of.dtype.itemsize and to.ndim == of.ndim and not of.dtype.names
            if not same_size or (to.dtype == of.dtype and not (of.layout == "C" and to.layout == "F" and of.ndim == 1)):
                raise TypeError(f"{of} cannot be passed as {to}")
        if to.dtype != of.dtype:  # as Numba does it for a kernel with one signature: the same bytes
            return value.view(to.dtype)
        return value
    if type(of) is type(to):
        return value
    raise TypeError(f"{of} cannot be passed as {to}")
