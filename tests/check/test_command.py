"""`nbep check` finds what is wrong, makes it small, says how to see it again, and says by its exit status whether."""

import linecache
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from parts import both_parts
from processes import LIMIT_S

from nbep.lab.check import Run, main, perform
from nbep.lab.check.command import TO_COMPARE, TO_COMPARE_IN_SCRIPT, shapes_of
from nbep.lab.check.runs import MODELS, SEARCHED, STRATEGIES, World, debug, in_turns, planned, smallest
from nbep.lab.check.scenario import load_scenario

TAIL = "intranode.combine.send_tokens: release of combine-tail"
USERS = '''
"""Rank 0 sends numbers to rank 1, one after the other."""
import numpy as np
import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import (
    ld_acquire_sys_s32, ld_weak_s32, st_relaxed_sys_s32, st_release_sys_s32, st_weak_s32, wait_expired
)
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32, Out

DATA, FLAG = 0, 1024

@kernel(max_threads=1)
def send(out: Out, peers: Peers, bounds: Bounds, tokens: I32):
    cells = buffer_of(peers, 1)
    if peers.rank == 0:
        for i in range(tokens):
            st_weak_s32(cells + DATA + 4 * i, 10 + i)
        RAISE(cells + FLAG, 1)
    elif peers.rank == 1:
        while ld_acquire_sys_s32(cells + FLAG) == 0:
            wait_expired(1 << 62)
        for i in range(tokens):
            st_weak_s32(out + 4 * i, ld_weak_s32(cells + DATA + 4 * i))

def main(comm, tokens=5, is_wrong=False):
    memory = nbep.SharedMemory.create(comm, 2048, timeout_ms=5000)
    out = np.zeros(tokens, np.int32)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, send, 1, 1, 0, out, memory.peers, memory.bounds, tokens)
    memory.wait()
    memory.close()
    assert not is_wrong, "said so"
    return out.tolist()

def check(results, tokens=5):
    assert results[1] == list(range(10, 10 + tokens)), results
'''


@pytest.fixture
def program(tmp_path):
    """Writes the user's file; RAISE is what raises the flag."""

    def write(raise_flag):
        path = tmp_path / f"user_{raise_flag}.py"
        path.write_text(USERS.replace("RAISE", raise_flag))
        return str(path)

    return write


def run_command(capsys, *argv):
    status = main([*argv, "--jobs", "1"])
    return status, capsys.readouterr().out


def test_a_program_without_faults_is_not_blamed(program, capsys):
    status, out = run_command(capsys, program("st_release_sys_s32"), "--seeds", "8")
    assert (status, out) == (0, "16 runs: nothing found.\n")


def test_a_program_that_compares_nothing_is_named(program, tmp_path, capsys):
    text = Path(program("st_release_sys_s32")).read_text()
    bare = text.partition("def check")[0].replace('    assert not is_wrong, "said so"\n', "")
    unchecked, asserting = tmp_path / "unchecked.py", tmp_path / "asserting.py"
    unchecked.write_text(bare)
    asserting.write_text(bare.replace("    return out", "    assert comm.rank == 0 or out[0] == 10\n    return out"))
    status, out = run_command(capsys, str(unchecked), "--seed", "0")
    assert (status, out) == (0, f"1 run: nothing found.\n{TO_COMPARE}\n")
    status, out = run_command(capsys, str(asserting), "--seed", "0")
    assert (status, out) == (0, "1 run: nothing found.\n")


SCRIPT = """
import numpy as np
from numba import cuda

@cuda.jit
def kernel(a, done):
    if cuda.blockIdx.x == 0:
        while cuda.atomic.add(done, 0, 0) == 0:
            pass
    cuda.atomic.add(done, 0, 1)

def helper(): assert False

kernel[2, 1](np.zeros(1), np.zeros(1, np.int32))
"""
OF_RANKS = "def main(comm): return comm.rank\n"


# What a file says besides, and what comes of it: the parameters that it has, the note at the end, or a refusal.
@pytest.mark.parametrize(
    ("file", "said", "outcome"),
    [
        (OF_RANKS, "", {"ranks": 2}),
        (OF_RANKS, "NUM_RANKS = 3", {"ranks": 3}),
        (OF_RANKS, "NUM_SMS = 4", {"ranks": 2, "sms": 4}),
        (OF_RANKS, "NUM_RANKS = 0", "NUM_RANKS = 0; must be an integer of at least 1"),
        (OF_RANKS, "NUM_SMS = '4'", "NUM_SMS = '4'; must be"),
        (OF_RANKS, "check = 3", "check = 3; must be a function"),
        ("def main(comm, seed=1): pass\n", "", "main takes seed, and --seed is for nbep check: rename it"),
        ("def main(comm, min=7): pass\n", "", {"ranks": 2, "min": 7}),
        ("x = 1\n", "", "has no function main(comm)"),
        (SCRIPT, "", {}),
        (SCRIPT, "NUM_SMS = 4", {"sms": 4}),
        (SCRIPT, "NUM_SMS: int = 2 * 2", {"sms": 4}),
        (SCRIPT, "NUM_SMS = len(cuda.gpus)", {}),  # a name of its own
        (SCRIPT, "NUM_SMS = -4", "NUM_SMS = -4; must be"),
        (SCRIPT, "NUM_RANKS = 2", "NUM_RANKS is for files with main(comm)"),
        (SCRIPT, "def check(results): assert results", "check(results) is for files with main(comm)"),
        (SCRIPT, "def check(a, b): assert a == b", {}),
    ],
)
def test_each_name_that_a_file_may_set_is_honoured_or_refused(tmp_path, capsys, file, said, outcome):
    path = tmp_path / "file.py"
    path.write_text(f"{file}{said}\n")
    if isinstance(outcome, dict):
        given = [word for name, value in outcome.items() for word in (f"--{name}", str(value + 1))]
        status, out = run_command(capsys, str(path), "--seed", "0", *given)
        note = TO_COMPARE_IN_SCRIPT if file is SCRIPT else TO_COMPARE
        assert (status, out) == (0, f"1 run: nothing found.\n{note}\n")
        assert load_scenario(str(path)).parameters == outcome
    else:
        with pytest.raises(SystemExit):
            main([str(path)])
        assert outcome in " ".join(capsys.readouterr().err.split())


def test_a_script_has_as_many_sms_as_it_says(tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(f"{SCRIPT}NUM_SMS = 1\n")
    for options, found in ((["--seed", "0"], 1), (["--all"], 1), (["--seed", "0", "--sms", "2"], 0)):
        assert run_command(capsys, str(path), *options)[0] == found


@pytest.mark.parametrize("option", ["--list-faults", "--faults", "--fault=x"])
def test_a_script_has_no_faults_with_names(tmp_path, capsys, option):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with pytest.raises(SystemExit):
        main([option, str(path)])
    assert "only kernels of nbep.device have faults" in " ".join(capsys.readouterr().err.split())


def test_the_ring_of_the_page_compares_its_rows(capsys):
    ring = load_scenario(str(Path(__file__).parents[2] / "docs/examples/ring.py"))
    rows = np.arange(2 * 32).reshape(2, 32).tolist()
    ring.check([None, rows], num_rows=2)
    with pytest.raises(AssertionError):
        ring.check([None, rows[::-1]], num_rows=2)


def test_what_is_found_is_made_small_and_its_command_finds_it_again(program, capsys):
    path = program("st_relaxed_sys_s32")
    status, out = run_command(capsys, path, "--seeds", "8", "--ranks", "4")
    assert status == 1
    assert "DataRace" in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:3] == ["nbep", "check", path]
    assert command[command.index("--tokens") + 1] == "1"
    assert "--ranks" not in command  # 2, as the file has it
    status, again = run_command(capsys, *command[2:])
    assert status == 1
    assert again.strip() in out


def test_results_that_are_wrong_are_found_where_stores_are_late(program, capsys):
    path = program("st_relaxed_sys_s32")
    status, out = run_command(capsys, path, "--memory-model", "delayed", "--seeds", "40", "--no-shrink")
    assert status == 1
    assert "wrong result" in out


def test_numbers_with_defaults_are_options(program, capsys):
    path = program("st_release_sys_s32")
    assert load_scenario(path).parameters == {"ranks": 2, "tokens": 5, "is_wrong": 0}
    status, out = run_command(capsys, path, "--is-wrong", "1", "--seeds", "1")
    assert status == 1
    assert "said so" in out


def test_a_fault_of_a_users_kernel_is_found_by_name(program, capsys):
    path = program("st_release_sys_s32")
    status, out = run_command(capsys, path, "--fault", "send: release of FLAG", "--seeds", "4", "--no-shrink")
    assert status == 1
    assert "race" in out
    assert "--fault 'send: release of FLAG'" in out.splitlines()[-1]
    broken = next(line for line in out.splitlines() if "st_release_sys_s32(" in line)
    assert broken.endswith("<- broken: st_release_sys_s32: relaxed instead"), "the order is not that of the name"


def test_each_fault_of_a_users_file_is_broken_in_turn(program, capsys):
    status, out = run_command(capsys, "--faults", program("st_release_sys_s32"), "--seeds", "2")
    assert status == 0
    assert "4 faults: 4 found, 0 not found" in out


def test_a_fault_of_nbeps_own_is_found_by_name(capsys):
    status, out = run_command(capsys, "intranode.combine", "--fault", TAIL, "--seeds", "2", "--no-shrink")
    assert status == 1
    assert "tail[channel 0, src 0]" in out


def test_several_processes_find_the_same_as_one(program, capsys):
    path = program("st_relaxed_sys_s32")
    arguments = path, "--seeds", "4", "--no-shrink", "--jobs"
    outs = []
    for jobs in ("1", "2"):
        assert main([*arguments, jobs]) == 1
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]


def test_all_strategies_and_models_take_part():
    runs = planned(Run("intranode.layout"), range(48), STRATEGIES, MODELS, 1000)
    assert {(run.strategy.partition(":")[0], run.memory_model) for run in runs} == {
        (strategy, model) for strategy in STRATEGIES for model in MODELS
    }
    # Seeds bound quanta in six ways: each strategy meets all of them.
    for strategy in STRATEGIES:
        assert {run.seed % 6 for run in runs if run.strategy.startswith(strategy)} == set(range(6))


@pytest.mark.parametrize("scenario", both_parts(["intranode.dispatch", "network.push"], thorough=["low_latency"]))
def test_a_checked_run_takes_the_same_steps_as_one_under_sc(scenario):
    """So a search leaves sc out."""
    for run in planned(Run(scenario), range(3, 7), STRATEGIES, ["sc"], 9000):
        seen, again = World(), World()
        assert perform(run, None, seen) is None
        assert perform(replace(run, memory_model="checked"), None, again) is None
        assert again.world.counters == seen.world.counters
        assert again.world.random.getstate() == seen.world.random.getstate()


def test_a_search_takes_turns_with_the_shapes_of_its_scenario():
    shapes = shapes_of(Run("internode"))
    runs = in_turns([(shape, 1000) for shape in shapes], range(200), STRATEGIES, SEARCHED)
    assert len(runs) == 400
    for shape in set(shapes):
        own = [run for run in runs if run.parameters == shape.parameters]
        assert {run.strategy.partition(":")[0] for run in own} == set(STRATEGIES)
        assert {run.seed % 6 for run in own} == set(range(6))
    given = Run("internode", (("ranks", 2),))
    assert shapes_of(given) == [given]


def test_preemptions_become_fewer():
    finding = perform(Run("intranode.combine", (), 0, "few_preemptions:3:9000", "checked", (TAIL,)))
    assert finding.kind == "race"
    small = smallest(finding, map).run
    assert small.strategy == "uniform"
    assert small.values["tokens"] == 1
    assert small.values["ranks"] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "which SCENARIO"),
        (["nothing"], "no scenario 'nothing'; there are intranode.layout"),
        (["nothing.py"], "no Python file"),
        (["intranode.layout", "--colour", "3"], "takes --ranks --tokens"),
        (["intranode.layout", "--fault", "x"], "no fault 'x'"),
        (["intranode.layout", "--strategy", "fair"], "must be uniform"),
        (["intranode.layout", "--pdb"], "takes --seed"),
        (["--faults", "nothing"], "no Python file"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(argv, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_scenarios_and_faults_are_listed(capsys):
    assert run_command(capsys, "--list")[1].startswith("intranode.layout")
    assert TAIL in run_command(capsys, "intranode.combine", "--list-faults")[1]
    assert TAIL not in run_command(capsys, "intranode.layout", "--list-faults")[1]


@pytest.mark.parametrize("fault", [TAIL, "intranode.combine.send_tokens: wait for head"])
def test_the_debugger_stops_at_the_kernels_line_that_fails(fault, monkeypatch, capsys):
    frames = []

    def look(trace):
        while trace.tb_next is not None:
            trace = trace.tb_next
        frames.append((trace.tb_frame.f_code.co_name, sorted(trace.tb_frame.f_locals)))

    monkeypatch.setattr("pdb.post_mortem", look)
    assert main(["intranode.combine", "--fault", fault, "--seed", "0", "--pdb"]) == 1
    name, names = frames[0]
    assert f"({name})" in capsys.readouterr().out
    assert "rows" in names or "dst" in names


def test_the_debugger_stops_in_a_thread_that_waits_if_all_do(program, monkeypatch):
    lines = []

    def look(trace):
        while trace.tb_next is not None:
            trace = trace.tb_next
        lines.append(linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip())

    monkeypatch.setattr("pdb.post_mortem", look)
    assert debug(Run(program("max")))  # no rank raises the flag
    assert lines == ["wait_expired(1 << 62)"]


def test_the_debugger_does_not_stop_where_nothing_fails(program, monkeypatch, capsys):
    monkeypatch.setattr("pdb.post_mortem", pytest.fail)
    assert main([program("st_release_sys_s32"), "--seed", "3", "--pdb"]) == 0
    assert capsys.readouterr().out == "1 run: nothing found.\n"


def test_ctrl_c_ends_it_in_one_line():
    code = (
        "import nbep.lab.check.command as c, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background has none
        "plain = c.first_finding\n"
        "def interrupted(runs, each, advance):\n"
        "    def told(number):\n"
        "        advance(number)\n"
        "        if number == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return plain(runs, each, told)\n"
        "c.first_finding = interrupted\n"
        "if __name__ == '__main__': raise SystemExit(c.main(['intranode.layout', '--jobs', '2']))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert out.returncode == 130
    assert out.stdout == "Interrupted after 2 runs; nothing was found up to there.\n"
    assert out.stderr == ""
