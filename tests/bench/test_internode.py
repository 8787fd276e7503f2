"""`nbep bench internode`: what it measures and counts; its times need a GPU: see tests/cuda/test_benchmarks.py."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from bench_fakes import NumpyArrays
from parts import both_parts

import nbep
from nbep.bench import internode
from nbep.bench.harness import command, normal_calls
from nbep.bench.harness.normal_calls import WORKS, choose_experts, token_bytes
from nbep.bench.harness.report import Push
from nbep.bench.internode import Carried, Routes, allowed_us, expected_rows, make_tokens, num_wrong_rows

SHAPE = ["--tokens", "2", "--hidden", "128", "--topk", "3", "--experts", "8", "--nvl-slots", "8", "--rdma-slots", "8"]
TRIED = ["--num-sms", "2", "--nvl-chunks", "2", "--rdma-chunks", "2", "--repeat", "1"]
CALL_US = 50.0
PUSH = Push(to_peers=2.0, at_home=4.0, both=4.0)


def measure_on_the_emulator(argv, monkeypatch):
    """Run everything but the clock and push. Returns whether the results were right, of every rank."""

    def mean_us(clock, call):
        call()
        return CALL_US

    monkeypatch.setattr(normal_calls, "arrays", NumpyArrays)
    monkeypatch.setattr(internode, "mean_us", mean_us)
    monkeypatch.setattr(internode, "measure_push", lambda clock, options: dict.fromkeys(options.num_sms, PUSH))
    options = internode.parse(argv)
    assert internode.fill_in(options, None) is None
    return nbep.spawn(internode.measure_rank, options.nodes * options.num_nvl_peers, "emulator", (options,))


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        pytest.param(
            [],
            [(transport, 2, work, 2, 2) for transport in ("direct", "ibgda") for work in WORKS],
            id="transports and works",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ["--transport=ibgda", "--works=combine bf16", "--nvl-chunks=1,2"],
            [("ibgda", 2, WORKS[2], nvl, 2) for nvl in (1, 2)],
            id="chunks inside a node",
        ),
        pytest.param(
            ["--transport=direct", "--works=combine bf16", "--nvl-chunks=1,2", "--rdma-chunks=2,3"],
            [("direct", 2, WORKS[2], nvl, rdma) for nvl in (1, 2) for rdma in (2, 3)],
            id="chunks",
            marks=(pytest.mark.thorough, pytest.mark.long),
        ),
        pytest.param(
            ["--transport=direct", "--works=combine bf16", "--num-sms=2,4", "--nvl-chunks=1,2", "--rdma-chunks=2,3"],
            [("direct", sms, WORKS[2], nvl, rdma) for sms in (2, 4) for nvl in (1, 2) for rdma in (2, 3)],
            id="SMs and chunks",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_every_transport_work_and_size_has_a_row(argv, settings, monkeypatch, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert measure_on_the_emulator([*SHAPE, *TRIED, *argv, "--json", str(report)], monkeypatch) == [True] * 4
    everything = json.loads(report.read_text())
    rows = everything["rows"]
    columns = ("transport", "num_sms", "work", "nvl_chunk", "rdma_chunk")
    assert [tuple(row[column] for column in columns) for row in rows] == settings
    for row in rows:
        carried = Carried(**everything["carried_bytes"][row["work"]])
        assert row["us"] == pytest.approx(CALL_US)
        assert row["rdma_gbps"] == pytest.approx(carried.rdma / CALL_US / 1e3)
        assert row["nvl_gbps"] == pytest.approx(carried.nvl / CALL_US / 1e3)
        assert row["link_gbps"] == pytest.approx(carried.link / CALL_US / 1e3)
        assert row["of_push"] == pytest.approx(allowed_us(carried, PUSH) / CALL_US)
    assert everything["network"] == 'the "network" is the memory of one card; no NIC and no NVLink is measured'
    said = capsys.readouterr().out
    assert '2 virtual nodes of 2 ranks; the "network" is the memory of one card' in said
    assert said.count("best combine bf16: 50.0 us") == len({row["transport"] for row in rows})


@pytest.mark.parametrize("work", both_parts(WORKS[2:], thorough=WORKS[:2]))
def test_a_wrong_result_ends_the_run_with_what_is_wrong(work, monkeypatch, capsys):
    """One bit of one row on one rank is another."""
    verbs = {WORKS[0]: "dispatch", WORKS[1]: "dispatch", WORKS[2]: "combine"}
    verb = getattr(nbep.Buffer, verbs[work])

    def wrong(self, x, *args, **kwargs):
        results = verb(self, x, *args, **kwargs)
        is_meant = work == WORKS[2] or isinstance(x, tuple) == (work == WORKS[1])
        if self.rank == 2 and is_meant:
            first = results[0][0] if isinstance(results[0], tuple) else results[0]
            first.view(np.uint8)[1, 9] ^= 1
        return results

    monkeypatch.setattr(nbep.Buffer, verbs[work], wrong)
    assert measure_on_the_emulator([*SHAPE, *TRIED, "--transport", "direct"], monkeypatch) == [False] * 4
    said = capsys.readouterr().out
    assert f"direct: rank 2: {work}: 1 wrong rows" in said
    assert "best" not in said


def test_bytes_of_both_hops_are_counted_by_hand():
    """Two nodes of two ranks; rank 0 has three tokens, the others none. Columns: ranks 0, 1 | 2, 3."""
    routes = np.zeros((4, 3, 4), bool)
    routes[0, 0] = [1, 1, 0, 0]  # own node: to itself and its neighbour
    routes[0, 1] = [0, 0, 1, 1]  # over the network to rank 2, which keeps it and forwards it to rank 3
    routes[0, 2] = [1, 0, 0, 1]  # to itself; over the network to rank 2, which forwards it to rank 3
    carried = Routes(routes, 2).carried(token_bytes=400)
    assert carried.rdma == (1 + 1 + 2) * 100
    assert carried.nvl == (2 + 2 + 2) * 100
    assert carried.stored == carried.rdma + carried.nvl
    assert carried.link == (2 + 3) * 100  # two over the network; to ranks 1, 3 and 3 from their neighbours


def test_the_slower_of_links_and_sms_is_what_push_allows():
    assert allowed_us(Carried(0, 0, stored=8000, link=6000), PUSH) == pytest.approx(3)
    assert allowed_us(Carried(0, 0, stored=16000, link=6000), PUSH) == pytest.approx(4)


def test_a_row_in_fp8_takes_its_scales_along():
    assert [token_bytes(work, 7168) for work in WORKS] == [14336, 7168 + 56 * 4, 14336]


@pytest.mark.parametrize(("num_nodes", "num_groups"), [(2, 1), (2, 2), (4, 2)])
def test_tokens_go_to_so_many_nodes_at_most(num_nodes, num_groups):
    topk_idx = choose_experts(3, 50, 4, 32, num_nodes, num_groups)
    assert topk_idx.shape == (50, 4)
    assert topk_idx.dtype == np.int64
    assert all(len(set(row)) == 4 for row in topk_idx.tolist())
    nodes = [len(set(row)) for row in (topk_idx // (32 // num_nodes)).tolist()]
    assert max(nodes) == num_groups
    assert set(topk_idx.reshape(-1).tolist()) == set(range(32))


def test_every_token_has_a_row_of_its_own():
    rows = np.concatenate([make_tokens(rank, np.arange(5000), 128) for rank in range(8)])
    assert len(np.unique(rows.view(np.int16), axis=0)) == len(rows)
    assert np.abs(rows.astype(np.float32)).max() <= 15


def test_expected_rows_run_by_source_then_token():
    in_rank = np.zeros((2, 4, 2), bool)
    in_rank[0, [1, 3], 1] = in_rank[1, [0], 1] = True
    rows = expected_rows(Routes(in_rank, 1), 1, 128)
    assert rows[:, 0].astype(int).tolist() == [0, 0, 1]
    assert rows[:, 1].astype(int).tolist() == [1, 3, 0]


def test_rows_of_another_number_are_wrong(monkeypatch):
    monkeypatch.setattr(normal_calls, "arrays", NumpyArrays)
    assert num_wrong_rows(np.zeros((3, 4)), np.zeros((2, 4))) == 3
    assert num_wrong_rows((np.zeros((3, 4)), np.ones((3, 1))), (np.zeros((3, 4)), np.zeros((3, 1)))) == 3


@pytest.mark.parametrize(
    ("argv", "num_ranks", "problem"),
    [
        (["--nodes", "1"], None, "2 ranks in 1 nodes; there must be 2 to 8, in at least 2 nodes"),
        (["--nodes", "3", "--num-nvl-peers", "4"], None, "12 ranks in 3 nodes; there must be 2 to 8"),
        (["--nodes", "3"], 4, "4 ranks are not 3 nodes of 1"),
        (["--num-nvl-peers", "4"], 4, "4 ranks are not 2 nodes of 4"),
        (["--experts", "10"], None, "10 experts are no multiple of 4 ranks"),
        (["--topk-groups", "3"], None, "3 groups of 2 nodes"),
        (["--experts", "8", "--topk", "5", "--topk-groups", "1"], None, "top-5 of 4 experts"),
        (["--hidden", "200"], None, "hidden 200 is no multiple of 128, as FP8 needs"),
        (["--nvl-slots", "20"], None, "NVL chunk 32; 2 nodes share 20 slots in combine"),
        (["--rdma-slots", "16"], None, "num_max_rdma_chunked_send_tokens: got 16; must be at most half of"),
        (["--num-sms", "3"], None, "num_sms: got 3; must be even between nodes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_told_in_one_line(argv, num_ranks, problem, monkeypatch, capsys):
    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: num_ranks and SimpleNamespace(size=num_ranks))
    assert internode.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nbep bench internode: {problem}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("argv", [["--transport", "smoke"], ["--works", "nothing"], ["--repeat", "0"]], ids=" ".join)
def test_unknown_names_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        internode.parse(argv)
    assert exit_info.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("world", [None, SimpleNamespace(size=6)], ids=["virtual ranks", "processes"])
@pytest.mark.parametrize("right", [True, False])
def test_nodes_are_filled_with_the_ranks_that_there_are(world, right, monkeypatch):
    seen = []

    def measure_rank(comm, options):
        seen.append((options.nodes, options.num_nvl_peers, options.topk_groups, options.num_qps))
        return right

    def spawn(fn, num_ranks, target, args):
        assert num_ranks == 4
        return [True, fn(None, *args)]

    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: world)
    monkeypatch.setattr(internode, "measure_rank", measure_rank)
    monkeypatch.setattr(internode.nbep, "spawn", spawn)
    assert internode.main(["--experts", "24"]) == (0 if right else 1)
    assert seen == [(2, 2 if world is None else 3, 2, 12)]
