"""Stacks, and the switch between them.

 higher addresses   | stack of thread 1 | guard | stack of thread 0 | guard |   lower ones
                                                    grows this way ->

A guard cannot be accessed: a thread that overflows its stack is stopped at once. `overflows_caught` makes that a fault
of the thread, as if it had met one in a primitive.

A thread that does not run is its stack pointer, below which the registers lie that the calling convention has a
function preserve. Source: System V ABI for x86-64, 3.2.1; Procedure Call Standard for the Arm 64-bit Architecture, 6.1
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

STACK_BYTES = 1 << 16
GUARD_BYTES = 1 << 14  # no frame of a kernel is larger, so none steps over it
STACK_PITCH = STACK_BYTES + GUARD_BYTES
# Each stack and each guard is a mapping of its own, of which Linux gives a process 65,530.
MOST_STACKS = 30_720
PROT_NONE = 0
# MAP_NORESERVE of Linux: a run touches little of what it may use
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)

SWITCH = "nbep_switch"
# switch(where to keep the stack pointer, the one to go on with)
ASSEMBLY = {
    "x86_64": """
pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
movq %rsp, (%rdi); movq %rsi, %rsp
popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; retq
""",
    "aarch64": """
sub sp, sp, #160
stp x19, x20, [sp, #0]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]
stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
mov x9, sp; str x9, [x0]; mov sp, x1
ldp x19, x20, [sp, #0]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]
ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
add sp, sp, #160; ret
""",
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # what some systems call them
# Bytes of a thread's first stack pointer to the top, and to the word that its first switch returns to.
SAVED_BYTES = {"x86_64": (64, 48), "aarch64": (160, 88)}


def machine() -> str:
    return MACHINES.get(platform.machine(), platform.machine())


def why_not() -> str | None:
    """Why threads cannot have stacks of their own here; None if they can."""
    if sys.platform not in ("linux", "darwin"):
        return f"there is no switch of stacks for {sys.platform}: Linux and macOS have one"
    if machine() not in ASSEMBLY:
        return f"there is no switch of stacks for {machine()}: {' and '.join(ASSEMBLY)} have one"
    return None


@cache
def switch_module() -> str:
    """The switch as LLVM's text: assembly, and a declaration."""
    symbol = "_" + SWITCH if sys.platform == "darwin" else SWITCH
    body = ASSEMBLY[machine()].replace("\n", ";").split(";")
    lines = [".text", f".globl {symbol}", ".p2align 4", f"{symbol}:", *(line.strip() for line in body if line.strip())]
    return "".join(f'module asm "{line}"\n' for line in lines) + f"declare void @{SWITCH}(ptr, i64)\n"


class Stacks:
    """One for each thread, by its number, from 1. Those that are used once stay accessible."""

    def __init__(self, number: int = MOST_STACKS):
        self.number = number
        self._memory = mmap.mmap(-1, STACK_PITCH * number, FLAGS, PROT_NONE)
        self.begin = _address(self._memory)
        self._num_open = 0

    def open(self, up_to: int) -> bool:
        """Let the stacks of all threads below a number be used; whether the system does."""
        for i in range(self._num_open, up_to):
            begin = self.begin + i * STACK_PITCH + GUARD_BYTES
            if _libc().mprotect(ctypes.c_void_p(begin), STACK_BYTES, mmap.PROT_READ | mmap.PROT_WRITE):
                return False
            self._num_open = i + 1
        return True

    def prepare(self, first: int, count: int, entry: int) -> Any:
        """The stack pointers of threads that begin with a function of no arguments, which never returns."""
        import numpy as np

        size, at = SAVED_BYTES[machine()]
        threads = np.arange(first, first + count)
        # Threads begin at different places of a page, so that their frames do not share the lines of a cache.
        pointers = ((self.begin + (threads + 1) * STACK_PITCH - 64 - (threads & 15) * 192) & ~15) - size
        all_words: Any = (ctypes.c_int64 * (len(self._memory) // 8)).from_address(self.begin)
        words, where = np.frombuffer(all_words, np.int64), (pointers - self.begin) // 8
        words[where[:, None] + np.arange(size // 8)] = 0
        words[where + at // 8] = entry
        return pointers


# --- overflows ---------------------------------------------------------------------------------------------------
# The handler of SIGSEGV runs on a stack of its own, and leaves it by a switch to the hub. A fault that is no thread's
# goes to the handler that was there before.

SIGSEGV, SIGBUS = 11, 10
OVERFLOW_SIGNAL = SIGBUS if sys.platform == "darwin" else SIGSEGV
FAULT_ADDRESS = 24 if sys.platform == "darwin" else 16  # where siginfo_t has it
HANDLER_BYTES = 1 << 16


class Action(ctypes.Structure):
    """The system's struct sigaction."""

    if sys.platform == "darwin":
        _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_uint32), ("flags", ctypes.c_int))
    else:
        _fields_ = (
            ("handler", ctypes.c_void_p),
            ("mask", ctypes.c_uint64 * 16),
            ("flags", ctypes.c_int),
            ("restorer", ctypes.c_void_p),
        )


class SignalStack(ctypes.Structure):
    """Its stack_t."""

    if sys.platform == "darwin":
        _fields_ = (("begin", ctypes.c_void_p), ("size", ctypes.c_size_t), ("flags", ctypes.c_int))
    else:
        _fields_ = (("begin", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


# SA_SIGINFO, SA_ONSTACK, SA_NODEFER
ACTION_FLAGS = 0x40 | 0x1 | 0x10 if sys.platform == "darwin" else 0x4 | 0x08000000 | 0x40000000


@contextmanager
def overflows_caught(handler: int, before: Action) -> Iterator[None]:
    """Let a compiled function handle faults of memory; before: becomes what has handled them."""
    memory = mmap.mmap(-1, HANDLER_BYTES)
    stack, old_stack = SignalStack(begin=_address(memory), size=HANDLER_BYTES), SignalStack()
    libc = _libc()
    libc.sigaltstack(ctypes.byref(stack), ctypes.byref(old_stack))
    libc.sigaction(OVERFLOW_SIGNAL, ctypes.byref(Action(handler=handler, flags=ACTION_FLAGS)), ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaction(OVERFLOW_SIGNAL, ctypes.byref(before), None)
        libc.sigaltstack(ctypes.byref(old_stack), None)


def _address(memory: mmap.mmap) -> int:
    import numpy as np

    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
