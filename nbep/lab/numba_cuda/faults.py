"""What a kernel does wrong with an array, in Numba's words."""

from __future__ import annotations

from typing import Any

from nbep.emulator.machine import errors
from nbep.emulator.machine.faults import Hole, error_at, who_and_where


class Undefined:
    """What a shuffle returns that reads a lane which is not there: any value, which must decide nothing."""

    __array_ufunc__ = None

    def _same(self, *_: Any) -> Undefined:
        return self

    def _decides(self, *_: Any) -> Any:
        from nbep.emulator.machine.thread import current_thread

        raise error_at(
            current_thread(),
            errors.Divergence,
            "this depends on a value that a shuffle has read from a lane which has left the kernel, or which the block "
            "does not have: CUDA leaves open what it is",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __invert__ = __pow__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]
    __bool__ = __index__ = __int__ = __float__ = __complex__ = _decides
    __hash__ = None  # type: ignore[assignment]


UNDEFINED = Undefined()


def raised(who: Any, exception: type, where: tuple[str, str], line: int, *args: Any) -> BaseException:
    """What a kernel raises: Numba's message says where and by which thread, as far as the class takes one."""
    thread, block = [who.tx, who.ty, who.tz], [who.bx, who.by, who.bz]
    name, filename = where
    text = f"In function {name!r}, file {filename}, line {line}, tid={thread} ctaid={block}"
    try:
        return exception(f"{text}: {args[0]}" if args else text, *args[1:])
    except TypeError:
        return exception(*args)


def held(who: Any, value: Any, where: tuple[str, str], line: int, what: str) -> Any:
    """What an Optional holds."""
    if value is None:
        raise raised(who, TypeError, where, line, what)
    return value


def element(array: Any, index: tuple) -> str:
    return f"{array.name}[{', '.join(map(str, index))}]"


def bad_index(thread: Any, array: Any, index: tuple, storing: bool) -> errors.EmulatorError:
    verb = "store to" if storing else "load of"
    shape = array.nd.shape
    what = f"{verb} {element(array, index)}: out of bounds, the shape of `{array.name}` is {shape}"
    if len(index) > len(shape):
        what = f"{verb} {element(array, index)}: `{array.name}` has {len(shape)} axes"
    return error_at(thread, errors.OutOfBounds, what)


def bad_store(thread: Any, array: Any, index: tuple, value: Any) -> errors.EmulatorError:
    if value is UNDEFINED:
        return error_at(
            thread,
            errors.Divergence,
            f"store to {element(array, index)} of a value that a shuffle has read from a lane which has left the "
            "kernel, or which the block does not have: CUDA leaves open what it is",
        )
    return bad_index(thread, array, index, True)


def unwritten(thread: Any, array: Any, index: tuple) -> errors.EmulatorError:
    """A load of an element that no thread has written."""
    what = f"load of {element(array, index)}, which no thread has written"
    allocation = array.space.allocation
    hole = None
    if allocation is not None:
        hole = Hole(thread, allocation, array.offset(thread, index, False), array.nd.itemsize)
    else:
        what += ": a local array has no values at first"
    return errors.Uninitialized(what, *who_and_where(thread), hole)


def read_only(thread: Any, array: Any, index: tuple) -> errors.EmulatorError:
    return error_at(thread, errors.ReadOnly, f"store to {element(array, index)}: the array is constant in kernels")
