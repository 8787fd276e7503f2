"""What compiled functions do with memory: words, records of a table, lists of them, and calls by symbol.

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
from numba.extending import intrinsic, register_jitable

from .state import FULL_TABLE, NUMBERS, TABLES, TABLES_SYMBOL
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
    number, dtype = NUMBERS[name], TABLES[name].dtype
    if not dtype.fields:
        raise TypeError(f"{name}: its rows are no records")
    record = from_dtype(dtype)

    @emitting(record, types.int64)
    def row(builder, where):
        if not by_address:
            where = builder.add(table_at(builder, number), builder.mul(where, I64(dtype.itemsize)))
        return pointer(builder, where, ir.ArrayType(I8, dtype.itemsize))

    return row


def address(name: str, field: str = "") -> Any:
    """The function that gives the address of a row of a table, or of a field of it."""
    number, dtype = NUMBERS[name], TABLES[name].dtype
    begin = dtype.fields[field][1] if field and dtype.fields else 0

    @emitting(types.int64, types.int64)
    def where(builder, index):
        row = builder.mul(index, I64(dtype.itemsize))
        return builder.add(table_at(builder, number), builder.add(row, I64(begin)))

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


# --- rows of a table: those that are free, and lists of them -----------------------------------------------------

run, pools, stop = rows("run"), rows("pools"), declared("stop", None, int, int, int)


def unused(name: str) -> Any:
    """The function that gives a row that was never used; the last one, and the end of the run, if there is none."""
    pool, most = NUMBERS[name], TABLES[name].rows

    @register_jitable
    def new():
        p = pools(pool)
        p.used += 1
        if p.used >= most:
            p.used = most - 1
            stop(FULL_TABLE, pool, run(0).current)
        return p.used

    return new


def free_list(name: str) -> tuple[Any, Any]:
    """Functions that take a row of a table, which was used before or never, and give it back."""
    pool, table, new = NUMBERS[name], rows(name), unused(name)

    @register_jitable
    def take():
        row = pools(pool).free
        if row == 0:
            return new()
        pools(pool).free = table(row).next
        return row

    @register_jitable
    def give(row):
        table(row).next = pools(pool).free
        pools(pool).free = row

    return take, give


def linked(name: str, link: str = "next") -> Any:
    """The function that goes through a list, to its end or to a number < 0.

    It looks for the next row before it gives one: this one may be given back, or be put into another list.
    """
    table = rows(name)

    @register_jitable
    def each(first):
        row = first
        while row > 0:
            after = table(row)[link]
            yield row
            row = after

    return each


def appending(name: str, link: str = "next", first: str = "first", last: str = "last") -> Any:
    """The function that puts a row behind the last one of a list. first, last: fields of who has the list"""
    table = rows(name)

    @register_jitable
    def append(owner, row):
        table(row)[link] = 0
        if owner[last] != 0:
            table(owner[last])[link] = row
        else:
            owner[first] = row
        owner[last] = row

    return append


def linked_twice(name: str, link: str, back: str, first: str = "first", last: str = "last") -> tuple[Any, Any]:
    """Functions that put a row behind the last one of a list, and take it out, wherever it is."""
    table, append_once = rows(name), appending(name, link, first, last)

    @register_jitable
    def append(owner, row):
        table(row)[back] = owner[last]
        append_once(owner, row)

    @register_jitable
    def remove(owner, row):
        here = table(row)
        if here[back] != 0:
            table(here[back])[link] = here[link]
        else:
            owner[first] = here[link]
        if here[link] != 0:
            table(here[link])[back] = here[back]
        else:
            owner[last] = here[back]

    return append, remove
