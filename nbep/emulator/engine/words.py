"""What compiled functions do with memory: words, records of a table, and calls of each other by symbol.

A run's tables are found through one symbol, `nbep_tables`: an array with the address of each. So the code belongs to no
run, and can be kept in a file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic

from .state import TABLES, TABLES_SYMBOL
from .switch import SWITCH

I1, I8, I32, I64, F32, F64 = (
    ir.IntType(1),
    ir.IntType(8),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.DoubleType(),
)
VOID = ir.VoidType()
LLVM_TYPES = {types.int64: I64, types.float32: F32, types.float64: F64, types.none: VOID}
NUMBA_TYPES = {int: types.int64, float: types.float64, type(None): types.none}


def emitting(result: Any, *arguments: Any) -> Callable[[Callable], Any]:
    """Make a function that compiled code calls of one that emits LLVM's instructions: emit(builder, *values)."""

    def make(emit: Callable) -> Any:
        def generate(context, builder, signature, values):
            made = emit(builder, *values)
            return context.get_dummy_value() if made is None else made

        return with_names([f"a{i}" for i in range(len(arguments))], lambda *_: (result(*arguments), generate))

    return make


def with_names(names: list[str], typer: Callable) -> Any:
    """An intrinsic whose arguments have these names: Numba looks at them."""
    listed = ", ".join(names)
    space = {"typer": typer}
    exec(f"def made(context{', ' * bool(names)}{listed}): return typer({listed})", space)
    return intrinsic(space["made"])


def call(builder, symbol: str, result: ir.Type, values: list) -> Any:
    """A call of a function of another object."""
    function_type = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, symbol), values)


def pointer(builder, address, to: ir.Type = I8):
    return builder.inttoptr(address, to.as_pointer())


def table_at(builder, number: int):
    """The address of a table."""
    tables = builder.module.globals.get(TABLES_SYMBOL) or ir.GlobalVariable(builder.module, I64, TABLES_SYMBOL)
    return builder.load(builder.gep(tables, [I64(number)]))


def _getter(width: int, signed: bool) -> Any:
    @emitting(types.int64, types.int64)
    def get(builder, address):
        word = builder.load(pointer(builder, address, ir.IntType(width)))
        return word if width == 64 else builder.sext(word, I64) if signed else builder.zext(word, I64)

    return get


def _putter(width: int) -> Any:
    @emitting(types.none, types.int64, types.int64)
    def put(builder, address, value):
        word = ir.IntType(width)
        builder.store(value if width == 64 else builder.trunc(value, word), pointer(builder, address, word))

    return put


get_u8, get_s16, get_s32, get_s64 = _getter(8, False), _getter(16, True), _getter(32, True), _getter(64, True)
put_u8, put_s16, put_s32, put_s64 = map(_putter, (8, 16, 32, 64))


@emitting(types.int64, types.int64)
def low_u32(builder, x):
    return builder.and_(x, I64(0xFFFFFFFF))


@emitting(types.none, types.int64, types.int64, types.int64)
def copy_bytes(builder, target, source, number):
    cgutils.raw_memmove(builder, pointer(builder, target), pointer(builder, source), number, 1)


@emitting(types.none, types.int64, types.int64, types.int64)
def fill_bytes(builder, target, value, number):
    kinds = [I8.as_pointer(), I64]
    fill = builder.module.declare_intrinsic("llvm.memset", kinds)
    builder.call(fill, [pointer(builder, target), builder.trunc(value, I8), number, I1(0)])


@emitting(types.none, types.int64, types.int64)
def switch_stacks(builder, kept, new):
    """Go on with a stack pointer; kept: where that of this thread is kept."""
    call(builder, SWITCH, VOID, [pointer(builder, kept, I64), new])


@emitting(types.int64, types.int64)
def call_kernel(builder, entry):
    """Run a kernel to its end; 0, or another number if it has raised something."""
    return builder.call(pointer(builder, entry, ir.FunctionType(I64, [])), [])


def rows(name: str, by_address: bool = False) -> Any:
    """The function that gives a row of a table, or what is like one at an address: a record with fields."""
    number, dtype = list(TABLES).index(name), TABLES[name].dtype
    if not dtype.fields:
        raise TypeError(f"{name}: its rows are no records")
    record = from_dtype(dtype)

    @emitting(record, types.int64)
    def row(builder, where):
        if not by_address:
            where = builder.add(table_at(builder, number), builder.mul(where, I64(dtype.itemsize)))
        return pointer(builder, where, ir.ArrayType(I8, dtype.itemsize))

    return row


def address(name: str) -> Any:
    """The function that gives the address of a row of a table."""
    number, size = list(TABLES).index(name), TABLES[name].dtype.itemsize

    @emitting(types.int64, types.int64)
    def where(builder, index):
        return builder.add(table_at(builder, number), builder.mul(index, I64(size)))

    return where


def _asking(model: str) -> Any:
    """Whether this is compiled for a model. `build` says so: what hangs on it is not there for others."""

    @emitting(types.int64)
    def is_model(builder):
        return call(builder, f"nbep_is_{model}", I64, [])

    return is_model


is_checked, is_delayed = _asking("checked"), _asking("delayed")


class Compiled(NamedTuple):
    """A function that is compiled once: all others, and Python, call it by its symbol."""

    symbol: str
    function: Callable
    result: Any
    arguments: tuple[Any, ...]


COMPILED: dict[str, Compiled] = {}


def compiled(function: Callable) -> Any:
    """Record a function of integers; its annotations say so. What is left in its place calls its symbol."""
    hints = get_type_hints(function)
    kinds = [hints[name] for name in inspect.signature(function).parameters]
    symbol = f"nbep_{function.__name__}"
    assert symbol not in COMPILED, f"{symbol}: two functions have this name"
    COMPILED[symbol] = Compiled(
        symbol, function, NUMBA_TYPES[hints["return"]], tuple(NUMBA_TYPES[kind] for kind in kinds)
    )
    return declared(function.__name__, hints["return"], *kinds)


def declared(name: str, result: Any, *kinds: type) -> Any:
    """A call of a function that another file has compiled."""
    returned = NUMBA_TYPES[result or type(None)]

    @emitting(returned, *(NUMBA_TYPES[kind] for kind in kinds))
    def calling(builder, *values):
        made = call(builder, f"nbep_{name}", LLVM_TYPES[returned], list(values))
        return None if returned == types.none else made

    return calling
