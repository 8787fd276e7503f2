"""Inputs that change while a call is under way: "checked" names the element, the kernel and what to wait for."""

from copy import deepcopy

import pytest
from arrays import assign, to_numpy, to_target
from cases import make_case
from internode import Options as NodeOptions
from internode import make_node_case
from intranode import Options, dispatch_arguments, make_buffer
from low_latency import ASYNC, HOOK, Trip, make_low_latency_case
from low_latency import Options as LowLatencyOptions
from low_latency import make_buffer as make_low_latency_buffer
from parts import both_parts
from target import spawn

import nbep

pytestmark = pytest.mark.emulator_only("a GPU's arrays are not looked at")
WAYS = {
    "rings": (Options(num_worst_tokens=40), make_case(1, num_tokens=4)),
    "zero copy": (Options(num_worst_tokens=40, zero_copy=True), make_case(1, num_tokens=4)),
    "between nodes": (NodeOptions(num_worst_tokens=40), make_node_case(1, num_tokens=4)),
}


def changed(name, kernel):
    return pytest.raises(
        nbep.DataRace, match=rf"^{name} of rank \d has changed while {kernel} reads it: {name}\[[\d, ]+\] was "
    )


def change(array):
    values = to_numpy(array).copy()
    values[0] = values[0][::-1]
    assign(array, values)


def calls(buffer, case, options, rank):
    """Verb and argument -> a call that is under way when it returns, with what it reads, and its event."""
    _, arguments = dispatch_arguments(buffer, case, options, rank)
    recv_x, _, weights, _, handle, _ = buffer.dispatch(**arguments)
    more = {"config": options.config, "async_finish": True, "zero_copy": options.zero_copy}
    rows, weights = to_target([to_numpy(array).copy() for array in (recv_x, weights)])
    return {
        "dispatch, x": lambda: (arguments["x"], buffer.dispatch(**arguments | more)[-1]),
        "dispatch, topk_idx": lambda: (arguments["topk_idx"], buffer.dispatch(**arguments | more)[-1]),
        "dispatch, topk_weights": lambda: (arguments["topk_weights"], buffer.dispatch(**arguments | more)[-1]),
        "cached dispatch, x": lambda: (arguments["x"], buffer.dispatch(arguments["x"], handle, **more)[-1]),
        "combine, x": lambda: (rows, buffer.combine(rows, handle, weights, **more)[-1]),
        "combine, topk_weights": lambda: (weights, buffer.combine(rows, handle, weights, **more)[-1]),
    }


NAMES = ["dispatch, x", "dispatch, topk_idx", "dispatch, topk_weights", "cached dispatch, x", "combine, x"]
SHORT = [("rings", name) for name in NAMES] + [("zero copy", NAMES[0])]
LONG = [(way, name) for way in WAYS for name in NAMES if (way, name) not in SHORT]
READERS = {("zero copy", "combine, x"): "lay_out_rows"}  # where the verb is not in the kernel's name


@pytest.mark.parametrize(("way", "name"), both_parts(SHORT, thorough=LONG))
def test_an_input_that_changes_under_way_is_named(way, name):
    options, case = deepcopy(WAYS[way])
    argument = name.split(", ")[1]

    def main(comm):
        buffer = make_buffer(comm, case, options)
        array, event = calls(buffer, case, options, comm.rank)[name]()
        if comm.rank == 0:
            change(array)
        event.current_stream_wait()

    with changed(argument, READERS.get((way, name), r"\w*" + name.split(",")[0].split()[-1])):
        spawn(main, case.num_ranks, memory_model="checked")


@pytest.mark.parametrize("way", both_parts(["rings"], thorough=["zero copy", "between nodes"]))
def test_behind_the_event_inputs_are_the_callers(way):
    options, case = deepcopy(WAYS[way])

    def main(comm):
        buffer = make_buffer(comm, case, options)
        for call in calls(buffer, case, options, comm.rank).values():
            array, event = call()
            event.current_stream_wait()
            before = to_numpy(array).copy()
            change(array)
            assign(array, before)
        buffer.destroy()

    spawn(main, case.num_ranks, memory_model="checked")


LOW_LATENCY = make_low_latency_case(1, num_tokens=3, num_topk=2)


@pytest.mark.parametrize("argument", ["topk_idx"])
def test_an_input_of_a_low_latency_dispatch_that_changes_under_way_is_named(argument):
    options = LowLatencyOptions(dispatch_as=ASYNC)

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(LOW_LATENCY, options)])
        trip = Trip(buffer, deepcopy(LOW_LATENCY), options)
        trip.send_dispatch()
        change(getattr(trip, argument))
        trip.receive_dispatch()

    with changed(argument, "low_latency_dispatch"):
        spawn(main, 2, memory_model="checked")


@pytest.mark.parametrize("way", [ASYNC, HOOK])
@pytest.mark.parametrize("argument", ["topk_weights", "topk_idx"])
def test_choices_and_weights_that_change_before_combine_has_received_are_named(argument, way):
    """With a hook it reads them in both phases."""
    options = LowLatencyOptions(combine_as=way)

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(LOW_LATENCY, options)])
        trip = Trip(buffer, deepcopy(LOW_LATENCY), options)
        trip.send_dispatch()
        trip.receive_dispatch()
        trip.send_combine()
        change(getattr(trip, argument))
        trip.receive_combine()

    with changed(argument, "low_latency_combine"):
        spawn(main, 2, memory_model="checked")
