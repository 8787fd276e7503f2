"""Shared rows: what dispatch and combine fetch from there has the reference's bits, and no row goes too early."""

from types import SimpleNamespace

import numpy as np
import pytest
from cases import make_case
from elastic import ElasticOptions, Trip, check, dispatch_arguments, make_elastic_buffer, received_trips, round_trip
from parts import both_parts, crossed
from target import MEMORY_MODELS, spawn

from nbep.emulator import DataRace, Uninitialized, UseAfterFree
from nbep.host.intranode.combine import Fetch

pytestmark = pytest.mark.emulator_only("NumPy arrays over the shared rows")
CASE = make_case(1)
SHARED = ElasticOptions(is_shared=True)
FORMS = {
    "compact": ElasticOptions(is_shared=True, own_weights=True, num_biases=1),
    "without weights": ElasticOptions(is_shared=True, with_weights=False, num_biases=2),
    "expanded": ElasticOptions(is_shared=True, do_expand=True, expert_alignment=4),
    "FP8": ElasticOptions(is_shared=True, fp8="row", is_cached=True),
    "FP8, scales elsewhere": ElasticOptions(is_shared=True, fp8="mixed", is_cached=True),
    "FP8, expanded": ElasticOptions(is_shared=True, fp8="packed", do_expand=True, by_column=True, expert_alignment=4),
    "no sync": ElasticOptions(is_shared=True, do_cpu_sync=False),
}


def all_trips(comm, cases, options, is_async):
    buffer = make_elastic_buffer(comm, [(case, options) for case in cases])
    trips = received_trips(buffer, cases, options, is_async)
    for trip in trips:
        trip.combine()
    outcomes = [trip.end() for trip in trips]
    buffer.destroy()
    return outcomes


@pytest.mark.parametrize(
    ("form", "is_async"),
    crossed([("compact", False), ("FP8, scales elsewhere", True)], FORMS, (False, True)),
)
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[1, 4]))
def test_calls_have_the_references_bits(num_ranks, form, memory_model, is_async):
    counts = [(5, 0, 3, 7), (0, 4, 1, 2), (0, 0, 0, 0)]
    hidden = {"FP8": 512, "FP8, scales elsewhere": 1024, "FP8, expanded": 128}.get(form, 16)  # 4, 8 scales; 1
    cases = [
        make_case(i, num_ranks=num_ranks, num_tokens=c[:num_ranks], num_topk=3, hidden=hidden)
        for i, c in enumerate(counts)
    ]
    results = spawn(all_trips, num_ranks, (cases, FORMS[form], is_async), memory_model=memory_model)
    for number, case in enumerate(cases):
        check(case, FORMS[form], [outcomes[number] for outcomes in results], f"round {number}")


def test_a_combine_that_fetches_pushes_nothing(monkeypatch):
    fetched = []
    monkeypatch.setattr(Fetch, "launch", lambda self, *_: fetched.append(self))
    spawn(round_trip, 2, (CASE, SHARED))
    assert len(fetched) == 2


def test_an_expanded_combine_refuses_shared_rows():
    def main(comm):
        options = ElasticOptions(is_shared=True, do_expand=True)
        buffer = make_elastic_buffer(comm, [(CASE, options)])
        trip = Trip(buffer, CASE, options)
        trip.dispatch()
        with pytest.raises(ValueError, match="x: got expanded rows in shared rows; must be an array elsewhere: a rank"):
            buffer.combine(trip.share(trip.received[0]), trip.handle)
        buffer.destroy()

    spawn(main, 2)


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_a_rank_that_fetches_alone_is_named(verb):
    def main(comm):
        buffer = make_elastic_buffer(comm, [(CASE, SHARED)])
        trip = Trip(buffer, CASE, SHARED)
        for each in ("dispatch", "receive", "combine"):
            if each == verb and comm.rank == 0:
                monkey = trip.share
                trip.share = lambda array, share=monkey: array
            getattr(trip, each)()

    with pytest.raises(ValueError, match="x in shared rows"):
        spawn(main, 2)


def test_scales_of_one_rank_alone_are_named_and_strided_ones_refused():
    def main(comm):
        case, options = make_case(1, hidden=512), ElasticOptions(is_shared=True, fp8="row")
        buffer = make_elastic_buffer(comm, [(case, options)])
        arguments = dispatch_arguments(case, options, comm.rank)
        values, scales = buffer._memory.elastic.rows.like(arguments["x"])
        with pytest.raises(ValueError, match=r"x\[1\]: got strided scales in shared rows"):
            buffer.dispatch(**{**arguments, "x": (values, scales[:, ::2])})
        values[:], scales[:] = arguments["x"]
        buffer.dispatch(**{**arguments, "x": (values, arguments["x"][1] if comm.rank == 0 else scales)})

    with pytest.raises(ValueError, match=r"x in shared rows.*with its scales"):
        spawn(main, 2)


def test_rows_that_a_call_has_taken_are_not_the_callers_before_its_event():
    def main(comm):
        buffer = make_elastic_buffer(comm, [(CASE, SHARED)])
        arguments = dispatch_arguments(CASE, SHARED, comm.rank)
        rows = buffer._memory.elastic.rows
        x = rows.like(arguments["x"])
        x[:] = arguments["x"]
        recv_x, *_, handle, event = buffer.dispatch(**{**arguments, "x": x}, async_with_compute_stream=True)
        with pytest.raises(Uninitialized, match="shared rows before the event that its call returned"):
            x[:] = 0
        event.current_stream_wait()
        x = rows.like(recv_x)
        x[:] = recv_x
        _, _, event = buffer.combine(x, handle, async_with_compute_stream=True)
        with pytest.raises(Uninitialized, match="shared rows before the event that its call returned"):
            x[:] = 0
        event.current_stream_wait()
        x[:] = 0
        buffer.make_rows(4, CASE.hidden)
        with pytest.raises(UseAfterFree, match="a use of shared rows after make_rows"):
            x[:] = 0
        x = buffer.make_rows(4, CASE.hidden).like(np.empty(2))
        buffer.destroy()
        with pytest.raises(UseAfterFree, match="a use of shared rows after destroy"):
            x[:] = 0

    spawn(main, 2)


NOTHING = SimpleNamespace(launch=lambda stream: None)
LAUNCHES = {"dispatch": "elastic.dispatch", "combine": "intranode.combine"}


@pytest.mark.parametrize(
    ("verb", "is_planted", "fp8"),
    crossed([("dispatch", True, "row"), ("combine", True, None)], LAUNCHES, (False, True), (None, "row")),
)
def test_rows_that_are_rewritten_before_all_have_met_are_a_race(verb, is_planted, fp8, monkeypatch):
    case, options = make_case(1, hidden=512), ElasticOptions(is_shared=True, fp8=fp8)
    if is_planted:
        monkeypatch.setattr(f"nbep.host.{LAUNCHES[verb]}.prepare_reset", lambda *_: NOTHING)
        with pytest.raises(DataRace, match="of shared rows"):
            spawn(round_trip, 2, (case, options), memory_model="checked")
    else:
        spawn(round_trip, 2, (case, options), memory_model="checked")


@pytest.mark.parametrize(("num_rows", "hidden", "message"), [(0, 16, "num_rows: got 0"), (4, 12, "hidden: got 12")])
def test_what_no_rows_can_be_is_refused(num_rows, hidden, message):
    def main(comm):
        buffer = make_elastic_buffer(comm, [(CASE, ElasticOptions())])
        with pytest.raises(ValueError, match=message):
            buffer.make_rows(num_rows, hidden)
        rows = buffer.make_rows(4, 16)
        with pytest.raises(ValueError, match="array: got 5 rows; must be at most 4"):
            rows.like(np.empty(5))
        with pytest.raises(ValueError, match="array: got 5 scales a row of int8; must be at most 4"):
            rows.like((np.empty((4, 16), np.int8), np.empty((4, 5), np.float32)))
        buffer.destroy()

    spawn(main, 2)
