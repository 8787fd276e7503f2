"""What a debugger shows: where each thread is, what an address is and what happened to a cell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from intranode import Options, round_trip
from processes import LIMIT_S
from traced_runs import CASE

import nbep
from nbep import debug
from nbep.device import primitives as ptx
from nbep.device.jit import kernel
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32, I64
from nbep.emulator import World
from nbep.lab.trace import Trace

pytestmark = pytest.mark.emulator_only("a GPU has no debugger of Python")

SAID: list[str] = []
PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "two_flags.py"
AFTER_THE_STOP = PROGRAM.read_text().splitlines().index("        breakpoint()") + 2
NEVER = 1 << 62


def pdb(commands: str, *arguments: str, program: tuple[str, ...] = (str(PROGRAM),)) -> str:
    """What a session says: the program stops where it calls breakpoint()."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONBREAKPOINT": ""}
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(
        command, input=commands, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout


def test_a_pdb_session_shows_where_what_and_history():
    said = pdb("nbep.debug.where()\nnbep.debug.what(flag)\nnbep.debug.history(flag)\nn\nc\n", "history")
    where, what, history, then, end = said.split("(Pdb) ")[1:]
    assert "rank 1, kernel `flags`, block 0, warp 0, lane 0\n  at " in where
    assert f"two_flags.py:{AFTER_THE_STOP} (flags)\n  is here\n" in where
    assert where.count("  is here\n") == 1
    assert "  polls `nvl_buffer` of rank 1: flag (byte 0) at 0x80000100000000: sees 2 (s32)\n" in where
    assert "missing: warp 0, lane 0, which are here\n" in where
    assert "the host of rank 0 waits for the end of its comm stream" in where
    assert "is `nvl_buffer` of rank 1: flag (byte 0), of " in what
    assert "holds s32 2, s64 2\n" in what
    assert "last written by rank 0, kernel `flags`, block 0, warp 0, lane 0, at " in what
    lines = history.splitlines()
    assert lines[0] == "`nvl_buffer` of rank 1: flag (byte 0)"
    assert ["release.sys store of 1" in lines[1], "release.sys store of 2" in lines[2]] == [True, True]
    assert len(lines) == 3
    assert then.startswith(f"> {PROGRAM}({AFTER_THE_STOP + 1})flags()")  # the next line of the same thread
    assert end == "all done\n"


def test_without_a_history_the_last_store_is_named_and_how_to_get_all():
    history = pdb("nbep.debug.history(flag)\nc\n").split("(Pdb) ")[1]
    assert "last written by rank 0, kernel `flags`" in history
    assert "spawn(..., tracer=nbep.debug.History())" in history


@kernel(max_threads=64)
def ask(peers: Peers, freed: I64):
    """Thread 1 polls a flag, and all others wait for it, when thread 0 asks."""
    flag = buffer_of(peers, peers.rank)
    if ptx.thread_idx() == 0:
        ptx.st_shared_s32(ptx.smem_base(), 7)
        ptx.st_release_sys_s32(flag + 4, 5)
        while not debug._world().polling:
            ptx.wait_expired(NEVER)
        for address in (flag, flag + 4, ptx.smem_base(), flag + (1 << 20), freed, 1 << 60, flag + 6):
            SAID.append(debug.what(address))
        SAID.append(debug.history("other flag"))
        ptx.st_release_sys_s32(flag, 1)
    elif ptx.thread_idx() == 1:
        while ptx.ld_acquire_sys_s32(flag) == 0:
            ptx.wait_expired(NEVER)
    ptx.bar_sync(0, 64)


def test_an_address_is_shown_with_its_value_its_writer_and_who_polls_it():
    SAID.clear()

    def main(comm):
        gone = comm.runtime.allocate(16, "gone")
        gone.free()
        memory = nbep.SharedMemory.create(comm, 128, cells={"flag": 0, "other flag": 4})
        memory.runtime.launch(memory.comm_stream, ask, 1, 64, 64, memory.peers, gone.address)
        memory.wait()

    nbep.spawn(main, 1, "emulator")
    polled, written, shared, beyond, freed, invented, between, last = SAID
    assert "is `nvl_buffer` of rank 0: flag (byte 0)" in polled
    assert "polled by rank 0, kernel `ask`, block 0, warp 0, lane 1 (thread 1), sees 0" in polled
    assert "so far only weak stores, or none, have written it" in polled
    assert "is `nvl_buffer` of rank 0: other flag (byte 4)" in written
    assert "holds s32 5\n" in written
    assert "last written by rank 0, kernel `ask`, block 0, warp 0, lane 0, at " in written
    assert "polled" not in written
    assert "is `shared memory`: byte 0, of 64 bytes\n  holds s32 7, s64 never written" in shared
    assert beyond.endswith("out of bounds")
    assert "was in `gone` of rank 0, 16 bytes, which is freed or closed" in freed
    assert "is no address of any rank" in invented
    assert "holds" not in between  # no integer stands there
    assert last.startswith("`nvl_buffer` of rank 0: other flag (byte 4)\n  last written by rank 0")


@kernel(max_threads=32)
def count_up(peers: Peers, wanted: I32):
    """Each rank adds one to rank 0's counter, and waits for too many."""
    counter = buffer_of(peers, 0)
    if ptx.thread_idx() == 0:
        ptx.atom_add_release_sys_s32(counter, 1)
        while ptx.ld_acquire_sys_s32(counter) != wanted:
            ptx.wait_expired(NEVER)


def hang(tracer):
    def main(comm):
        memory = nbep.SharedMemory.create(comm, 128, cells={"counter": 0})
        memory.runtime.launch(memory.comm_stream, count_up, 1, 32, 0, memory.peers, 3)
        memory.wait()

    with pytest.raises(nbep.DeadlockError) as caught:
        nbep.spawn(main, 2, "emulator", tracer=tracer)
    return caught.value


def test_a_history_is_there_when_the_run_has_failed_and_another_tracer_sees_the_run_too():
    trace = Trace()
    history = debug.History(trace)
    hang(history)
    lines = history.of("counter").splitlines()
    assert lines[0] == "`nvl_buffer` of rank 0: counter (byte 0)"
    assert "release.sys atomic add 1: 0 becomes 1, by rank " in lines[1]
    assert "release.sys atomic add 1: 1 becomes 2, by rank " in lines[2]
    assert len(lines) == 3
    assert [event.value for event in trace.events("atomic")] == [1, 2]
    assert "counter" in trace.stuck()
    assert "no store to a cell whose name begins with 'tail'" in history.of("tail")


def test_a_history_keeps_the_last_stores_only():
    history = debug.History(most=1)
    hang(history)
    assert ["1 becomes 2" in line for line in history.of("counter").splitlines()] == [False, True]


def test_after_a_deadlock_where_is_its_whole_report():
    error = hang(None)
    assert debug.where() == error.full
    assert repr(debug.where()) == error.full  # as a debugger shows it


def test_behind_a_failed_run_pdb_gets_the_program_s_names_and_its_history(tmp_path):
    text = PROGRAM.read_text().replace("        breakpoint()\n        st_release_sys_s32(flag, 3)\n", "")
    program = tmp_path / "hangs.py"
    spawned = 'history = nbep.debug.History()\nnbep.spawn(main, 2, "emulator", tracer=history)\n'
    program.write_text(text.partition("nbep.spawn(")[0] + spawned)
    commands = "c\nfrom __main__ import *\nnbep.debug.where()\nhistory.of('flag')\nq\nq\n"
    said = pdb(commands, program=("-m", "pdb", str(program)))
    assert "NameError" not in said
    _, failed, _, where, history, *_ = said.split("(Pdb) ")
    assert "Entering post mortem debugging" in failed
    assert "expects 3 or more and sees 2" in where
    assert "release.sys store of 2" in history


@pytest.mark.parametrize("engine", ["python", "compiled"])
def test_a_host_function_can_ask_too(engine):
    """Compiled kernels have no threads that could be shown: Python runs all again."""

    def main(comm):
        return debug.where(rank=comm.rank), debug.what(1 << 60, rank=7)

    where, what = nbep.spawn(main, 2, "emulator", engine=engine)[1]
    assert where == "the host of rank 1 is here"
    assert what == "rank: got 7; the run has rank 0, rank 1"


def test_without_a_run_the_words_say_so(monkeypatch):
    nbep.spawn(lambda comm: None, 1, "emulator", engine="compiled")
    with pytest.raises(nbep.EmulatorError, match="compiled kernels leave no threads to look at"):
        debug.where()
    monkeypatch.setattr(World, "latest", lambda: None)
    with pytest.raises(nbep.EmulatorError, match="no emulated run"):
        debug.where()


def test_a_history_hands_bulk_copies_on_to_another_tracer():
    trace = Trace()
    history = debug.History(trace)
    nbep.spawn(round_trip, 2, "emulator", (CASE, Options(nbep.Config(2, 2, 4))), 7, tracer=history)
    assert trace.events("fill", cell="recv_x")
