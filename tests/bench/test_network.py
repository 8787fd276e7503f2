"""`nbep bench network`: what it measures, says and writes; its times need a GPU: see tests/cuda/test_benchmarks.py."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import nbep
from nbep.bench import network
from nbep.bench.harness import command
from nbep.bench.network import Setting, parse, settings, sizes_of
from nbep.device.network.nvshmem_library import NvshmemMissing

SMALL = ["--sizes", "16,64", "--batches", "1,4", "--queues", "1,2", "--sms", "1", "--messages", "3", "--repeat", "2"]
LAUNCHES = 2
LAUNCH_US = 8.0


def measure_on_the_emulator(argv, monkeypatch):
    """Run everything but the clock and the driver's copy. Returns what was called, of all ranks."""
    calls = []

    def driver_us(stream, call, times):
        for _ in range(times):
            call()
        stream.synchronize()
        return times * LAUNCH_US

    monkeypatch.setattr(network, "LAUNCHES", LAUNCHES)
    monkeypatch.setattr(network, "driver_us", driver_us)
    monkeypatch.setattr(network, "copy", lambda memory, dst, src, num_bytes: calls.append(num_bytes))
    options = parse(argv)
    options.transports = options.transports or ["direct", "ibgda"]
    nbep.spawn(network.measure_rank, 2, "emulator", (options,))
    return calls


@pytest.mark.thorough
def test_every_transport_size_and_use_of_queues_has_a_row(monkeypatch, tmp_path, capsys):
    report = tmp_path / "report.json"
    copied = measure_on_the_emulator([*SMALL, "--json", str(report), "--plot", str(tmp_path / "p.png")], monkeypatch)
    everything = json.loads(report.read_text())
    rows = [SimpleNamespace(**row) for row in everything["rows"]]
    ibgda = [("ibgda", batch, queues) for batch in (1, 4) for queues in (1, 2)]
    assert [(row.transport, row.batch, row.num_queues, row.num_bytes) for row in rows] == [
        (*setting, size) for setting in [("direct", 0, 0), *ibgda] for size in (16, 64)
    ]
    assert {row.num_messages for row in rows} == {4 * 3}
    assert {row.us for row in rows} == {LAUNCH_US}
    for row in rows:
        assert row.million_per_s == pytest.approx(12 / LAUNCH_US)
        assert row.gbps == pytest.approx(12 * row.num_bytes / LAUNCH_US / 1e3)
    assert {row.of_copy for row in rows} == {1.0}
    assert sorted(set(copied)) == [12 * 16, 12 * 64]
    assert len(copied) == 2 * 2 * 3 * LAUNCHES
    assert everything["wire"] == "the wire is the memory of one card; no NIC and no NVLink is measured"
    assert (tmp_path / "p.png").exists()
    said = capsys.readouterr().out
    assert "the wire is the memory of one card" in said
    assert "ibgda, 4 a doorbell, 2 queue pairs" in said


def test_large_messages_are_fewer_but_each_warp_has_one():
    options = parse(["--sms", "2", "--queues", "1", "--bytes", str(1 << 20)])
    assert [sizes_of(options, size, 1).num_messages for size in (16, 4096, 65536, 1 << 20)] == [64, 32, 2, 1]


def test_only_ibgda_has_queues_to_vary():
    options = parse(["--transports", "direct,ibgda,nvshmem", "--batches", "4", "--queues", "1,4"])
    assert list(settings(options)) == [
        Setting("direct", 0, 0),
        Setting("ibgda", 4, 1),
        Setting("ibgda", 4, 4),
        Setting("nvshmem", 0, 0),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes", "16,24"], "multiples of 16"),
        (["--transports", "direct,smoke"], "smoke; allowed: direct, ibgda, nvshmem"),
        (["--queues", "64"], "--queues: at most 32 with --sms 8"),
        (["--sms", "1", "--queues", "8"], "--queues: at most 4 with --sms 1"),
        (["--batches", "3"], "--batches: nic: batch: got 3"),
        (["--repeat", "0"], "0 is not positive"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world", "installed", "measured"),
    [
        (None, True, ["direct", "ibgda"]),
        (SimpleNamespace(size=2), False, ["direct", "ibgda"]),
        (SimpleNamespace(size=2), True, ["direct", "ibgda", "nvshmem"]),
    ],
    ids=["virtual ranks", "not installed", "installed"],
)
def test_nvshmem_is_measured_where_it_can_run(world, installed, measured, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: world)
    monkeypatch.setattr(network, "archive", Mock(side_effect=None if installed else NvshmemMissing("too old")))
    monkeypatch.setattr(network, "measure_rank", lambda comm, options: seen.append(options.transports))
    monkeypatch.setattr(network.nbep, "spawn", lambda fn, n, target, args: [fn(None, *args)])
    assert network.main([]) == 0
    assert seen == [measured]


def test_nvshmem_that_is_asked_for_and_cannot_run_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: None)
    assert network.main(["--transports", "nvshmem"]) == 2
    assert "nvshmem takes a process for each GPU" in capsys.readouterr().err
