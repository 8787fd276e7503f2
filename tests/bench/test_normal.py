"""`nbep bench intranode` and `elastic`: what they measure, say and write, on emulated ranks without a clock."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from bench_fakes import NumpyArrays

import nbep
from nbep.bench import elastic, intranode
from nbep.bench.harness import normal_calls, report
from nbep.bench.harness.clocks import HostTime
from nbep.bench.harness.normal_calls import WORKS, choose_experts
from nbep.bench.harness.report import Push

SHAPE = ["--tokens", "6", "--hidden", "128", "--topk", "2", "--experts", "4", "--repeat", "1"]
ROW_BYTES = dict(zip(WORKS, (256, 132, 256), strict=True))
CALL_US = 50.0
PUSH = Push(to_peers=2.0, at_home=4.0, both=4.0)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run a benchmark on two emulated ranks; what it wrote. Each call is made once, and takes CALL_US."""

    def mean_us(clock, call):
        call()
        return CALL_US

    def host_times(clock, steps):
        return {step.label: HostTime(step.call() and 3.0, 2.0, 1.0) for step in steps}

    monkeypatch.setattr(normal_calls, "arrays", NumpyArrays)
    monkeypatch.setattr(intranode, "NUM_NVL_BYTES", 1 << 20)
    monkeypatch.setattr(intranode, "host_times", host_times)
    monkeypatch.setattr(intranode, "push_rates", lambda clock, memory, sms: dict.fromkeys(sms, PUSH))
    for benchmark in (elastic, intranode):
        monkeypatch.setattr(benchmark, "mean_us", mean_us)

    def run(benchmark, *argv):
        path = tmp_path / "all.json"
        options = benchmark.parse([*SHAPE, *argv, "--json", str(path)])
        nbep.spawn(benchmark.measure_rank, 2, "emulator", (options,))
        return json.loads(path.read_text())

    return run


def tokens_to_ranks():
    """How many tokens of the inputs go from each rank to each."""
    owners = [choose_experts(rank, 6, 2, 4) // 2 for rank in range(2)]
    return [[int((of_rank == dst).any(axis=1).sum()) for dst in range(2)] for of_rank in owners]


def test_inside_a_node_every_work_number_of_sms_and_chunk_has_a_row(measured, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    found = measured(intranode, "--sms", "2,4", "--chunks", "1,2", "--slots", "4", "--plot", str(plot))
    assert [(row["work"], row["num_sms"], row["chunk"]) for row in found["rows"]] == [
        (work, sms, chunk) for work in WORKS for sms in (2, 4) for chunk in (1, 2)
    ]
    sent = tokens_to_ranks()
    for row in found["rows"]:
        assert row["us"] == CALL_US
        size = ROW_BYTES[row["work"]] / 2
        wire = size * (sent[0][1] + sent[1][0]) / CALL_US / 1e3
        assert row["gbps"] == pytest.approx(size * sum(map(sum, sent)) / CALL_US / 1e3)
        assert row["wire_gbps"] == pytest.approx(wire)
        assert row["of_push"] == pytest.approx(wire / PUSH.to_peers)
    assert (found["layout_us"], found["host"]["us"]) == (CALL_US, 3.0)
    assert found["push_gbps"]["4"] == PUSH._asdict()
    said = capsys.readouterr().out
    assert said.count("best combine bf16 at no more than") == 4
    assert "2 ranks, 6 tokens, hidden 128, top-2" in said
    assert "in a row 1.0" in said
    assert plot.stat().st_size > 0


def test_without_rings_there_are_no_chunks_to_try(measured):
    found = measured(intranode, "--zero-copy", "--sms", "2", "--chunks", "1,2")
    assert [(row["work"], row["chunk"]) for row in found["rows"]] == [(work, 1) for work in WORKS]


@pytest.mark.parametrize(
    "way",
    [pytest.param([], id="with a handle"), pytest.param(["--whole"], id="whole calls", marks=pytest.mark.thorough)],
)
def test_elastic_calls_are_compared_with_those_without_rings(way, measured, capsys):
    found = measured(elastic, "--sms", "2", "--align", "2", *way)
    forms = ["compact", "shared", "expanded", *([] if way else ["zero_copy"])]
    assert [row["work"] for row in found["rows"]] == [f"{form} {work}" for form in forms for work in WORKS]
    num_tokens = sum(map(sum, tokens_to_ranks())) / 2
    for row in found["rows"]:
        size = ROW_BYTES[row["work"].partition(" ")[2]]
        assert (row["num_sms"], row["us"]) == (2, CALL_US)
        assert row["gbps"] == pytest.approx(num_tokens * size / CALL_US / 1e3)
    assert ("whole calls" if way else "with a handle") in " ".join(capsys.readouterr().out.split())


def test_push_copies_a_region_for_each_peer_and_as_many_at_home(monkeypatch):
    stream = SimpleNamespace(synchronize=lambda: None)
    torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: stream), int16=None)
    torch.ones = lambda count, **_: np.ones(count, np.int16)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(report, "PUSH_ROWS", 1)
    monkeypatch.setattr(report, "mean_us", lambda clock, call: call() or 1.0)

    def measure(comm):
        memory = nbep.SharedMemory.create(comm, report.push_bytes(2))
        memory.symmetric.write(report.PUSH_OFFSET, np.zeros(2 * report.ROW_BYTES, np.int16))
        comm.barrier()
        rates = report.push_rates(None, memory, [2])
        memory.runtime.current_stream.synchronize()
        comm.barrier()
        regions = memory.symmetric.read(report.PUSH_OFFSET, 2 * report.ROW_BYTES, "int16").reshape(4, -1)
        memory.close()
        return rates, regions.mean(axis=1).tolist()

    rates = {2: Push(report.ROW_BYTES / 1e3, report.ROW_BYTES / 1e3, 2 * report.ROW_BYTES / 1e3)}
    assert nbep.spawn(measure, 2, "emulator") == [(rates, [0, 1, 1, 0]), (rates, [1, 0, 1, 0])]
