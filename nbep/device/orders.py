"""In which orders a thread can execute the memory instructions of a kernel, read from its PTX.

Two compilers lay out a kernel's blocks differently, merge equal ends of branches or copy them. What has to stay is the
set of sequences that a thread can execute, from the entry to a return. That is a regular language: the flow graph is an
automaton whose letters are the instructions. `only_in` finds a word that one of them has and
the other one has not: an order that is new.

The letters are loads, stores, atomics, fences, barriers and bulk copies, weak ones too: none of them may move across
another. Not among them are loads that are pure (ld.global.nc), and parameters and registers (ld.param, ld.local).
"""

import re
from collections import deque

INSTRUCTION = re.compile(
    r"(?:^|[;{])\s*(?:@!?%?\w+\s+)?((?:ld|st)\.(?!param|local|global\.nc)[\w.:]+|(?:atom|red)\.[\w.:]+|fence\.[\w.:]+"
    r"|bar\.[\w.]+|mbarrier\.[\w.:]+|cp\.async\.bulk[\w.:]*|trap)(?=[\s;])"
)
LABEL = re.compile(r"^(\$\w+):")
BRANCH = re.compile(r"^(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);")
END = re.compile(r"^(@!?%\w+\s+)?(?:ret|exit);")
Graph = list[tuple[str, tuple[int, ...]]]


def flow_graph(ptx: str) -> Graph:
    """A node for each line of the entry: its instruction, or "", and the lines that may come next. The last one ends.

    Raises: ValueError if there is a jump through a table
    """
    body = ptx[ptx.index(".entry") :]
    lines = body[body.index("\n{") : body.index("\n}")].split("\n")
    letters: list[tuple[str, str, str]] = []  # instruction, target of a jump, and whether the next line may follow
    labels: dict[str, int] = {}
    for line in map(str.strip, lines):
        if "brx.idx" in line:
            raise ValueError(f"a jump through a table: {line}")
        label, branch, end = LABEL.match(line), BRANCH.match(line), END.match(line)
        if label:
            labels[label[1]] = len(letters)
        elif branch or end:
            jump = branch or end
            assert jump is not None
            letters.append(("", branch[2] if branch else "end", "next" if jump[1] else ""))
        else:
            letters += [(found, "", "next") for found in INSTRUCTION.findall(line)]
    labels["end"] = len(letters)
    graph = [
        (letter, tuple(([labels[target]] if target else []) + ([i + 1] if follows else [])))
        for i, (letter, target, follows) in enumerate(letters)
    ]
    return [*graph, ("end", ())]


def _closed(graph: Graph, nodes) -> frozenset[int]:
    """The nodes with an instruction that can be the next one."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        letter, following = graph[waiting.pop()]
        if not letter:
            waiting += (new := set(following) - seen)
            seen |= new
    return frozenset(node for node in seen if graph[node][0])


def _steps(graph: Graph, nodes: frozenset[int]) -> dict[str, frozenset[int]]:
    letters = {graph[node][0] for node in nodes}
    return {
        letter: _closed(graph, {after for node in nodes if graph[node][0] == letter for after in graph[node][1]})
        for letter in letters
    }


def only_in(ptx: str, other: str, *, may_return: bool = False) -> list[str] | None:
    """A shortest sequence of instructions with which a thread can begin in `ptx` and not in `other`; None if none is.

    A return counts as an instruction. may_return: not where `other` goes on. numba-cuda returns where the step of a
    `range` is 0; the other compiler does not.
    """
    graphs = flow_graph(ptx), flow_graph(other)
    first = _closed(graphs[0], {0}), _closed(graphs[1], {0})
    came_from: dict = {first: None}
    waiting = deque([first])
    while waiting:
        pair = waiting.popleft()
        steps, others = _steps(graphs[0], pair[0]), _steps(graphs[1], pair[1])
        for letter, after in sorted(steps.items()):
            if letter not in others:
                if letter == "end" and may_return:
                    continue
                word = [letter]
                while came_from[pair] is not None:
                    pair, letter = came_from[pair]
                    word.insert(0, letter)
                return word
            following = after, others[letter]
            if following not in came_from:
                came_from[following] = pair, letter
                waiting.append(following)
    return None
