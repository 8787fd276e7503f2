"""What calls of an ElasticBuffer promise each other: whose arrays come, in which order calls run, who reports."""

import gc
import re
from dataclasses import replace

import numpy as np
import pytest
from arrays import to_numpy, to_target
from calls import SlowRank
from cases import make_case
from elastic import (
    ElasticExpected,
    ElasticOptions,
    Trip,
    call,
    check,
    dispatch_arguments,
    form,
    make_elastic_buffer,
    time_outs,
)
from parts import both_parts, dear
from target import MEMORY_MODELS, spawn

import nbep
from nbep.host.calls import CallLog

KERNELS = "nbep.device.kernels.elastic"
CASE = make_case(3, num_tokens=(5, 3), num_topk=3)
COMPACT, EXPANDED = ElasticOptions(), ElasticOptions(do_expand=True, expert_alignment=2)


def on_each_rank(fn, options: ElasticOptions = COMPACT, case=CASE, **spawn_options) -> list:
    """fn(buffer, arguments of dispatch) on every rank."""

    def main(comm):
        buffer = make_elastic_buffer(comm, [(case, options)])
        result = fn(buffer, dispatch_arguments(case, options, comm.rank))
        buffer.destroy()
        return result

    return spawn(main, case.num_ranks, **spawn_options)


# Whose arrays they are


@pytest.mark.parametrize("options", [COMPACT, EXPANDED], ids=["compact", "expanded"])
def test_what_came_stays_whatever_is_called_later(options):
    def main(buffer, arguments):
        received = buffer.dispatch(**arguments)
        before = [to_numpy(array).copy() for array in received[:3] if array is not None]
        others = [buffer.dispatch(**{**arguments, "x": to_target(to_numpy(arguments["x"]) * 2)}) for _ in range(3)]
        for recv_x, *_, handle, _ in others:
            buffer.combine(recv_x, handle)
        after = [to_numpy(array) for array in received[:3] if array is not None]
        return [a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True)]

    assert all(all(same) for same in on_each_rank(main, options))


@pytest.mark.parametrize("in_order", [True, False])
def test_two_handles_in_flight_are_combined_in_any_order(in_order):
    calls = [(make_case(seed, num_tokens=(4, 6), num_topk=2), EXPANDED) for seed in (1, 2)]

    def main(comm):
        buffer = make_elastic_buffer(comm, calls)
        trips = [Trip(buffer, case, options) for case, options in calls]
        for trip in trips:
            trip.dispatch()
            trip.receive()
        for trip in trips if in_order else reversed(trips):
            trip.combine()
        outcomes = [trip.end() for trip in trips]
        buffer.destroy()
        return outcomes

    results = spawn(main, 2)
    for number, (case, options) in enumerate(calls):
        for rank in range(2):
            ElasticExpected(case, options).check(rank, results[rank][number], f"call {number}, rank {rank}")


def chain(comm, cases, options):
    """Dispatches and combines of what came, all launched before the first is waited for."""
    buffer = make_elastic_buffer(comm, [(case, options) for case in cases])
    later = {"async_with_compute_stream": True}
    handles, results = [], []
    for case in cases:
        *_, handle, event = buffer.dispatch(**dispatch_arguments(case, options, comm.rank))
        event.current_stream_wait()
        handles.append(handle)
    for _ in range(3):
        for case, handle in zip(cases, handles, strict=True):
            recv_x, *_ = buffer.dispatch(to_target(case.x[comm.rank]), handle=handle, **form(options), **later)
            combined_x, _, event = buffer.combine(recv_x, handle, **later)
            results.append(combined_x)
        # Two dispatches without a combine between them: the halves are taken in turn.
        recv_x, *_, event = buffer.dispatch(to_target(cases[0].x[comm.rank]), handle=handles[0], **later)
    event.current_stream_wait()
    buffer.destroy()
    return [to_numpy(result) for result in results]


@dear
@pytest.mark.emulator_only("one rank is made slow")
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seed", both_parts([0], thorough=range(1, 6)))
def test_hosts_that_run_ahead_of_a_slow_rank_do_not_overwrite_what_it_still_reads(seed, memory_model, monkeypatch):
    places = [
        (f"{KERNELS}.publish", "lay_out_token"),
        (f"{KERNELS}.dispatch", "store_row"),
        (f"{KERNELS}.combine", "begin_row"),
        (f"{KERNELS}.combine", "sum_token"),
    ]
    slow = SlowRank(monkeypatch, places)
    slow.rank, slow.reads = seed % 2, (50, 5, 0)[seed % 3]
    cases = [make_case(seed + i, num_tokens=(4, 3), num_topk=2, unused=0) for i in range(2)]
    factor = {True: 2, False: 1}
    for rank, results in enumerate(spawn(chain, 2, (cases, COMPACT), seed, memory_model=memory_model)):
        for number, got in enumerate(results):
            case = cases[number % 2]
            owners = case.topk_idx[rank] // (case.num_experts // 2)
            times = [factor[len(set(row)) == 2] for row in owners.tolist()]
            wanted = (case.x[rank].astype(np.float32) * np.array(times)[:, None]).astype(got.dtype)
            assert got.tobytes() == wanted.tobytes(), (seed, rank, number)


# Events


@pytest.mark.parametrize("allocate_on_comm_stream", [False, True])
def test_calls_come_behind_events_and_are_waited_for_by_theirs(allocate_on_comm_stream):
    def main(buffer, arguments):
        way = {"async_with_compute_stream": True, "allocate_on_comm_stream": allocate_on_comm_stream}
        before, again = buffer.capture(), buffer.capture()
        recv_x, *_, handle, event = buffer.dispatch(
            **arguments, previous_event=before, previous_event_before_epilogue=again, **way
        )
        combined_x, _, event = buffer.combine(
            recv_x, handle, previous_event=event, previous_event_before_epilogue=event, **way
        )
        event.current_stream_wait()
        return to_numpy(combined_x).tobytes()

    def plain(buffer, arguments):
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        return to_numpy(buffer.combine(recv_x, handle)[0]).tobytes()

    assert on_each_rank(main) == on_each_rank(plain)


@pytest.mark.parametrize("with_cpu_sync", [False, True])
@pytest.mark.parametrize("use_comm_stream", [False, True])
def test_no_rank_passes_a_barrier_before_all_have_come(use_comm_stream, with_cpu_sync):
    came = []

    def main(buffer, arguments):
        buffer.barrier()
        came.append(buffer.rank_idx)
        buffer.barrier(use_comm_stream, with_cpu_sync)
        return len(came)

    assert on_each_rank(main) == [2, 2]


# Ranks that differ

DIFFERENCES = {
    "num_max_tokens_per_rank": ({"num_max_tokens_per_rank": 5}, "6", "5"),
    "num_experts": ({"num_experts": 8}, "4", "8"),
    "topk_weights": ({"topk_weights": None}, "given", "None"),
    "hidden size of x": ({"x": np.zeros((3, 8), CASE.x[0].dtype)}, "16", "8"),
    "topk_idx": (
        {"topk_idx": CASE.topk_idx[1][:, :2].copy(), "topk_weights": CASE.topk_weights[1][:, :2].copy()},
        "3 choices a token",
        "2 choices a token",
    ),
}


@pytest.mark.emulator_only("a GPU's virtual ranks are compared before they launch")
@pytest.mark.parametrize("in_one_process", [True, False], ids=["before launches", "by kernels"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_ranks_pass_differently_is_named_on_all(name, in_one_process, monkeypatch):
    if not in_one_process:
        monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))
    change, own, theirs = DIFFERENCES[name]
    messages = []

    def main(buffer, arguments):
        changed = {**arguments, **(change if buffer.rank_idx == 1 else {})}
        with pytest.raises(ValueError, match=f"^{re.escape(name)}: got .*must be the same on all ranks") as error:
            buffer.dispatch(**changed)
        messages.append(str(error.value))
        raise error.value

    with pytest.raises(ValueError, match=name):
        on_each_rank(main, on_deadlock="expire")
    assert messages
    assert all(re.search(rf"\b{own}\b", text) and re.search(rf"\b{theirs}\b", text) for text in messages), messages


@pytest.mark.emulator_only("what is captured is arranged")
def test_in_a_capture_a_buffer_is_refused_and_the_cpu_does_not_wait(monkeypatch):
    captures, options = [], replace(COMPACT, is_shared=True, do_cpu_sync=False, is_cached=True)

    def main(comm):
        monkeypatch.setattr(type(comm.runtime), "is_capturing", property(lambda self: bool(captures)))
        buffer = make_elastic_buffer(comm, [(CASE, COMPACT)])
        arguments = dispatch_arguments(CASE, COMPACT, comm.rank)
        captures.append(comm.rank)
        with pytest.raises(ValueError, match=r"^do_cpu_sync: got True; must be False in a CUDA graph"):
            buffer.dispatch(**arguments)
        with pytest.raises(ValueError, match="ElasticBuffer: got made while a CUDA graph is captured"):
            make_elastic_buffer(comm, [(CASE, COMPACT)])
        with pytest.raises(ValueError, match="make_rows: got called while a CUDA graph is captured; must be called"):
            buffer.make_rows(4, CASE.hidden)
        comm.barrier()
        captures.clear()
        shared = make_elastic_buffer(comm, [(CASE, options)])
        comm.barrier()
        captures.append(comm.rank)
        outcome = call(shared, CASE, options)  # nothing on the way needs the CPU
        comm.barrier()
        captures.clear()
        shared.destroy()
        buffer.destroy()
        return outcome

    check(CASE, options, spawn(main, 2), "in a capture")


def test_more_rows_than_there_can_be_without_duplicates_are_reported():
    """One expert a rank, which each token names four times."""
    case = make_case(1, num_tokens=3, num_topk=4, experts_per_rank=1)
    for topk_idx in case.topk_idx:
        topk_idx[:] = 1
    options = ElasticOptions(do_expand=True, do_cpu_sync=False, spare=0)

    def main(comm):
        buffer = make_elastic_buffer(comm, [(case, options)])
        arguments = dispatch_arguments(case, options, comm.rank)
        text = ""
        try:
            *_, event = buffer.dispatch(**arguments)
            event.current_stream_wait()
        except ValueError as error:
            text = str(error)
        comm.barrier()
        try:
            buffer.destroy()
        except ValueError as error:
            text = text or str(error)
        return text

    nothing, text = spawn(main, 2)
    assert nothing == ""
    assert text.startswith("recv_x: got 6 rows on rank 1; must be at least 24")
    assert "name an expert more than once" in text


@pytest.mark.emulator_only("the late launch is arranged")
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("kernel", ["elastic_notify_dispatch", "elastic_notify_combine", "elastic_combine"])
def test_a_rank_that_waits_too_long_says_for_whom(kernel, memory_model):
    first = time_outs(CASE, replace(COMPACT, do_cpu_sync=False), kernel, memory_model=memory_model)[0]
    assert (first.rank, first.peer) == (0, 1)


# The end


def test_a_buffer_that_is_dropped_goes_with_the_next_one_and_what_came_stays():
    def main(comm):
        buffer = make_elastic_buffer(comm, [(CASE, COMPACT)])
        recv_x, *_ = buffer.dispatch(**dispatch_arguments(CASE, COMPACT, comm.rank))
        before = to_numpy(recv_x).copy()
        del buffer
        gc.collect()
        assert len(comm.runtime.dropped) == 1
        other = make_elastic_buffer(comm, [(CASE, COMPACT)])
        other.dispatch(**dispatch_arguments(CASE, COMPACT, comm.rank))
        other.destroy()
        with pytest.raises(ValueError, match="destroyed"):
            other.destroy()
        with pytest.raises(ValueError, match="destroyed"):
            other.barrier()
        return comm.runtime.dropped, before.tobytes() == to_numpy(recv_x).tobytes()

    assert spawn(main, 2) == [({}, True)] * 2


@pytest.mark.filterwarnings("always")
def test_a_buffer_that_should_have_been_destroyed_says_so():
    def main(comm):
        buffer = nbep.ElasticBuffer(comm, num_bytes=2 << 20, explicitly_destroy=True)
        with pytest.warns(RuntimeWarning, match="goes away without destroy"):
            buffer.__del__()
        buffer.destroy()

    spawn(main, 2)
