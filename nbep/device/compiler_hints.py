"""Hints to LLVM beside the code: which numbers are not negative, and that loops stay as they are written.

The numbers that nbep's own kernels are launched with are sizes, strides and indices of 32 bits with sign, and code
computes with 64. If a number may be negative, `n // 128`, which rounds down, takes six instructions, and a product of
two numbers three multiplications. If not, that is a shift, and one multiplication. It takes low-latency dispatch on
sm_90 from 83 registers to 70.

A launch on the emulator checks it; see nbep.host.target.launches. A kernel from elsewhere may get any numbers.
"""

import re
from collections.abc import Sequence

from .types import Param

# One compiler names the parameters and the first block, the other one does not.
KERNEL = re.compile(r"^define (?:ptx_kernel )?void [^(]*\(([^)]*\))[^{]*\{\n(?:entry:\n)?", re.MULTILINE)
ARGUMENT = re.compile(r'\b(i32|i64|float)(?: (%"[^"]+"|%\d+))?(?=[,)])')


def is_size(param: Param) -> bool:
    """Whether a parameter of an own kernel is a number that is not negative."""
    return param.type.code != "f" and not param.type.is_address


def assume_sizes(llvm_ir: str, params: Sequence[Param]) -> str:
    """The text of the LLVM module of a kernel with an assumption for each of its numbers, where the kernel begins.

    Raises: ValueError if the kernel has other parameters
    """
    (first,) = KERNEL.finditer(llvm_ir)
    arguments = [(kind, name or f"%{i}") for i, (kind, name) in enumerate(ARGUMENT.findall(first[1]))]
    if len(arguments) != len(params):
        raise ValueError(f"a kernel of {len(params)} parameters has {len(arguments)} in LLVM")
    lines = []
    for i, ((kind, name), param) in enumerate(zip(arguments, params, strict=True)):
        if is_size(param):
            lines.append(f'  %"size.{i}" = icmp sge {kind} {name}, 0')
            lines.append(f'  call void @llvm.assume(i1 %"size.{i}")')
    if not lines:
        return llvm_ir
    begin = first.end()
    return "\n".join([llvm_ir[:begin] + lines[0], *lines[1:], llvm_ir[begin:], "declare void @llvm.assume(i1)\n"])


# --- Keep loops as they are written: tell LLVM to unroll none of them on its own --------------------------------------
# Left alone, NVVM unrolls every loop with a run-time trip count four times, inline PTX included. For `dispatch` that
# makes seven copies of the 16-byte copy loop, 128 registers instead of 76, and spills at 768 threads a block. Where a
# kernel wants several accesses in flight, its source says so (`protocols.copies.UNROLL`).
#
# A loop is recognized by its back edge: a branch to a block that stands before it in the function.


LABEL = re.compile(r'^(?:; <label>:)?"?([-\w.$]+)"?:')  # LLVM 7 writes the second form where a block has no name
TARGET = re.compile(r'label %"?([-\w.$]+)"?')
NODE = re.compile(r"^!(\d+) = ", re.MULTILINE)


def keep_loops(llvm_ir: str) -> str:
    """The text of an LLVM module with `llvm.loop.unroll.disable` at every back edge."""
    next_node = max((int(number) for number in NODE.findall(llvm_ir)), default=-1) + 1
    lines = []
    nodes = []
    passed: set[str] = set()
    for line in llvm_ir.split("\n"):
        if line.startswith("define "):
            passed = set()
        label = LABEL.match(line)
        if label:
            passed.add(label.group(1))
        if line.lstrip().startswith("br ") and passed.intersection(TARGET.findall(line)):
            # A loop's node names itself first, which keeps it distinct from those of other loops.
            nodes.append(f"!{next_node} = distinct !{{!{next_node}, !{next_node + 1}}}")
            nodes.append(f'!{next_node + 1} = !{{!"llvm.loop.unroll.disable"}}')
            line += f", !llvm.loop !{next_node}"
            next_node += 2
        lines.append(line)
    return "\n".join(lines + nodes)
