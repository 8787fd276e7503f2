"""The ledgers at the head of device files, and what traced runs do at the cells that they name.

A ledger is the table of a docstring that begins with a column "cell" or "word": who writes it with which primitive, and
who reads it with which. `read_ledgers` finds them, `Accesses` is a tracer that takes down who touches what.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import nbep
import nbep.device.primitives  # fills PRIMITIVES
from nbep.device.jit import PRIMITIVES
from nbep.emulator.machine.bulk import CopyingThread

DEVICE = Path(nbep.__file__).resolve().parent / "device"
NIC = "software_nic"
OF_PEERS = frozenset([frozenset(["byte"]), frozenset(["cell"])])  # a NIC does not know what they are
KINDS = re.compile(r"(_shared)?(_keep)?(_(s32|s64|f32|u8|u32|v2|v4))?$")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
COPIES = {"tma_load_1d", "tma_store_1d"}
WHATEVER = {"all", "those", "other"}  # cells that have no names of their own in a row
TWO_USES = re.compile("(.*) to send, (.*) to receive")
# What reports call a cell, and what ledgers call it.
ALSO = {
    r".*[, \[]slot \d": ("slot",),
    r"(recv|send)\[half": ("message", "row"),
    r"send .*slot": ("message",),
    "count message": ("count message",),
    "barrier_signal": ("signal", "sent"),
    "layout totals": ("totals",),
    "(layout|grid) arrivals": ("arrivals",),
    "shared_tail": ("shared tail",),
    "shared_head": ("shared head",),
    "table": ("parts sent",),
    "fault report": ("report", "status", "moe_recv_counter", "moe_recv_expert_counter"),
    "result of queue": ("old value",),
    "word": ("queue pair", "others"),
}


def plain(name: str) -> str:
    """A primitive's name without what it moves: `st_na_v4` is `st_na`; what is of one warp's kind stays."""
    if name.startswith(("ld_shared", "st_shared")):
        return name[:9]
    return KINDS.sub("", name)


NETWORK = {"amo_add", "put_nbi_warp"}
ORDERS = {plain(name) for name in PRIMITIVES if name.startswith(("ld_", "st_", "atom_", "tma_"))}


class Row(NamedTuple):
    """What a ledger says of some cells."""

    cell: str
    text: str  # the columns behind the cell

    @property
    def names(self) -> frozenset[str]:
        return words_of(re.sub(r"\[[^]]*\]|\([^)]*\)", " ", self.cell))

    @property
    def orders(self) -> set[str]:
        """The primitives that it names, `amo_add` and `put_nbi_warp`."""
        return self.words & (ORDERS | NETWORK)

    @property
    def words(self) -> set[str]:
        """Functions and primitives that it names."""
        found = {plain(word) for word in WORD.findall(self.text)}
        if "bulk copy" in self.text or "engine" in found:
            found |= COPIES
        return found | ({"st_weak"} if "weak" in found else set())

    def is_about(self, names: frozenset[frozenset[str]]) -> bool:
        """Whether it is about a cell with one of these names. `recv_*` and `recv_ arrays` are all that begin so."""
        own = self.names
        begins = tuple(name.rstrip("*") for name in own if name.endswith(("*", "_")))
        return any(all(word in own or (begins and word.startswith(begins)) for word in name) for name in names)


class Ledger(NamedTuple):
    path: str  # below nbep/device
    rows: tuple[Row, ...]

    def about(self, names: frozenset[frozenset[str]]) -> list[Row]:
        return [row for row in self.rows if row.is_about(names)]


def words_of(name: str) -> frozenset[str]:
    """The words of a name, in the singular."""
    words = WORD.findall(name.lower())
    return frozenset(word[:-1] if word.endswith("s") and not word.endswith("ss") else word for word in words)


@cache
def read_ledgers() -> dict[str, Ledger]:
    """All ledgers below nbep/device, by file."""
    ledgers = {}
    for path in sorted(DEVICE.rglob("*.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        rows = [row for number, line in enumerate(lines) if is_head(line) for row in rows_of(line, lines[number + 1 :])]
        if rows:
            name = str(path.relative_to(DEVICE))
            ledgers[name] = Ledger(name, tuple(rows))
    return ledgers


def is_head(line: str) -> bool:
    return bool(re.match(r" ?(cell|word)\s+written by\s", line))


def rows_of(head: str, lines: list[str]) -> list[Row]:
    """The rows below a head, up to an empty line. A cell goes on in the next line, if that is indented."""
    column = head.index("written by")
    rows: list[Row] = []
    for line in lines:
        if not line.strip():
            break
        end = column
        if line[:column].strip() and line[column - 1 : column].strip():  # the name is longer than its column
            end += next(re.finditer(r"  |$", line[column:])).start()
        cell, text = line[:end], line[end:]
        if rows and (line.startswith("  ") or not cell.strip()):
            cell = f"{rows[-1].cell} {cell}"
            if line[end : head.index("with", column)].strip() == "":
                text = f"{rows.pop().text} {text}"
        rows.append(Row(cell.strip(), text))
    return rows


# --- what runs do


class Access(NamedTuple):
    """A load, a store, an atomic or a bulk copy of device code.

    kernel  of which launch
    chain   (file below nbep/device, function) of the primitive and of its callers, the kernel last
    names   what the cell may be called, each as words
    is_zero  a plain store of 0
    """

    kernel: str
    chain: tuple[tuple[str, str], ...]
    names: frozenset[frozenset[str]]
    is_write: bool
    is_zero: bool

    @property
    def primitive(self) -> str:
        return plain(self.chain[0][1])

    @property
    def functions(self) -> set[str]:
        return {self.primitive, *(function for _, function in self.chain)}

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.chain}

    @property
    def cell(self) -> str:
        return " or ".join(sorted(" ".join(sorted(name)) for name in self.names))

    def is_inside(self, folder: str) -> bool:
        return any(file.startswith(f"{folder}/") for file in self.files)


class Accesses:
    """The tracer."""

    def __init__(self) -> None:
        self.found: dict[Access, None] = {}
        self._seen: set[tuple] = set()

    def of_one_run(self) -> Accesses:
        """The tracer again, for another run."""
        self._seen.clear()
        return self

    def on_load(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self.note(thread, allocation, offset, False)

    def on_store(self, thread: Any, allocation: Any, offset: int, _: str, value: Any, *__: Any) -> None:
        self.note(thread, allocation, offset, True, not any(value) if isinstance(value, tuple) else value == 0)

    def on_atomic(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self.note(thread, allocation, offset, True)

    def note(self, thread: Any, allocation: Any, offset: int, is_write: bool, is_zero: bool = False) -> None:
        launch = thread.block.launch
        frame, codes = sys._getframe(2), []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        key = launch.rank, launch.name, launch.number, allocation.number, offset, is_write, is_zero, *map(id, codes)
        if key in self._seen or not (allocation.writable or is_write):
            return
        self._seen.add(key)
        chain = [(below(code.co_filename), code.co_name) for code in codes]
        own = tuple((file, name) for file, name in chain if file and file != "jit.py")
        first = max((n for n, (file, _) in enumerate(own) if file.startswith("primitives/")), default=0)
        names = names_of(allocation.name if allocation.describe is None else allocation.describe(offset))
        self.found[Access(launch.name, own[first:], names, is_write, is_zero)] = None


@cache
def below(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(DEVICE)) if path.is_relative_to(DEVICE) else ""


@cache
def names_of(text: str) -> frozenset[frozenset[str]]:
    """What a ledger may call the cell that a report calls `text`."""
    found = []
    both = TWO_USES.fullmatch(text)
    for name in (text,) if both is None else both.groups():
        found += [re.split(r"\[| \+| \d| word | of |, ", name)[0]]
        found += [other for pattern, others in ALSO.items() if re.match(pattern, name) for other in others]
    return frozenset(map(words_of, found))


@contextmanager
def copies_noted(accesses: Accesses) -> Iterator[None]:
    """Take down bulk copies, too, where they are asked for."""
    load, store = CopyingThread.bulk_load, CopyingThread.bulk_store

    def bulk_load(thread: Any, smem: int, gmem: int, nbytes: int, mbarrier: int) -> None:
        load(thread, smem, gmem, nbytes, mbarrier)
        accesses.note(thread, thread.segments[gmem >> 32], gmem & 0xFFFFFFFF, False)
        accesses.note(thread, thread.shared, smem, True)

    def bulk_store(thread: Any, gmem: int, smem: int, nbytes: int) -> None:
        store(thread, gmem, smem, nbytes)
        accesses.note(thread, thread.segments[gmem >> 32], gmem & 0xFFFFFFFF, True)
        accesses.note(thread, thread.shared, smem, False)

    with mock.patch.multiple(CopyingThread, bulk_load=bulk_load, bulk_store=bulk_store):
        yield


# --- what is not right


def is_kernels_own(file: str) -> bool:
    """Whether a kernel stands in the file: those of kernels/parts are steps that several kernels take."""
    return file.startswith("kernels/") and not file.startswith("kernels/parts/")


def missing(access: Access, ledgers: dict[str, Ledger]) -> tuple[str, str] | None:
    """(file, what is missing) if no ledger has the access: not the innermost that names the cell, nor a kernel's.

    A ledger may name the primitive, or a function that has called it: `amo_add`, `put_nbi_warp`.
    """
    functions = {access.primitive}
    if access.is_inside("network"):
        functions.add("network")
    where = ""
    for file, function in access.chain[1:]:
        if file in ledgers:
            where = file
            rows = ledgers[file].about(access.names)
            if access.kernel == NIC:
                rows = rows or ledgers[file].about(OF_PEERS)
            if rows:
                known = any(functions & row.words for row in rows)
                return None if known else (file, f"{access.primitive} of {access.cell}, by {access.chain[1][1]}")
            if is_kernels_own(file):
                break
        functions.add(function)
    return where, f"the cell {access.cell}: {access.primitive}, by {access.chain[1][1]}"


def matters(access: Access, written: dict[str, set[frozenset[str]]]) -> bool:
    """Whether a ledger must have it: a write, or a read of what the same kernel or a NIC writes."""
    return access.is_write or any(written[kernel] & access.names for kernel in (access.kernel, NIC))


def written_by_kernel(accesses: Iterable[Access]) -> dict[str, set[frozenset[str]]]:
    written: dict[str, set[frozenset[str]]] = defaultdict(set)
    for access in accesses:
        if access.is_write:
            written[access.kernel] |= access.names
    return written


def forgotten_resets(ledger: Ledger, ledgers: dict[str, Ledger], accesses: Iterable[Access]) -> list[str]:
    """Stores of 0, in kernels that run the ledger's file, to cells of which it says only that somebody adds to them.

    A row that says `see coordinator.py` has what that ledger says of the cell.
    """
    found = {}
    kernels = {access.kernel for access in accesses if ledger.path in access.files}
    for access in accesses:
        if access.kernel not in kernels or not access.is_zero:
            continue
        rows = ledger.about(access.names)
        seen = {name for row in rows for name in re.findall(r"see (\w+\.py)", row.text)}
        rows += [row for path, other in ledgers.items() if Path(path).name in seen for row in other.about(access.names)]
        words = set().union(*(row.words for row in rows))
        if any(word.startswith(("atom_", "amo_")) for word in words) and not words & access.functions:
            found[f"the reset of {access.cell}: {access.primitive}, by {access.chain[1][1]}"] = None
    return list(found)


def unseen(ledger: Ledger, accesses: Iterable[Access]) -> list[str]:
    """Orders of cells that no run has shown."""
    found = []
    for row in ledger.rows:
        if re.search(r"\bnobody\b|no kernel|\(never", row.text) or row.names & WHATEVER:
            continue
        words = {word for access in accesses if row.is_about(access.names) for word in access.functions}
        words |= COPIES if words & COPIES else set()
        found += [f"{word} of {row.cell}" for word in sorted(row.orders - words)]
    return found
