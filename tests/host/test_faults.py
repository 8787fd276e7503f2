"""Waits that time out end in an exception that says who waited for whom."""

import re
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from arrays import to_target
from cases import make_case
from intranode import Options, dispatch, make_buffer
from target import spawn

import nbep
from nbep.device.compile import load_kernels
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER
from nbep.device.kernels.low_latency.coordinator import LOW_LATENCY_HALF
from nbep.device.kernels.low_latency.dispatch_sender import LOW_LATENCY_CHOICE
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS
from nbep.device.network.ibgda.completion import IBGDA_ERROR
from nbep.device.protocols import waits
from nbep.device.protocols.waits import OF_NODE, OWN_SITES, SITES, FaultReport
from nbep.host import reports
from nbep.host.causes import cause_of
from nbep.host.faults import destroy_error
from nbep.host.ranks.who_waits import explain
from nbep.host.reports import wait_error
from nbep.host.target.memory import HostWords
from nbep.reference import BF16


@pytest.fixture
def short_waits(monkeypatch):
    """Real waits on a GPU; in the emulator's process they are over when nothing else can run."""
    monkeypatch.setenv("NBEP_TIMEOUT_MS", "1000")


@pytest.mark.usefixtures("short_waits")
def test_a_peer_that_does_not_dispatch_is_named(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        arguments = inputs(buffer)
        if comm.rank == 0:
            with pytest.raises(
                nbep.PeerTimeout, match=r"rank 0: the notify .* for rank 1: .* polled barrier_signal"
            ) as e:
                buffer.dispatch(**arguments)
            assert (e.value.rank, e.value.peer, e.value.cell) == (0, 1, "barrier_signal")
            with pytest.raises(nbep.PeerTimeout, match="for rank 1") as again:
                buffer.dispatch(**arguments)
            for name in ("args", "rank", "peer", "report", "__notes__"):
                assert getattr(again.value, name) == getattr(e.value, name)
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire")


@pytest.mark.usefixtures("short_waits")
def test_an_async_call_tells_at_its_event(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        arguments = inputs(buffer)
        if comm.rank == 0:
            *_, event = buffer.dispatch(**arguments, num_worst_tokens=6, async_finish=True)
            with pytest.raises(nbep.PeerTimeout, match="for rank 1"):
                event.current_stream_wait()
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire")


@pytest.mark.usefixtures("short_waits")
def test_a_peer_that_does_not_combine_is_named(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**inputs(buffer))
        if comm.rank == 1:
            with pytest.raises(nbep.PeerTimeout, match=r"rank 1: .* for rank 0"):
                buffer.combine(recv_x, handle)
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire")


@pytest.mark.emulator_only("a GPU finds no deadlocks")
def test_without_time_outs_the_same_is_a_deadlock_report(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        arguments = inputs(buffer)
        if comm.rank == 0:
            buffer.dispatch(**arguments)
        buffer.destroy()

    with pytest.raises(nbep.DeadlockError, match=r"barrier_signal\[rank 1\]"):
        spawn(main, 2)


def test_too_few_worst_tokens_are_reported_after_the_launch(inputs):
    """Rank 0 sends nothing to itself, so that only rank 1 knows how many tokens rank 0 gets."""

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        arguments = inputs(buffer)
        choices = [0, 1] if comm.rank == 1 else [-1, -1]
        arguments["topk_idx"] = to_target(np.array([choices] * 3))
        counts = buffer.get_dispatch_layout(arguments["topk_idx"], 4)
        arguments |= {
            "num_tokens_per_rank": counts[0],
            "num_tokens_per_expert": counts[2],
            "is_token_in_rank": counts[3],
        }
        if comm.rank == 0:
            with pytest.raises(ValueError, match="recv_x: got 2 rows on rank 0; must be at least 3, "):
                buffer.dispatch(**arguments, num_worst_tokens=2)
        else:
            buffer.dispatch(**arguments, num_worst_tokens=2)
        buffer.destroy()

    spawn(main, 2)


# What is reported though no rank waited.
WRONG = {
    LOW_LATENCY_CALLS_DIFFER: "buffer: got low_latency_combine on rank 0, low_latency_dispatch on rank 3 in the same",
    DISPATCH_RECEIVER_ROWS: "recv_x: got 4 rows on rank 0; must be at least 5",
    LOW_LATENCY_HALF: "got one in half 4 on rank 0; must be in half 5: calls take the halves in turn",
    IBGDA_ERROR: "the NIC has refused entry 5 of queue 2 to rank 3: local protection error (syndrome 0x04)",
    LOW_LATENCY_CHOICE: "topk_idx[2, 5]: got 4 on rank 0; must be -1 or an expert",
}


load_kernels()  # and with them all sites
OF_NBEP = sorted(number for number in SITES if number < OWN_SITES)


def test_no_two_sites_have_the_same_number():
    text = "".join(path.read_text() for path in (Path(nbep.__file__).parent / "device").rglob("*.py"))
    assert sorted(map(int, re.findall(r"= site\(\s*(\d+),", text))) == OF_NBEP


@pytest.mark.parametrize("site", OF_NBEP)
def test_every_site_has_words(site):
    report = FaultReport(1, site, peer=3, expected=5, seen=4, block=6, thread=7, channel=2)
    if site == LOW_LATENCY_CALLS_DIFFER:
        report = report._replace(expected=1, seen=0, channel=0)
    error = cause_of(0, report) or wait_error(0, report, 250.0)
    wrong = nbep.NetworkError if site == IBGDA_ERROR else ValueError
    assert isinstance(error, wrong if site in WRONG else nbep.PeerTimeout)
    if site not in WRONG:
        role, cell, awaited = SITES[site]
        for words in (role, cell, awaited, "rank 0", "rank 3", "block 6", "thread 7", "expected 5", "saw 4", "250 ms"):
            assert words in str(error)
        assert ("channel 2" in str(error)) == (site not in OF_NODE)
    else:
        assert WRONG[site] in str(error)


def test_words_of_other_kernels_get_a_number_that_no_others_have(monkeypatch):
    monkeypatch.setattr(waits, "SITES", dict(SITES))
    words = "sender", "head", "a free slot"
    number = waits.own_site(*words)
    assert number not in SITES
    assert waits.SITES[number] == words
    assert waits.own_site(*words) == number
    assert waits.own_site("sender", "head", "free slots") != number
    waits.SITES[number] = "another sender", "head", "a free slot"
    with pytest.raises(ValueError, match=r"^site .*: has the number of \('another sender'.*; change a word"):
        waits.own_site(*words)


@pytest.mark.parametrize("text", ["1.5", "1e12"])
def test_the_time_out_reaches_the_kernels(text, monkeypatch, on_two_ranks):
    monkeypatch.setenv("NBEP_TIMEOUT_MS", text)
    expected = float(text), int(float(text) * 1e6)
    assert on_two_ranks(lambda buffer: (buffer.timeout_ms, buffer._memory.bounds.timeout_ns)) == [expected] * 2


def test_a_low_latency_call_in_the_wrong_half_is_a_value_error():
    """As in the second replay of a CUDA graph with one call. The coordinator finds it, or before it a sender."""

    def main(comm):
        size = nbep.Buffer.get_low_latency_rdma_size_hint(2, 128, 2, 2)
        buffer = nbep.Buffer(comm, num_rdma_bytes=size, low_latency_mode=True)
        x, topk_idx = to_target((np.zeros((2, 128), BF16), np.zeros((2, 1), np.int64)))
        with pytest.raises(ValueError, match="take the halves in turn"):  # noqa: PT012
            for _ in range(3):  # the second one, or on a GPU the call behind it
                buffer.low_latency_dispatch(x, topk_idx, 2, 2)
                buffer._memory.low_latency.restart()
        buffer.destroy()

    spawn(main, 2)


@pytest.mark.usefixtures("short_waits")
def test_explain_finds_the_rank_that_has_made_fewer_calls():
    """Rank 3 leaves out the second dispatch. What the others raise goes into one log, and later what rank 3 does."""
    case = make_case(4, num_ranks=4, num_tokens=4, routing="everywhere")
    options = Options(nbep.Config(2, 2, 5))
    log: list[str] = []
    calls = [""] * 4

    def main(comm):
        buffer = make_buffer(comm, case, options)
        dispatch(buffer, case, options, comm.rank)
        if comm.rank != 3:
            with pytest.raises(nbep.PeerTimeout) as error:
                dispatch(buffer, case, options, comm.rank)
            log.extend("".join(traceback.format_exception(error.value)).splitlines())
        calls[comm.rank] = buffer._memory.calls
        buffer.destroy()

    spawn(main, 4, on_deadlock="expire")
    assert calls[2] in "\n".join(log)
    text = explain(log)
    assert "Missing: rank 3." in text, text
    assert "Collective calls so far: 2." in text, text
    text = explain([*log, str(destroy_error(3, [0, 1, 2], 100.0)), calls[3]])
    assert "They wait for each other: 0 and 3, 1 and 3, 2 and 3." in text, text
    assert "Collective calls so far: 2; rank 3 has made 1, the last one dispatch." in text, text


def test_a_report_is_put_into_words_before_the_memory_goes(monkeypatch):
    """An event may ask later, and the memory tells more than the report: who is gone, and what has come from a NIC."""
    memory = SimpleNamespace(is_open=True)
    monkeypatch.setattr(reports, "error_of", lambda memory, report: ValueError(f"memory open: {memory.is_open}"))
    report = reports.KernelReport(memory, HostWords(np.ones(len(FaultReport._fields), np.int32)))
    report.keep()
    memory.is_open = False
    with pytest.raises(ValueError, match="memory open: True"):
        report.check()
