"""Keep loops as they are written: tell LLVM to unroll none of them on its own.

Left alone, NVVM unrolls every loop with a run-time trip count four times, inline PTX included. For `dispatch` that
makes seven copies of the 16-byte copy loop, 128 registers instead of 76, and spills at 768 threads a block. Where a
kernel wants several accesses in flight, its source says so (`protocols.copies.UNROLL`).

A loop is recognized by its back edge: a branch to a block that stands before it in the function.
"""

import re

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
