"""The command line finds its subcommands and leaves the rest to them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import both_parts

from nbep import cli, starting
from nbep.version import __version__


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"nbep {__version__}\n"


def test_module_runs_as_a_program():
    out = subprocess.run([sys.executable, "-m", "nbep", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout == f"nbep {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["bench"], ["bench", "nothing"], ["nothing"]], ids=" ".join)
def test_missing_and_unknown_commands_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "usage: nbep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "module", "rest"),
    [
        (["demo", "--ranks", "2"], "nbep.demo", ["--ranks", "2"]),
        (["demo", "--help"], "nbep.demo", ["--help"]),
        (["compile", "--arch", "sm_90"], "nbep.device.compile", ["--arch", "sm_90"]),
        (["bench", "emulator", "--json", "x"], "bench_emulator", ["--json", "x"]),
        (["bench", "low-latency", "--ranks", "4"], "nbep.bench.low_latency", ["--ranks", "4"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_subcommand_gets_its_arguments_and_gives_the_exit_status(argv, module, rest, monkeypatch):
    calls = []

    def main(argv):
        calls.append(argv)
        return 3

    def import_module(name):
        assert name == module
        return SimpleNamespace(main=main)

    monkeypatch.setattr(cli, "import_module", import_module)
    assert cli.main(argv) == 3
    assert calls == [rest]


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    def main(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=main))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "nbep demo: interrupted\n"


def test_ctrl_c_ends_a_command_in_one_line_while_it_still_imports():
    """The first import of NumPy sends it: what that makes of the exception is a page long."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background has none
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numpy': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['/bin/nbep', 'demo']\n"
        "import nbep.demo\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout, out.stderr) == (130, "", "nbep: interrupted\n")


def test_ctrl_c_is_an_exception_again_for_programs_that_import_nbep_and_when_a_command_runs(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        starting.end_at_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        monkeypatch.setattr(sys, "argv", ["/bin/nbep"])
        starting.end_at_interrupts()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler

        def main(argv):
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=main))
        assert cli.main(["demo"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)


COMMANDS = ["demo", "check", "puzzle", "litmus", "compile", "info", *(f"bench {n}" for n in cli.BENCHMARKS)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_has_help_and_json_where_it_prints_tables(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert "usage" in out
    assert ("--json [FILE.json]" in out) == (command != "bench soak")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("demo --ranks 2 --tokens 2 --no-picture", "checks"),
        ("check intranode.layout --tokens 4 --seed 1", "found"),
        ("check --list", 0),
        ("check --list-faults intranode.layout", 0),
        ("puzzle", 0),
        ("litmus CoRR", 0),
    ],
)
def test_with_json_the_output_is_one_value_and_with_a_file_the_tables_stay(command, key, tmp_path, capsys, monkeypatch):
    argv = command.split()
    assert cli.main([*argv, "--json"]) == 0
    said = capsys.readouterr()
    assert key in as_keys(json.loads(said.out))
    assert said.err == ""  # progress is for a terminal
    file = tmp_path / "all.json"
    assert cli.main([*argv, "--json", str(file)]) == 0
    assert key in as_keys(json.loads(file.read_text()))
    with pytest.raises(json.JSONDecodeError):
        json.loads(capsys.readouterr().out)


def as_keys(value):
    return value if isinstance(value, dict) else range(len(value))


def test_what_is_no_json_file_is_not_written_over(tmp_path, capsys):
    kernels = tmp_path / "kernels.py"
    kernels.write_text("mine")
    with pytest.raises(SystemExit):
        cli.main(["compile", "--json", str(kernels)])
    assert "must be a file that ends in .json, or be left out" in capsys.readouterr().err
    assert kernels.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    both_parts([("puzzle", "1")], thorough=[("puzzle", ""), ("compile --help", "1"), ("compile --help", "")]),
)
def test_a_closed_output_ends_a_command_without_a_traceback(command, unbuffered):
    program = [sys.executable, "-m", "nbep", *command.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(program, stdout=write_end, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "nbep: cannot write the output: No space left on device\n")
