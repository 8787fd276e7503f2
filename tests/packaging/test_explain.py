"""`nbep explain` reads the time-out lines of DeepEP v1.2.1 and of nbep: who waits for whom, and who is missing."""

import io

import pytest

from nbep import cli
from nbep.device.kernels.intranode.dispatch import DISPATCH_RECEIVER_TAIL
from nbep.device.protocols.waits import FaultReport
from nbep.host.ranks.who_waits import Log, explain
from nbep.host.reports import wait_error

# Lines of deepseek-ai/DeepEP #570, PR #181 and #137, as they were printed.
BARRIER = [
    f"DeepEP timeout check failed: rank = {rank}, thread = {thread}, value = {1024 * (thread == 5)})"
    for rank in (6, 2)
    for thread in range(8)
]
META = "DeepEP dispatch forwarder timeout (RDMA meta), channel:"
RECEIVER = "DeepEP dispatch NVL receiver timeout, channel:"
ONE_WAY = [
    f"{META} 8, RDMA: 0, nvl: 2, src RDMA lane: 1, dst NVL: 6, meta: 0, 0, 0, 0",
    f"{META} 8, RDMA: 0, nvl: 2, src RDMA lane: 1, dst NVL: 3, meta: 0, 0, 0, 0",
    f"{RECEIVER} 5, RDMA: 0, nvl: 2, src RDMA: 0, src nvl: 5, start: 0, end: 0",
    f"{RECEIVER} 5, RDMA: 0, nvl: 2, src RDMA: 1, src nvl: 5, start: 0, end: 0",
    f"{RECEIVER} 2, RDMA: 1, nvl: 1, src NVL: 6, head: 254, tail: 254",
]
NETWORK = [
    f"{META} 4, RDMA: 1, nvl: 4, src RDMA lane: 0, dst NVL: 5, meta: 0, 0, 0, 0",
    f"{RECEIVER} 9, RDMA: 1, nvl: 3, src RDMA: 0, src nvl: 3, start: 0, end: 0",
    f"{RECEIVER} 5, RDMA: 1, nvl: 6, src RDMA: 0, src nvl: 4, start: 0, end: 0",
]

# One line of each kind, with numbers of our own, by (who, for whom).
AT = "channel: 0, RDMA: 1, nvl: 2"
FORWARDER, COMBINE = "DeepEP dispatch forwarder timeout", "DeepEP combine forwarder"
KINDS = [
    (1, 3, "DeepEP timeout check failed: rank = 1, thread = 3, value = 1024)"),
    (0, 2, "RuntimeError: something rank=0, thread=2, value=1024"),
    (10, 2, f"DeepEP dispatch RDMA sender timeout, {AT}, dst RDMA lane: 0, head: 4, tail: 9"),
    (10, 10, "DeepEP RDMA sender coordinator timeout, channel: 0, IB: 1, nvl 2, dst IB: 0, tail: 4, remaining: 9"),
    (10, 2, f"{FORWARDER} (RDMA meta), {AT}, src RDMA lane: 0, dst NVL: 5, meta: 0, 0, 0, 0"),
    (10, 13, f"{FORWARDER} (NVL check), {AT}, dst NVL: 5, head: 1, tail: 2"),
    (10, 2, f"{FORWARDER} (RDMA check), {AT}, dst NVL: 5, src RDMA lane: 0, head: 1, tail: 1, expected: 3"),
    (10, 13, f"DeepEP dispatch NVL receiver timeout, {AT}, src RDMA: 0, src nvl: 5, start: 0, end: 0"),
    (10, 13, f"DeepEP dispatch NVL receiver timeout, {AT}, src NVL: 5, head: 1, tail: 1"),
    (10, 13, f"DeepEP combine NVL sender timeout, {AT}, dst NVL: 5, RDMA lane: 0, head: 0, tail: 4, start: 0, end: 9"),
    (10, 2, f"{COMBINE} (RDMA check) timeout, {AT}, dst RDMA: 0, head: 0, tail: 4, chunked: 4"),
    (10, 13, f"{COMBINE} (NVL check) timeout, {AT}, src NVL: 5, dst RDMA: 0, tail: 0, waiting: 1, total: 9, sub: 0"),
    (10, 2, f"DeepEP combine RDMA receiver timeout, {AT}, src RDMA: 0, tail: 0, waiting: 1, expect: 3"),
    (7, 7, "Global rank: 7, num_recv_tokens: -1, num_rdma_recv_tokens: 12"),
]


@pytest.mark.parametrize(("rank", "peer", "line"), KINDS, ids=[line[:50] for _, _, line in KINDS])
def test_each_line_says_who_waits_for_whom(rank, peer, line):
    for printed in (line, f"[rank3]: {line}\n"):
        assert [(wait.rank, wait.peer) for wait in Log([printed]).waits] == [(rank, peer)]


@pytest.mark.parametrize(
    "line",
    [
        "DeepEP timeout check failed: rank = 1, thread = 3, value = 0)",
        "DeepEP RDMA sender coordinator timeout, channel: 0, IB: 1, nvl 2, dst IB: 0, tail: 4, remaining: 0",
        "Global rank: 7, num_recv_tokens: 4, num_rdma_recv_tokens: 12",
        "rank = 3",
    ],
)
def test_a_line_in_which_no_rank_waits_counts_for_none(line):
    assert Log([line]).waits == {}


def test_the_rank_that_did_not_come_to_the_barrier_is_missing():
    text = explain(BARRIER)
    assert "Missing: rank 5." in text
    assert "Had come to the barrier and printed nothing: ranks 0, 1, 3, 4, 7." in text
    assert [line.split() for line in text.splitlines()[1:4]] == [["5"], ["2", "A"], ["6", "A"]]


def test_ranks_of_other_nodes_that_print_nothing_are_missing():
    text = explain(ONE_WAY)
    assert "Missing: ranks 5, 10, 14." in text
    assert "look at the network" not in text


def test_two_nodes_that_wait_for_each_other_point_at_the_network():
    back = ["DeepEP dispatch forwarder timeout (RDMA meta), channel: 4, RDMA: 0, nvl: 4, src RDMA lane: 1, dst NVL: 5"]
    text = explain([*NETWORK[:1], *back])
    assert "No rank is missing" in text
    assert "They wait for each other: 4 and 12." in text
    assert "messages do not arrive from node 0 to node 1, 1 to node 0: look at the network" in text


def test_a_log_of_several_kinds_has_a_table_for_each_way_to_count():
    text = explain([*BARRIER, *NETWORK])
    assert text.index("ranks of the node, who waits") < text.index("\nranks, who waits")


def test_intranode_lines_name_no_peer():
    text = explain(["DeepEP timeout for combine receivers, rank 3, responsible_channel = 4, expect = 7"])
    assert text == "Rank 3 in combine: waits for tokens of a peer. The line names no peer."


def test_an_error_of_the_cpu_alone_sends_to_the_kernels():
    assert "lines of the kernels" in explain(["[rank428]: RuntimeError: DeepEP error: timeout (dispatch CPU)"])


def test_lines_of_nbep_are_read():
    report = FaultReport(1, DISPATCH_RECEIVER_TAIL, 2, 0, 5, 1, 64, 3)
    errors = [wait_error(rank, report, 100.0) for rank in (0, 1)]
    text = explain([f"nbep.PeerTimeout: {error}" for error in errors])
    assert "Missing: rank 2." in text
    assert "as dispatch receiver: the peer's next chunk of tokens" in text


def test_the_command_reads_the_standard_input_and_files(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(BARRIER)))
    assert cli.main(["explain"]) == 0
    log = tmp_path / "log.txt"
    log.write_text("\n".join(BARRIER))
    assert cli.main(["explain", str(log)]) == 0
    first, second = capsys.readouterr().out.split("ranks of the node")[1:]
    assert first == second


def test_a_log_without_such_lines_has_another_exit_status(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("all is well\n"))
    assert cli.main(["explain"]) == 1
    assert "No time-out line" in capsys.readouterr().out
