"""Tell LLVM that the numbers which nbep's own kernels are launched with are not negative.

They are sizes, strides and indices of 32 bits with sign, and code computes with 64. If a number may be negative,
`n // 128`, which rounds down, takes six instructions, and a product of two numbers three multiplications. If not, that
is a shift, and one multiplication. It takes low-latency dispatch on sm_90 from 83 registers to 70.

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
