"""Whether a compiler lets threads execute memory instructions in an order that a kernel does not have.

 Python --numba-cuda-------> LLVM --NVVM--> PTX       branch for branch what the source says
 Python --numba-cuda-mlir--> LLVM --NVVM--> PTX       blocks merged, copied, turned into selects
                              ^
                              compared here; NVVM moves no inline PTX that has a side effect across another one

Compared are the sequences of inline PTX with a side effect that a thread can execute, from the entry to a return. They
are a regular language: the flow graph, with the calls in it expanded, is an automaton whose letters are these
instructions. What else touches memory of other threads, and calls of other modules, are letters too.

numba-cuda's text comes before any optimization, so it has every path of the source, also those that no thread takes.
A path that it lacks is one that the source does not have.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

FUNCTION = re.compile(r'^define [^@]*@"?([^\s"(]+)"?\(.*?\{$(.*?)^\}', re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r'^define (?:ptx_kernel )?void @"?([^\s"(]+)', re.MULTILINE)
LABEL = re.compile(r'^(?:; <label>:)?"?([-\w.$]+)"?:')
TARGET = re.compile(r'label %"?([-\w.$]+)"?')
ASM = re.compile(r'\basm +(sideeffect )?("[^"]*"), ?("[^"]*")')
CALL = re.compile(r'\bcall [^@"]*@"?([^\s"(]+)"?\(')
SHARED_ACCESS = re.compile(r"(?:^|= )((?:atomicrmw|cmpxchg|fence) .*|(?:store|load) (?:volatile|[^(]*addrspace\().*)")
RAISED = re.compile(r"ret i32 (?!0\b)")  # numba-cuda's functions return a status; nbep's kernels raise nothing
Graph = list[tuple[str, tuple[int, ...]]]


class LostOrder(RuntimeError):
    """A compiler lost an order of memory instructions: the kernel is not run."""

    def __init__(self, what: str):
        super().__init__(
            f"the compiler lost an order of memory instructions, so the kernel is not run by it: {what}, which the "
            f"source does not say; use NBEP_COMPILER=numba-cuda"
        )


class Function(NamedTuple):
    """A node for each line that matters: its instruction or the function that it calls, and where it goes if not on."""

    nodes: list[tuple[str, str, tuple[str, ...] | None]]
    labels: dict[str, int]

    @classmethod
    def read(cls, body: str) -> "Function":
        function = cls([], {})
        body = re.sub(r"\[\n[^]]*\]", lambda table: table[0].replace("\n", " "), body)  # of a switch
        for line in map(str.strip, body.split("\n")):
            label = LABEL.match(line)
            if label:
                function.labels[label[1]] = len(function.nodes)
            else:
                function.nodes.extend(_node(line))
        return function


def _node(line: str) -> Iterator[tuple[str, str, tuple[str, ...] | None]]:
    asm, call, access = ASM.search(line), CALL.search(line), SHARED_ACCESS.search(line)
    if line.startswith(("br ", "switch ")):
        yield "", "", tuple(TARGET.findall(line))
    elif line.startswith("ret"):
        yield "", "", () if RAISED.match(line) else ("end",)
    elif line.startswith("unreachable"):
        yield "", "", ()
    elif asm:
        if asm[1]:
            yield f"{asm[2]} ({asm[3]})", "", None
    elif call:
        if not call[1].startswith("llvm."):
            yield "", call[1], None
    elif access:
        yield access[1], "", None


def flow_graph(text: str) -> Graph:
    """A node for each instruction of the kernel, or "", and the nodes that may come next. It begins with the first."""
    functions = {name: Function.read(body) for name, body in FUNCTION.findall(text)}
    silent: dict[str, bool] = {}
    graph: Graph = []

    def is_silent(name: str) -> bool:
        if name not in silent:
            silent[name] = name in functions and not any(
                letter or (callee and not is_silent(callee)) for letter, callee, _ in functions[name].nodes
            )
        return silent[name]

    def expand(name: str, after: int | None) -> int:
        """Append the function; its return leads to `after`."""
        nodes, labels = functions[name]
        first, end = len(graph), len(graph) + len(nodes)
        graph.extend(("", ()) for _ in nodes)
        graph.append(("end", ()) if after is None else ("", (after,)))
        for at, (letter, callee, targets) in enumerate(nodes, first):
            if targets is not None:
                graph[at] = "", tuple(end if target == "end" else first + labels[target] for target in targets)
            elif callee in functions and not is_silent(callee):
                graph[at] = "", (expand(callee, at + 1),)
            else:
                graph[at] = letter or ("" if is_silent(callee) else callee), (at + 1,)
        return first

    entry = ENTRY.search(text)
    assert entry is not None
    expand(entry[1], None)
    return graph


class _Words:
    """The words of a graph, step by step."""

    def __init__(self, text: str):
        self.graph = flow_graph(text)
        self.begin = self._closed({0})
        self._steps: dict[frozenset[int], dict[str, frozenset[int]]] = {}

    def _closed(self, nodes: set[int]) -> frozenset[int]:
        """The nodes with an instruction that can be the next one."""
        seen, waiting = set(nodes), list(nodes)
        while waiting:
            letter, following = self.graph[waiting.pop()]
            if not letter:
                waiting += (new := set(following) - seen)
                seen |= new
        return frozenset(node for node in seen if self.graph[node][0])

    def steps(self, nodes: frozenset[int]) -> dict[str, frozenset[int]]:
        """Instruction -> where one is after it."""
        if nodes not in self._steps:
            after: dict[str, set[int]] = {}
            for node in sorted(nodes):
                letter, following = self.graph[node]
                after.setdefault(letter, set()).update(following)
            self._steps[nodes] = {letter: self._closed(following) for letter, following in after.items()}
        return self._steps[nodes]


def only_in(text: str, other: str) -> list[str] | None:
    """A shortest sequence of instructions with which a thread can begin in `text` and not in `other`; None if none is.

    Both are LLVM's. A return counts as an instruction.
    """
    words, others = _Words(text), _Words(other)
    first = words.begin, others.begin
    came_from: dict = {first: None}
    waiting = deque([first])
    while waiting:
        pair = waiting.popleft()
        known = others.steps(pair[1])
        for letter, after in sorted(words.steps(pair[0]).items()):
            if letter not in known:
                word = [letter]
                while came_from[pair] is not None:
                    pair, letter = came_from[pair]
                    word.insert(0, letter)
                return word
            following = after, known[letter]
            if following not in came_from:
                came_from[following] = pair, letter
                waiting.append(following)
    return None


def check_orders(text: str, other: str) -> None:
    """That LLVM's text of a kernel has no order that `other` lacks, and no inline PTX with other marks.

    Raises: LostOrder with what is new
    """
    new = sorted(set(ASM.findall(text)) - set(ASM.findall(other)))
    if new:
        effect, ptx, constraints = new[0]
        raise LostOrder(f"{ptx} became ({constraints}), {'with' if effect else 'without'} a side effect")
    word = only_in(text, other)
    if word is not None:
        raise LostOrder(f"a thread can execute {', then '.join(word[-3:])} as its number {len(word)}")
