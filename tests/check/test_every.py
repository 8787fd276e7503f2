"""`nbep check --all`: every schedule of a small program, and one of them again from its file."""

import json
from pathlib import Path

import pytest

from nbep.lab.check import main
from nbep.lab.check.every import FOUND, NOT_ALL, NOTHING_FOUND
from nbep.specimens.scenarios import SCENARIOS

RANDOM = """
import random
import numpy as np
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import atom_add_relaxed_sys_s32
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32


@kernel(max_threads=1)
def add(peers: Peers, offset: I32):
    atom_add_relaxed_sys_s32(buffer_of(peers, 1) + offset, 1)
    if atom_add_relaxed_sys_s32(buffer_of(peers, 1), 1) == 0:
        atom_add_relaxed_sys_s32(buffer_of(peers, 1) + 8, 1)


def main(comm):
    memory = nbep.SharedMemory.create(comm, 1 << 20)
    comm.barrier()
    offset = 4 * random.SystemRandom().randrange(1 << 16)
    memory.runtime.launch(memory.comm_stream, add, 1, 1, 0, memory.peers, offset)
    memory.wait()
    memory.close()
"""


TICKETS = """
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import atom_add_relaxed_sys_s32, st_weak_s32
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32


@kernel(max_threads=1)
def take(peers: Peers, number: I32):
    for i in range(number):
        ticket = atom_add_relaxed_sys_s32(buffer_of(peers, 0), 1)
        st_weak_s32(buffer_of(peers, 0) + 4 * (ticket + 1), peers.rank)


def main(comm, number=2):
    memory = nbep.SharedMemory.create(comm, 128)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, take, 1, 1, 0, memory.peers, number)
    memory.wait()
    memory.close()
"""

IMPATIENT = (
    TICKETS.partition("def main")[0]
    + """
def main(comm):
    memory = nbep.SharedMemory.create(comm, 128)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, take, 1, 1, 0, memory.peers, 1)
    assert not memory.comm_stream.record().done, "the kernel is done already"
    memory.wait()
    memory.close()
"""
)


COUNTS = """
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_acquire_sys_s32, st_release_sys_s32
from nbep.device.protocols.peers import Peers, buffer_of


@kernel(max_threads=1)
def one_flag(peers: Peers):
    flag, turns = buffer_of(peers, 1), 0
    if peers.rank == 0:
        st_release_sys_s32(flag, 1)
    while ld_acquire_sys_s32(flag) != 1:
        turns += 1


def main(comm):
    memory = nbep.SharedMemory.create(comm, 128)
    memory.runtime.launch(memory.comm_stream, one_flag, 1, 1, 0, memory.peers)
    memory.wait()
    memory.close()
"""


MEETS_TWICE = """
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import bar_sync, thread_idx
from nbep.device.protocols.peers import Peers


@kernel(max_threads=96)
def meet(peers: Peers):
    bar_sync(1, 64)
    if thread_idx() < 32:
        bar_sync(1, 64)


def main(comm):
    memory = nbep.SharedMemory.create(comm, 128)
    memory.runtime.launch(memory.comm_stream, meet, 1, 96, 0, memory.peers)
    memory.wait()
    memory.close()
"""


LAPS = """
import numpy as np
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_acquire_sys_s32, ld_weak_s32, st_release_sys_s32, st_weak_s32, wait_expired
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32, Out


@kernel(max_threads=1)
def lap(out: Out, peers: Peers, rounds: I32):
    flag = buffer_of(peers, 1)
    for i in range(rounds):
        if peers.rank == 0:  # does not wait
            st_weak_s32(flag + 64, i + 1)
            st_release_sys_s32(flag, i + 1)
        else:
            while ld_acquire_sys_s32(flag) < i + 1:
                wait_expired(1 << 62)
            st_weak_s32(out + 4 * i, ld_weak_s32(flag + 64))


def main(comm, rounds=3):
    memory = nbep.SharedMemory.create(comm, 128)
    comm.barrier()
    out = np.zeros(rounds, np.int32)
    memory.runtime.launch(memory.comm_stream, lap, 1, 1, 0, out, memory.peers, rounds)
    memory.wait()
    memory.close()
    return out.tolist()


def check(results, rounds):
    assert results[1] == [i + 1 for i in range(rounds)]
"""


@pytest.fixture
def tickets(tmp_path, monkeypatch):
    """Two ranks take tickets: each order is another schedule."""
    monkeypatch.chdir(tmp_path)
    Path("tickets.py").write_text(TICKETS)
    return "tickets.py"


def test_a_ring_is_right_in_all_its_schedules(ring, capsys):
    assert main([ring, "--all", "--num-rows", "3"]) == NOTHING_FOUND
    assert capsys.readouterr().out.startswith("The only schedule: nothing found (")


@pytest.mark.parametrize(("number", "schedules"), [(2, 6), (3, 20)])
def test_all_orders_of_tickets_are_run(tickets, capsys, number, schedules):
    assert main([tickets, "--all", "--number", str(number)]) == NOTHING_FOUND
    assert capsys.readouterr().out.startswith(f"All {schedules} schedules: nothing found (")


def test_json_says_the_same(tickets, capsys):
    assert main([tickets, "--all", "--json"]) == NOTHING_FOUND
    report = json.loads(capsys.readouterr().out)
    assert (report["schedules"], report["all"], report["found"]) == (6, True, None)


def test_what_was_not_run_is_said(tickets, capsys):
    assert main([tickets, "--all", "--number", "4", "--limit", "5"]) == NOT_ALL
    out = capsys.readouterr().out
    assert out.startswith("Not all: ")
    assert " to go (" in out


@pytest.mark.parametrize("weak", [[], ["--weak"]])
def test_a_loop_that_counts_its_turns_is_named_and_one_that_only_looks_is_a_wait(tmp_path, monkeypatch, capsys, weak):
    monkeypatch.chdir(tmp_path)
    Path("counts.py").write_text(COUNTS)
    Path("looks.py").write_text(COUNTS.replace("turns += 1", "pass"))
    assert main(["counts.py", "--all", *weak]) == NOT_ALL
    out = capsys.readouterr().out
    assert "A schedule does not end: rank 1, kernel `one_flag`, block 0, " in out
    assert "counts.py:13 (one_flag)" in out
    assert "`give_up(bounds, deadline)`" in out
    assert main(["counts.py", "--all", "--json", *weak]) == NOT_ALL
    assert json.loads(capsys.readouterr().out)["endless"] in out
    assert main(["looks.py", "--all", *weak]) == NOTHING_FOUND


def test_an_order_of_warps_at_a_barrier_that_hangs_is_found_and_its_file_shows_it_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("meets_twice.py").write_text(MEETS_TWICE)
    assert main(["meets_twice.py", "--all", "--ranks", "1"]) == FOUND
    first = capsys.readouterr().out
    assert "barrier 1" in first
    assert main(["--schedule", "schedule.json"]) == FOUND
    assert capsys.readouterr().out.strip() in first


def test_of_a_wrong_result_a_run_is_shown_that_says_why(tmp_path, monkeypatch, capsys):
    """A flag that laps its reader: most runs end with wrong numbers, a few with the race that they come from."""
    monkeypatch.chdir(tmp_path)
    Path("laps.py").write_text(LAPS)
    assert main(["laps.py", "--seeds", "24"]) == FOUND
    out = capsys.readouterr().out
    assert out.startswith("Found after 1 of 48 runs: wrong result\n")
    assert "That run does not say why. Another one does: race" in out
    assert "DataRace: " in out
    again = out.strip().splitlines()[-1].split()
    assert main(again[2:]) == FOUND
    assert "DataRace: " in capsys.readouterr().out


def test_of_a_wrong_result_a_schedule_is_shown_that_says_why(tmp_path, monkeypatch, capsys):
    """The reader comes too early in the first schedule, and takes what no acquire orders in the second one."""
    monkeypatch.chdir(tmp_path)
    wait = "            while ld_acquire_sys_s32(flag) < i + 1:\n                wait_expired(1 << 62)\n"
    read = "            st_weak_s32(out + 4 * i, ld_weak_s32(flag + 64))"
    if_there = f"            if ld_relaxed_sys_s32(flag) != 0:\n    {read}"
    assert LAPS.count(wait + read) == 1
    program = LAPS.replace(wait + read, if_there).replace("import ld_acquire", "import ld_relaxed").replace("=3", "=1")
    Path("looks_once.py").write_text(program)
    assert main(["looks_once.py", "--all"]) == FOUND
    out = capsys.readouterr().out
    assert out.startswith("Found in schedule 1: wrong result\nIt does not say why. Another schedule does: race\n")
    assert main(["--schedule", "schedule.json"]) == FOUND
    assert capsys.readouterr().out.strip() in out


IMPATIENT_SENDER = "i + 1 - NUM_SLOTS", "i - NUM_SLOTS"  # it waits for a slot one row too late


def broken(ring, fault):
    """The arguments of a check of the ring with a fault of nbep's table, or one that is written into its text."""
    if fault is not IMPATIENT_SENDER:
        return [ring, "--all", "--fault", fault]
    text = Path(ring).read_text()
    assert text.count(fault[0]) == 1
    Path("impatient_ring.py").write_text(text.replace(*fault))
    return ["impatient_ring.py", "--all"]


FAULTS = pytest.mark.parametrize(
    ("fault", "fewest_rows"), [(IMPATIENT_SENDER, 3), ("send_row: release of TAIL", 1)], ids=["wait", "release"]
)


@FAULTS
def test_a_schedule_that_fails_is_found_and_its_file_fails_in_the_same_way(ring, capsys, fault, fewest_rows):
    assert main([*broken(ring, fault), "--num-rows", "3"]) == FOUND
    first = capsys.readouterr().out
    assert "Found in schedule " in first
    assert main(["--schedule", "schedule.json"]) == FOUND
    again = capsys.readouterr().out
    assert again.strip() in first
    assert "DataRace" in again


def test_the_file_of_a_schedule_has_the_answers_that_hosts_get(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("impatient.py").write_text(IMPATIENT)
    assert main(["impatient.py", "--all"]) == FOUND
    assert "the kernel is done already" in capsys.readouterr().out
    assert main(["--schedule", "schedule.json"]) == FOUND
    assert "the kernel is done already" in capsys.readouterr().out


def places(value):
    """Where a file may be broken: each way down to a part of it, of several alike the first one."""
    parts = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, part in parts:
        yield (key,)
        yield from ((key, *rest) for rest in places(part))


def test_a_broken_file_of_a_schedule_gets_a_sentence_and_each_shows_its_program_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("meets_twice.py").write_text(MEETS_TWICE)
    assert main(["meets_twice.py", "--all", "--ranks", "1"]) == FOUND
    whole = json.loads(Path("schedule.json").read_text())
    whole["decided"][0] = [0]
    whole["faults"] = ["x"]
    deep = "[" * 100_000
    bad = ["null", "true", "7", "-1", "1.5", "1e999", "NaN", "9" * 30, "9" * 5000, '"x"', '"\\u0000"', "[]", "{}", deep]
    texts = [*bad, "", "{", "\xff"]
    for place in places(whole):
        broken = json.loads(json.dumps(whole))
        part = broken
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = "HERE"
        texts += [json.dumps(broken).replace('"HERE"', one) for one in bad]
    for text in texts:
        Path("broken.json").write_text(text, "latin-1")
        capsys.readouterr()
        try:
            status = main(["--schedule", "broken.json"])
        except SystemExit as end:
            status = end.code
        first = capsys.readouterr().err.splitlines()
        refused = status == 2 and first[-1].startswith("nbep check: error: ")
        assert refused or first == [f"broken.json runs {tmp_path / 'meets_twice.py'}"], text[:300]


def test_a_schedule_says_which_program_it_runs_before_that_does_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dice.py").write_text(f"import sys\nprint('it runs', file=sys.stderr)\n{RANDOM}")
    whole = {"scenario": "dice.py", "parameters": {}, "faults": [], "memory_model": "checked"}
    Path("schedule.json").write_text(json.dumps({**whole, "picks": [], "events": [], "decided": []}))
    main(["--schedule", "schedule.json"])
    assert capsys.readouterr().err.splitlines()[:2] == [f"schedule.json runs {tmp_path / 'dice.py'}", "it runs"]


def test_a_program_that_depends_on_more_than_its_schedule_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dice.py").write_text(RANDOM)
    assert main(["dice.py", "--all"]) == FOUND
    assert "the program depends on more than its schedule" in capsys.readouterr().out


def test_a_scenario_whose_waits_end_by_the_clock_is_refused(capsys):
    name = next(name for name, scenario in SCENARIOS.items() if scenario.lets_time_pass)
    with pytest.raises(SystemExit):
        main([name, "--all"])
    assert "--all knows no clock" in capsys.readouterr().err


@FAULTS
def test_what_fails_is_made_smaller_and_its_file_shows_it_again(ring, capsys, fault, fewest_rows):
    check = [*broken(ring, fault), "--num-rows", "7"]
    assert main([*check, "--no-shrink"]) == FOUND
    before = capsys.readouterr().out
    assert "Smallest" not in before
    assert main([*check, "--json"]) == FOUND
    report = json.loads(capsys.readouterr().out)["found"]
    assert report["parameters"]["num_rows"] == fewest_rows
    assert report["smaller"].startswith("Smallest: --num-rows ")
    assert main(["--schedule", "schedule.json"]) == FOUND
    assert capsys.readouterr().out.strip() == report["message"]


LATE = """
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import atom_add_relaxed_sys_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32


@kernel(max_threads=1)
def count(peers: Peers, number: I32):
    for i in range(number):
        atom_add_relaxed_sys_s32(buffer_of(peers, 1) + 64, 1)
        seen = ld_relaxed_sys_s32(buffer_of(peers, 1))
        st_relaxed_sys_s32(buffer_of(peers, 1), seen + 1)


def main(comm, number=2):
    memory = nbep.SharedMemory.create(comm, 128)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, count, 1, 1, 0, memory.peers, number)
    memory.wait()
    comm.barrier()
    total = int(memory.symmetric.read(0, 1, "int32")[0])
    memory.close()
    return total


def check(results, number=2):
    assert results[1] == 2 * number
"""


def test_of_the_preemptions_those_are_left_without_which_it_does_not_fail(tmp_path, monkeypatch, capsys):
    """An increment that is a load and a store gets lost if its thread gives way in between, once."""
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE)
    assert main(["late.py", "--all"]) == FOUND
    out = capsys.readouterr().out
    assert "AssertionError" in out
    assert "Smallest: --number 1, with 1 preemption in place of " in out
    assert main(["--schedule", "schedule.json"]) == FOUND
