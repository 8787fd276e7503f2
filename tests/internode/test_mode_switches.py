"""A buffer that goes from low-latency calls to calls between nodes and back: what is refused, and what waits for what.

Both modes fill the same bytes of the RDMA buffer. One rank, or the NIC between two ranks, is slow in what comes first.
"""

import re

import low_latency
import pytest
from arrays import to_numpy, to_target
from calls import SlowRank
from internode import NIC, Options, make_node_case
from intranode import Report, check, combine, dispatch, dispatch_input
from low_latency import HOOK, Trip, make_low_latency_case
from parts import both_parts
from target import spawn

import nbep
from nbep.device.network import nic
from nbep.device.primitives import FULL_MASK, globaltimer, syncwarp

SLOW = 3  # the rank
READS, NIC_READS = 12_000, 400_000  # of the clock
# With so many slots between nodes both modes begin their send areas at the same place.
CONFIG = nbep.Config(4, 2, 8, 2, 64)
CASE = make_node_case(3, num_tokens=(6, 0, 3, 9), num_topk=3)
FAST_CASE = make_low_latency_case(3, num_ranks=4, num_tokens=(5, 4, 6, 3), num_topk=3)
WITH_HOOK = low_latency.Options(dispatch_as=HOOK)

emulator_only = pytest.mark.emulator_only("one rank is made slow")


def run_in_turns(fn, transport="direct", fast_options=None):
    """fn(buffer, options, trip) on the ranks of two nodes, with a buffer for both modes; then the buffer goes."""
    options = Options(CONFIG, transport=transport, nic=NIC)
    fast_options = fast_options or low_latency.Options()
    arguments = options.buffer_arguments(CASE)
    assert arguments["num_rdma_bytes"] >= low_latency.num_rdma_bytes(FAST_CASE, fast_options)

    def main(comm):
        buffer = nbep.Buffer(comm, **arguments, low_latency_mode=True)
        result = fn(buffer, options, Trip(buffer, FAST_CASE, fast_options))
        buffer.destroy()
        return result

    return spawn(main, 4), options


def clean(buffer):
    buffer.clean_low_latency_buffer(max(FAST_CASE.num_tokens), FAST_CASE.hidden, FAST_CASE.num_experts)


def cached_dispatch(buffer, options, outcome):
    x = to_target(dispatch_input(CASE, options, buffer.rank))
    outcome.cached_x = buffer.dispatch(x, handle=outcome.handle, config=options.config)[0]


def check_fast_dispatches(outcomes):
    """What low-latency dispatches brought. An outcome has the very arrays that the kernel writes to."""
    options = low_latency.Options()
    wanted = low_latency.expected_dispatch(FAST_CASE, options)
    for rank, outcome in enumerate(outcomes):
        report = Report(f"low-latency dispatch, rank {rank}")
        low_latency.check_dispatched(report, FAST_CASE, options, rank, wanted[rank], outcome)


# What is refused


def test_after_a_call_between_nodes_the_low_latency_verbs_are_refused_until_clean():
    def main(buffer, options, trip):
        fast = [trip.whole()]
        outcome = dispatch(buffer, CASE, options, buffer.rank)
        verbs = {
            "low_latency_dispatch": Trip(buffer, FAST_CASE, low_latency.Options()).send_dispatch,
            "low_latency_combine": trip.send_combine,
            "get_next_low_latency_combine_buffer": lambda: buffer.get_next_low_latency_combine_buffer(trip.handle),
        }
        for user in ("dispatch", "combine"):
            message = f"got a call; must be called after clean_low_latency_buffer: {user} between nodes has used the"
            for verb, call in verbs.items():
                with pytest.raises(ValueError, match=f"^{verb}: {message}"):
                    call()
            if user == "dispatch":
                combine(buffer, CASE, options, buffer.rank, outcome)
        clean(buffer)
        fast.append(Trip(buffer, FAST_CASE, low_latency.Options()).whole())
        return outcome, fast

    by_rank, options = run_in_turns(main)
    check(CASE, options, [outcome for outcome, _ in by_rank], 0)
    for number in range(2):
        fast = [both[number] for _, both in by_rank]
        low_latency.check(FAST_CASE, low_latency.Options(), fast, f"round {number}")


@pytest.mark.thorough
def test_a_call_between_nodes_is_refused_while_a_hook_has_not_been_called():
    def main(buffer, options, trip):
        outcome = dispatch(buffer, CASE, options, buffer.rank)
        clean(buffer)
        trip.send_dispatch()
        holder = re.escape("the hook of low_latency_dispatch (low-latency call 0) has not been called")
        for verb, call in (
            ("dispatch", lambda: dispatch(buffer, CASE, options, buffer.rank)),
            ("dispatch", lambda: cached_dispatch(buffer, options, outcome)),
            ("combine", lambda: combine(buffer, CASE, options, buffer.rank, outcome)),
        ):
            with pytest.raises(ValueError, match=f"^{verb}: got a call while {holder}; must be called after that hook"):
                call()
        trip.receive_dispatch()
        cached_dispatch(buffer, options, outcome)
        combine(buffer, CASE, options, buffer.rank, outcome)
        return outcome, trip.outcome

    by_rank, options = run_in_turns(main, fast_options=WITH_HOOK)
    check(CASE, options, [outcome for outcome, _ in by_rank], 0)
    check_fast_dispatches([fast for _, fast in by_rank])


def test_a_zero_copy_buffer_does_not_outlive_a_call_between_nodes():
    def main(buffer, options, trip):
        trip.send_dispatch()
        trip.receive_dispatch()
        buffer.get_next_low_latency_combine_buffer(trip.handle)
        dispatch(buffer, CASE, options, buffer.rank)
        clean(buffer)
        x = to_target(low_latency.expert_output(trip.outcome.dispatched, buffer.rank))
        with pytest.raises(ValueError, match=r"^zero_copy: got True without get_next_low_latency_combine_buffer"):
            buffer.low_latency_combine(x, trip.topk_idx, trip.topk_weights, trip.handle, zero_copy=True)

    run_in_turns(main)


# What waits for what


@emulator_only
@pytest.mark.parametrize("transport", both_parts([], thorough=["ibgda", "direct"]))
def test_clean_comes_behind_an_asynchronous_call_of_every_rank(transport, monkeypatch):
    """No rank has waited for combine when clean_low_latency_buffer is called, and one rank still receives sums."""
    slow = SlowRank(monkeypatch, [("nbep.device.kernels.internode.combine", "receive_sums")])
    slow.rank, slow.reads = SLOW, READS

    def main(buffer, options, trip):
        outcome = dispatch(buffer, CASE, options, buffer.rank)
        x = to_target(to_numpy(outcome.recv_x))
        combined = buffer.combine(x, outcome.handle, config=options.config, async_finish=True)[0]
        clean(buffer)
        trip.send_dispatch()
        trip.receive_dispatch()
        again = buffer.combine(x, outcome.handle, config=options.config)[0]
        return combined, again, trip.outcome

    by_rank, _ = run_in_turns(main, transport)
    for combined, again, _ in by_rank:
        assert combined.tobytes() == again.tobytes()
    check_fast_dispatches([fast for *_, fast in by_rank])


@emulator_only
@pytest.mark.parametrize(
    ("transport", "cached"), both_parts([], thorough=[("direct", True), ("ibgda", False), ("ibgda", True)])
)
def test_a_call_between_nodes_comes_behind_a_low_latency_call_on_another_stream(transport, cached, monkeypatch):
    """The low-latency call runs on the caller's stream, which no kernel waits for, and one rank receives late."""
    slow = SlowRank(monkeypatch, [("nbep.device.kernels.low_latency.dispatch", "receive_choices")])
    slow.rank, slow.reads = SLOW, READS

    def main(buffer, options, trip):
        first = dispatch(buffer, CASE, options, buffer.rank)
        clean(buffer)
        with monkeypatch.context() as patch:
            patch.setattr(buffer.group.runtime, "settle", lambda stream: None)
            trip.send_dispatch()
        outcome = first
        if not cached:
            outcome = dispatch(buffer, CASE, options, buffer.rank)
        cached_dispatch(buffer, options, outcome)
        combine(buffer, CASE, options, buffer.rank, outcome)
        trip.receive_dispatch()
        return outcome, trip.outcome

    by_rank, options = run_in_turns(main, transport)
    check(CASE, options, [outcome for outcome, _ in by_rank], 0)
    check_fast_dispatches([fast for _, fast in by_rank])


@emulator_only
@pytest.mark.thorough
def test_a_call_along_known_routes_does_not_fill_what_a_nic_has_yet_to_read(monkeypatch):
    """Messages of a low-latency call wait in the NIC of rank 3 for rank 0: another place of the other node, which a
    cached notify does not hear of. On rank 3 the low-latency call is over by then."""
    execute, reads = nic.execute, 0

    def late(nic, slot, peer, start, lane):
        nonlocal reads
        if nic.rank == SLOW and peer == 0 and is_low_latency:
            while lane == 0 and reads < NIC_READS:
                reads += 1
                globaltimer()
            syncwarp(FULL_MASK)
        return execute(nic, slot, peer, start, lane)

    monkeypatch.setattr(nic, "execute", late)
    is_low_latency = False

    def main(buffer, options, trip):
        nonlocal is_low_latency
        outcome = dispatch(buffer, CASE, options, buffer.rank)
        clean(buffer)
        is_low_latency = True
        with monkeypatch.context() as patch:  # the next call is queued behind it
            patch.setattr(buffer.group.runtime, "settle", lambda stream: None)
            trip.send_dispatch()
        cached_dispatch(buffer, options, outcome)
        combine(buffer, CASE, options, buffer.rank, outcome)
        trip.receive_dispatch()
        return outcome, trip.outcome

    by_rank, options = run_in_turns(main, "ibgda")
    check(CASE, options, [outcome for outcome, _ in by_rank], 0)
    check_fast_dispatches([fast for _, fast in by_rank])
