"""The command line finds its subcommands and leaves the rest to them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from nbep import cli
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
        (["bench", "emulator", "--json", "x"], "nbep.bench.emulator", ["--json", "x"]),
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


@pytest.mark.parametrize("command", ["demo", "model", "compile", "info", *(f"bench {name}" for name in cli.BENCHMARKS)])
def test_every_subcommand_exists_and_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    assert "usage" in capsys.readouterr().out
