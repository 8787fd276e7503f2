"""`nbep explain < log.txt`: who waits for whom, from the time-out lines of DeepEP v1.2.1 and of nbep in a log.

 log: lines of all ranks --PATTERNS--> Wait(rank, peer, what) --Matrix--> one table, and who is missing

records/timeout_lines.md says what each line means. Between nodes, a rank of DeepEP is 8 * RDMA + nvl. Its barrier
counts the ranks of a node.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nbep.host.ranks.timeouts import join_ranks

NODE = 8  # ranks of a node, in DeepEP's messages between nodes
NODE_RANKS, ALL_RANKS = "ranks of the node", "ranks"
ACROSS = "over the network"
MOST_PAIRS = 8
CPU = "for the counts of its own notify kernel, on the CPU"

Numbers = dict[str, int]


class Wait(NamedTuple):
    """A rank waits for another. numbering: of both; how: the ring or road, for a reader of the table"""

    rank: int
    peer: int
    what: str
    how: str = ""
    numbering: str = ALL_RANKS


class Pattern(NamedTuple):
    """A line, and what its numbers say: None if no rank waits there."""

    line: re.Pattern[str]
    wait: Callable[[Numbers], Wait | None]


def _between(numbers: Numbers) -> int:
    return NODE * numbers["rdma"] + numbers["nvl"]


def _pattern(text: str, wait: Callable[[Numbers], Wait | None]) -> Pattern:
    """A name in braces stands for a number."""
    parts = [re.escape(part) for part in re.split(r"(\{\w+\})", text)]
    line = "".join(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>-?\\d+)", part) for part in parts)
    return Pattern(re.compile(line.replace(r"\ ", r"\s*")), wait)


def _in_node(peer: str, what: str) -> Callable[[Numbers], Wait]:
    """The peer is in the same node."""
    return lambda n: Wait(_between(n), NODE * n["rdma"] + n[peer], what, "NVLink")


def _across(node: str, what: str, is_open: str = "") -> Callable[[Numbers], Wait | None]:
    """The peer has the same local rank in another node. is_open: a number that is 0 if nothing is to come"""
    return lambda n: None if is_open and n[is_open] <= 0 else Wait(_between(n), NODE * n[node] + n["nvl"], what, ACROSS)


def _at_barrier(n: Numbers) -> Wait | None:
    what = "to come to barrier_block"
    return Wait(n["rank"], n["thread"], what, "NVLink", NODE_RANKS) if n["value"] > 0 else None


def _of_cpu(n: Numbers) -> Wait | None:
    return Wait(n["rank"], n["rank"], CPU, "CPU") if n["tokens"] < 0 or n["rdma"] < 0 else None


_PLACE = "channel: {channel}, RDMA: {rdma}, nvl: {nvl}, "
PATTERNS = [
    _pattern("rank = {rank}, thread = {thread}, value = {value}", _at_barrier),
    _pattern(
        f"DeepEP dispatch RDMA sender timeout, {_PLACE}dst RDMA lane: {{dst}}",
        _across("dst", "to free slots of its RDMA ring (dispatch)"),
    ),
    _pattern(
        "DeepEP RDMA sender coordinator timeout, channel: {channel}, IB: {rdma}, nvl {nvl}, dst IB: {dst}, "
        "tail: {tail}, remaining: {left}",
        lambda n: (
            Wait(_between(n), _between(n), "for its own senders to fill a chunk", "SM") if n["left"] > 0 else None
        ),
    ),
    _pattern(
        f"DeepEP dispatch forwarder timeout (RDMA meta), {_PLACE}src RDMA lane: {{src}}",
        _across("src", "to say how many tokens come (RDMA meta)"),
    ),
    _pattern(
        f"DeepEP dispatch forwarder timeout (NVL check), {_PLACE}dst NVL: {{dst}}",
        _in_node("dst", "to free slots of its NVL ring (dispatch)"),
    ),
    _pattern(
        f"DeepEP dispatch forwarder timeout (RDMA check), {_PLACE}dst NVL: {{dst}}, src RDMA lane: {{src}}, "
        "head: {head}, tail: {tail}, expected: {left}",
        _across("src", "to send tokens (dispatch)", "left"),
    ),
    _pattern(
        f"DeepEP dispatch NVL receiver timeout, {_PLACE}src RDMA: {{from}}, src nvl: {{src}}",
        _in_node("src", "to say how many tokens it forwards (start, end)"),
    ),
    _pattern(
        f"DeepEP dispatch NVL receiver timeout, {_PLACE}src NVL: {{src}}",
        _in_node("src", "to forward tokens (dispatch)"),
    ),
    _pattern(
        f"DeepEP combine NVL sender timeout, {_PLACE}dst NVL: {{dst}}",
        _in_node("dst", "to free slots of its NVL ring (combine)"),
    ),
    _pattern(
        f"DeepEP combine forwarder (RDMA check) timeout, {_PLACE}dst RDMA: {{dst}}",
        _across("dst", "to free slots of its RDMA ring (combine)"),
    ),
    _pattern(
        f"DeepEP combine forwarder (NVL check) timeout, {_PLACE}src NVL: {{src}}",
        _in_node("src", "to send rows (combine)"),
    ),
    _pattern(
        f"DeepEP combine RDMA receiver timeout, {_PLACE}src RDMA: {{src}}",
        _across("src", "to send sums (combine)"),
    ),
    _pattern("Global rank: {rank}, num_recv_tokens: {tokens}, num_rdma_recv_tokens: {rdma}", _of_cpu),
]
# These name no peer.
PEERLESS = [
    (
        re.compile(r"DeepEP timeout for (dispatch|combine) senders, rank (\d+)"),
        "waits for a slot in a peer's ring",
    ),
    (re.compile(r"DeepEP timeout for (dispatch|combine) receivers, rank (\d+)"), "waits for tokens of a peer"),
]
ERRORS = re.compile(r"DeepEP error: (?:CPU recv timeout|timeout \(dispatch CPU\))")
NBEP = re.compile(r"rank (?P<rank>\d+): the (?P<role>[^()]+) \(.*?for rank (?P<peer>\d+): (?P<what>[^\n]+)")
DESTROY = re.compile(r"rank (?P<rank>\d+): ranks? (?P<peers>\d+(?:, \d+)*) did not come to destroy")
CALLS = re.compile(r"rank (?P<rank>\d+) has made (?P<calls>\d+) collective calls?(?:, the last one (?P<verb>\w+))?")


class Log:
    """What the lines of a log say."""

    def __init__(self, lines: Iterable[str]):
        self.waits: dict[Wait, int] = {}  # and how often it is there
        self.came: dict[int, set[int]] = {}  # rank -> who had come to its barrier
        self.peerless: dict[str, set[int]] = {}
        self.calls: dict[int, tuple[int, str]] = {}
        self.cpu_errors = 0
        for line in lines:
            self._read(line)

    def _read(self, line: str) -> None:
        for found in CALLS.finditer(line):
            self.calls[int(found["rank"])] = int(found["calls"]), found["verb"] or ""
        self.cpu_errors += bool(ERRORS.search(line))
        for expression, what in PEERLESS:
            if match := expression.search(line):
                self.peerless.setdefault(f"{match[1]}: {what}", set()).add(int(match[2]))
        for missed in DESTROY.finditer(line):
            for peer in missed["peers"].split(", "):
                self._add(Wait(int(missed["rank"]), int(peer), "to come to destroy"))
        if own := NBEP.search(line):
            self._add(Wait(int(own["rank"]), int(own["peer"]), f"as {own['role']}: {own['what'].partition('. ')[0]}"))
            return
        for pattern in PATTERNS:
            if match := pattern.line.search(line):
                numbers = {name: int(value) for name, value in match.groupdict().items()}
                if (wait := pattern.wait(numbers)) is not None:
                    self._add(wait)
                elif "thread" in numbers and numbers["rank"] != numbers["thread"]:
                    self.came.setdefault(numbers["rank"], set()).add(numbers["thread"])
                return

    def _add(self, wait: Wait) -> None:
        self.waits[wait] = self.waits.get(wait, 0) + 1

    @property
    def is_empty(self) -> bool:
        return not (self.waits or self.came or self.peerless or self.cpu_errors)


def explain(lines: Iterable[str]) -> str:
    """Who waits for whom, and who is missing."""
    log = Log(lines)
    if log.is_empty:
        return "No time-out line of DeepEP v1.2.1 or of nbep is here."
    parts = [_numbered(log, n) for n in (NODE_RANKS, ALL_RANKS) if any(w.numbering == n for w in log.waits)]
    for what, ranks in log.peerless.items():
        parts.append(f"{join_ranks(sorted(ranks)).capitalize()} in {what}. The line names no peer.")
    if log.cpu_errors and not log.waits:
        parts.append("The CPU has waited for the counts of dispatch. Who did not come is in the lines of the kernels.")
    if log.came and not any(wait.numbering == NODE_RANKS for wait in log.waits):
        parts.append("No line of barrier_block has a value above 0: in those that are here, no rank is missing.")
    return "\n\n".join(parts)


def _numbered(log: Log, numbering: str) -> str:
    """The table and the conclusions for the ranks that are counted in one way."""
    waits = [wait for wait in log.waits if wait.numbering == numbering]
    letters = {what: chr(ord("A") + i) for i, what in enumerate(dict.fromkeys(wait.what for wait in waits))}
    waiting = sorted({wait.rank for wait in waits})
    awaited = sorted({wait.peer for wait in waits})
    title = f"{numbering}, who waits (down) for whom (across)"
    width = max(4, len(letters), *(len(str(rank)) + 1 for rank in awaited))
    table = [title, "      " + "".join(f"{rank:>{width}}" for rank in awaited)]
    for rank in waiting:
        cells = ["".join(sorted({letters[w.what] for w in waits if (w.rank, w.peer) == (rank, p)})) for p in awaited]
        table.append(f"{rank:>6}" + "".join(f"{cell or '.':>{width}}" for cell in cells))
    for what, letter in letters.items():
        table.append(f"  {letter}  waits {'for it ' * what.startswith('to ')}{what}")
    return "\n".join([*table, "", *_conclusions(log, numbering, waits)])


def _conclusions(log: Log, numbering: str, waits: list[Wait]) -> list[str]:
    others = [wait for wait in waits if wait.rank != wait.peer]
    waiting = {wait.rank for wait in waits}
    by_peer = {peer: {wait.rank for wait in others if wait.peer == peer} for peer in {wait.peer for wait in others}}
    lines = []
    missing = sorted(peer for peer in by_peer if peer not in waiting)
    if missing:
        most = max(len(by_peer[peer]) for peer in missing)
        first = [peer for peer in missing if len(by_peer[peer]) == most]
        above = f", at {join_ranks(first)} above all" if len(first) < len(missing) else ""
        lines.append(
            f"Missing: {join_ranks(missing)}. Others wait there, and no line comes from there. Look there first{above}."
        )
    else:
        lines.append("No rank is missing: each rank that is waited for waits itself.")
        edges = {(wait.rank, wait.peer) for wait in others}
        pairs = sorted((a, b) for a, b in edges if a < b and (b, a) in edges)
        if pairs:
            lines.append("They wait for each other: " + ", ".join(f"{a} and {b}" for a, b in pairs[:MOST_PAIRS]) + ".")
    lost = sorted({(w.peer // NODE, w.rank // NODE) for w in others if w.how == ACROSS and w.peer in waiting})
    if lost:
        ways = ", ".join(f"{a} to node {b}" for a, b in lost)
        lines.append(f"Both ends are there, and messages do not arrive from node {ways}: look at the network.")
    came = set.intersection(*log.came.values()) - waiting if log.came and numbering == NODE_RANKS else set()
    if came := came - set(missing):
        lines.append(f"Had come to the barrier and printed nothing: {join_ranks(sorted(came))}.")
    if numbering == ALL_RANKS and log.calls:
        latest = max(calls for calls, _ in log.calls.values())
        made = {rank: f"{n}{f', the last one {verb}' * bool(verb)}" for rank, (n, verb) in log.calls.items()}
        behind = [f"; rank {rank} has made {made[rank]}" for rank in sorted(made) if log.calls[rank][0] < latest]
        lines.append(f"Collective calls so far: {latest}{''.join(behind)}.")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Read a log from the standard input, or from files. Exit status 1 if it has no such line."""
    parser = argparse.ArgumentParser(
        prog="nbep explain", description="Who waits for whom, from time-out lines in a log."
    )
    parser.add_argument("log", nargs="*", help="files; without any, the standard input is read")
    options = parser.parse_args(argv)
    lines: list[str] = []
    for name in options.log:
        try:
            lines += Path(name).read_text(errors="replace").splitlines()
        except OSError as error:
            parser.error(f"{name}: {error.strerror}")
    if not options.log:
        lines = list(sys.stdin)
    text = explain(lines)
    print(text)
    return 1 if Log(lines).is_empty else 0
