"""`nbep check --all --weak`: every late store and early load, and one of the runs again from its file."""

import json
import re
from pathlib import Path

import pytest
from every_schedule import run_threads
from parts import both_parts

from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.lab.check import main
from nbep.lab.check.every import FOUND, NOT_ALL, NOTHING_FOUND, Led

PAGE = Path(__file__).resolve().parents[2] / "docs/every_schedule.md"
RELEASE = "st_release_sys_s32(buffer_of(peers, 1) + TAIL"


def relaxed(text: str) -> str:
    """The ring, whose tail does not release its rows."""
    assert RELEASE in text
    text = text.replace(RELEASE, RELEASE.replace("release", "relaxed"))
    return text.replace("    st_release_sys_s32,\n", "    st_relaxed_sys_s32,\n    st_release_sys_s32,\n")


def said_of_the_ring() -> dict[int, int]:
    """How many schedules the page says there are, by rows."""
    text = " ".join(PAGE.with_name("every_schedule_inside.md").read_text().split())
    said = re.search(r"one lane has (\d+) schedule with one row, (\d+) with two, and ([\d,]+) with three", text)
    assert said is not None
    return {rows: int(number.replace(",", "")) for rows, number in enumerate(said.groups(), 1)}


@pytest.mark.parametrize("rows", both_parts([1, 2], thorough=[3]))
def test_a_ring_is_right_with_every_late_store_and_early_load(ring, capsys, rows):
    assert main([ring, "--all", "--weak", "--num-rows", str(rows)]) == NOTHING_FOUND
    number = said_of_the_ring()[rows]
    whole = "The only schedule" if number == 1 else f"All {number:,} schedules"
    assert capsys.readouterr().out.startswith(f"{whole}: nothing found (")


def test_a_relaxed_tail_is_found_and_its_file_fails_in_the_same_way(ring, capsys):
    Path("relaxed_ring.py").write_text(relaxed(Path(ring).read_text()))
    assert main(["relaxed_ring.py", "--all", "--weak", "--num-rows", "2"]) == FOUND
    first = capsys.readouterr().out
    assert first.startswith("Found in schedule 1: race\n")
    assert "tail (byte 0) is too weak to order the store before this load: with relaxed.sys order it releases" in first
    assert main(["relaxed_ring.py", "--all", "--num-rows", "2", "--json"]) == FOUND
    assert json.loads(capsys.readouterr().out)["found"]["message"] in first  # word for word
    assert main(["relaxed_ring.py", "--all", "--weak", "--num-rows", "2"]) == FOUND
    assert capsys.readouterr().out == first
    for _ in range(2):
        assert main(["--schedule", "schedule.json"]) == FOUND
        again = capsys.readouterr().out
        assert again.strip() in first
    assert json.loads(Path("schedule.json").read_text())["memory_model"] == "delayed"


def test_a_relaxed_tail_is_found_at_once_with_all_lanes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("relaxed_full_ring.py").write_text(relaxed((PAGE.parent / "examples/ring.py").read_text()))
    assert main(["relaxed_full_ring.py", "--all", "--weak", "--num-rows", "2"]) == FOUND
    assert capsys.readouterr().out.startswith("Found in schedule 1: race\n")


def test_what_was_not_run_is_said(ring, capsys):
    assert main([ring, "--all", "--weak", "--num-rows", "3", "--limit", "20"]) == NOT_ALL
    assert re.match(r"Not all: \d+ schedules seen, about [\d,]+ to go \(", capsys.readouterr().out)


def test_json_says_the_same(ring, capsys):
    assert main([ring, "--all", "--weak", "--num-rows", "1", "--json"]) == NOTHING_FOUND
    report = json.loads(capsys.readouterr().out)
    assert (report["schedules"], report["redundant"], report["all"], report["found"]) == (1, 0, True, None)


def test_weak_without_all_is_refused(ring, capsys):
    with pytest.raises(SystemExit):
        main([ring, "--weak"])
    assert "--weak: takes --all, too" in capsys.readouterr().err


def test_what_fails_with_weak_memory_is_made_smaller(ring, capsys):
    Path("relaxed_ring.py").write_text(relaxed(Path(ring).read_text()))
    check = ["relaxed_ring.py", "--all", "--weak", "--num-rows", "4"]
    assert main([*check, "--no-shrink"]) == FOUND
    assert "Smallest" not in capsys.readouterr().out
    assert main([*check, "--json"]) == FOUND
    report = json.loads(capsys.readouterr().out)["found"]
    assert (report["kind"], report["parameters"]["num_rows"]) == ("race", 1)
    assert re.fullmatch(r"Smallest: --num-rows 1, with \d+ preemptions? in place of \d+", report["smaller"])
    assert main(["--schedule", "schedule.json"]) == FOUND
    assert capsys.readouterr().out.strip() == report["message"]


# Two ranks, each of which stores to a flag and looks at the other one's. If none sees the other's, both take the word.
BOTH_MISS = """
import numpy as np
import nbep
from nbep.lang import *

WORD, NUM_BYTES = 64, 128


@kernel(max_threads=32)
def take(seen: Out, peers: Peers, rank: I32):
    if thread_idx() == 0:
        flags = buffer_of(peers, 0)
        st_relaxed_sys_s32(flags + 16 * rank, 1)
        other = ld_relaxed_sys_s32(flags + 16 * (1 - rank))
        if other == 0:
            st_{order}_s32(flags + WORD, rank)
        st_weak_s32(seen, other)


def main(comm, times=1):
    memory = nbep.SharedMemory.create(comm, NUM_BYTES)
    seen = np.full(1, -1, np.int32)
    comm.barrier()
    for _ in range(times):
        memory.runtime.launch(memory.comm_stream, take, 1, 32, 0, seen, memory.peers, comm.rank)
    memory.wait()
    memory.close()
    return int(seen[0])


def check(results, times=1):
    assert sum(results) > 0, "both have taken it"
"""


@pytest.mark.parametrize(("order", "kind"), [("weak", "race"), ("relaxed_sys", "wrong result")])
def test_what_takes_two_late_stores_is_found_with_weak_memory_alone(tmp_path, monkeypatch, capsys, order, kind):
    monkeypatch.chdir(tmp_path)
    program = f"both_miss_{order}.py"
    Path(program).write_text(BOTH_MISS.format(order=order))
    assert main([program, "--all"]) == NOTHING_FOUND
    capsys.readouterr()
    assert main([program, "--all", "--weak"]) == FOUND
    found = capsys.readouterr().out
    assert re.match(rf"Found in schedule \d+: {kind}\n", found)
    assert ("nothing orders two stores of" in found) == (kind == "race")
    assert main(["--schedule", "schedule.json"]) == FOUND
    assert capsys.readouterr().out.strip() in found


def answers_by(strategy, threads):
    """What two cells hold in the end, and what each thread has loaded of them."""
    answers = [[] for _ in threads]

    def thread(t, number, cells):
        for cell, value in threads[number]:
            if value:
                t.store(cells[cell], "s32", value, "relaxed", "sys")
            else:
                answers[number].append(int(t.load(cells[cell], "s32", "relaxed", "sys")))

    return run_threads(len(threads), 2, thread, strategy, len(threads), memory_model="delayed"), answers


@pytest.mark.parametrize(
    "threads",
    [[[(0, 1)], [(1, 1)], [(0, 0), (1, 0)], [(1, 0), (0, 0)]], [[(0, 1), (1, 1)], [(1, 2), (0, 2)]]],
    ids=["IRIW", "2+2W"],
)
def test_a_run_that_is_made_smaller_begins_as_the_one_that_failed(threads):
    """It takes the same old values, and its stores come to the same place among those that are late."""
    tree, decided = Tree(is_weak=True), False
    while tree.begin():
        try:
            answers = answers_by(Every(tree), threads)
        except Redundant:
            tree.end(is_redundant=True)
            continue
        replay = tree.replay
        decided |= any(map(any, replay.decided))
        assert answers_by(Every(Led(replay, range(len(replay.picks)), is_weak=True)), threads) == answers
        tree.end()
    assert decided
