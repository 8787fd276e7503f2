"""Every release has its acquire: `# PAIR <tag>` stands at both ends, and what stands there orders memory.

The publishing end is a release store or atomic, or a relaxed one behind a fence of its own function. The observing end
is an acquire load, or the return value of an acquiring atomic ("both ends" on one line).
"""

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from table import LINES

import nbep.device.primitives as primitives

ROOT = Path(__file__).resolve().parents[2]
NBEP = ROOT / "nbep"
TAG = re.compile(r"# PAIR ([a-z0-9-]+)(.*)$")
PUBLISHES = re.compile(r"(?:st|atom_\w+)_(?:release|acq_rel)_(?P<scope>cta|gpu|sys)")
OBSERVES = re.compile(r"(?:ld|atom_\w+)_(?:acquire|acq_rel)_(?P<scope>cta|gpu|sys)")
FENCED = re.compile(r"(?:st|atom_\w+)_(?:relaxed|volatile)_(?P<scope>cta|gpu|sys)")
FENCE = re.compile(r"fence_acq_rel_(?P<scope>cta|gpu|sys)")
KERNEL_FILES = [
    path for folder in ("kernels", "protocols", "network") for path in sorted((NBEP / "device" / folder).rglob("*.py"))
]


def path_id(path: Path) -> str:
    return str(path.relative_to(NBEP / "device").with_suffix(""))


class End(NamedTuple):
    where: str
    publishes: bool
    observes: bool
    scope: str | None


def primitive_calls(node: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of the primitives that are called inside a node, or passed on to be called."""
    named = [
        (used.lineno, ast.unparse(used).removeprefix("ptx."))
        for used in ast.walk(node)
        if isinstance(used, ast.Name | ast.Attribute)
    ]
    return sorted(use for use in named if hasattr(primitives, use[1]))


def classify(calls: list[tuple[int, str]], line: int, where: str) -> End:
    """What the primitives of one line do, given all calls of its function."""
    names = [name for number, name in calls if number == line]
    publishes = [found for name in names if (found := PUBLISHES.match(name))]
    observes = [found for name in names if (found := OBSERVES.match(name))]
    if any(FENCED.match(name) for name in names):
        publishes += [found for number, name in calls if number < line and (found := FENCE.match(name))]
    scopes = {found["scope"] for found in publishes + observes}
    return End(where, bool(publishes), bool(observes), scopes.pop() if len(scopes) == 1 else None)


def pairs() -> dict[str, list[End]]:
    """The ends of every tag in nbep/."""
    ends = defaultdict(list)
    for path in sorted(NBEP.rglob("*.py")):
        text = path.read_text()
        tree = None
        for number, line in enumerate(text.splitlines(), 1):
            found = TAG.search(line)
            if not found:
                continue
            tree = tree or ast.parse(text)
            functions = [
                f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.lineno <= number <= f.end_lineno
            ]
            assert functions, f"{path}:{number}: a PAIR tag outside a function"
            end = classify(primitive_calls(functions[-1]), number, f"{path.relative_to(NBEP)}:{number}")
            ends[found[1]].append(end)
            if "both ends" in found[2]:
                assert end.publishes, f"{end.where} is marked as both ends"
                assert end.observes, f"{end.where} is marked as both ends"
    return ends


PAIRS = pairs()


def test_the_protocols_have_pairs():
    tags = {"barrier-signal", "dispatch-tail", "combine-tail", "combine-shared-tail", "network-amo"}
    assert tags <= set(PAIRS)


@pytest.mark.parametrize("tag", PAIRS)
def test_pair_has_a_publishing_and_an_observing_end(tag):
    ends = PAIRS[tag]
    assert any(end.publishes for end in ends), f"no release carries {tag}: {ends}"
    assert any(end.observes for end in ends), f"no acquire carries {tag}: {ends}"
    assert all(end.publishes or end.observes for end in ends), f"a line tagged {tag} orders nothing: {ends}"


@pytest.mark.parametrize("tag", PAIRS)
def test_pair_has_one_scope(tag):
    scopes = {end.scope for end in PAIRS[tag]}
    assert len(scopes) == 1, f"{tag} pairs different scopes: {PAIRS[tag]}"
    assert scopes != {None}, f"{tag} pairs different scopes: {PAIRS[tag]}"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=path_id)
def test_every_acquire_carries_a_tag(path):
    text = path.read_text()
    lines = text.splitlines()
    loads = [(line, name) for line, name in primitive_calls(ast.parse(text)) if name.startswith("ld_acquire")]
    untagged = [f"{path.name}:{line}: {name}" for line, name in loads if not TAG.search(lines[line - 1])]
    assert not untagged


@pytest.mark.parametrize("path", KERNEL_FILES, ids=path_id)
def test_what_breaks_it_is_there(path):
    """A notebook, or a step whose fault the table of faults says is found so."""
    lines = {line.fault: line for line in LINES}
    for target, fault, kind in re.findall(r"Break it: ([^\s,]+)(?:, `([^`]+)`: (.+))?", path.read_text()):
        assert (ROOT / target).is_file(), f"{path.name} names {target}"
        assert not fault or lines[fault].kind == kind, f"{path.name} names {fault}"


def test_a_relaxed_store_does_not_publish():
    function = ast.parse("def f(tail):\n    st_relaxed_sys_s32(tail, 1)\n").body[0]
    assert not classify(primitive_calls(function), 2, "f").publishes


def test_a_fence_before_a_relaxed_atomic_publishes():
    function = ast.parse("def f(s):\n    fence_acq_rel_sys()\n    atom_add_relaxed_sys_s32(s, 1)\n").body[0]
    assert classify(primitive_calls(function), 3, "f") == End("f", True, False, "sys")
