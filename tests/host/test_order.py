"""What the comm stream waits for before a call's kernels, with a runtime that only writes down what it is asked for."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from nbep.host.comm_work import CommWork, Order
from nbep.host.events import EventHandle, EventOverlap
from nbep.host.target.base import PastEvent
from nbep.host.target.libraries import CupyArrays, NumbaArrays, TorchArrays

NO_EVENT = (None, EventOverlap())
AN_EVENT = EventOverlap(EventHandle("event"))


def allocate(order: Order, library_minds_streams: bool = True, is_capturing: bool = False) -> list[str]:
    """What happens when a call allocates one array, in order."""
    log: list[str] = []

    @contextmanager
    def allocating_on(stream):
        log.append("on comm stream")
        yield
        log.append("on current stream")

    def let_current_stream_use(arrays):
        log.append(f"let current stream use {arrays}")
        return library_minds_streams

    stream = SimpleNamespace(
        wait=lambda event: log.append(f"wait for {event}"),
        wait_current_stream=lambda: log.append("wait for current stream"),
    )
    runtime = SimpleNamespace(
        allocating_on=allocating_on,
        let_current_stream_use=let_current_stream_use,
        is_capturing=is_capturing,
        has_own_stream=False,
    )
    memory = CommWork()
    memory.runtime, memory.comm_stream = runtime, stream

    def make(numbers):
        log.append("allocate")
        return [f"int32 [{numbers[0]}, 3]"], []

    assert memory.allocate(order, make, (2,)) == (["int32 [2, 3]"], [])
    return log


@pytest.mark.parametrize("previous_event", NO_EVENT)
def test_without_previous_event_a_call_waits_for_the_current_stream(previous_event):
    assert allocate(Order(previous_event, True, False)) == ["allocate", "wait for current stream"]


@pytest.mark.parametrize("allocate_on_comm_stream", [False, True])
def test_behind_an_event_outputs_are_the_comm_streams_and_the_current_stream_is_not_waited_for(allocate_on_comm_stream):
    """Memory of the current stream may be in use there, by work that came after the event."""
    expected = ["wait for event", "on comm stream", "allocate", "on current stream"]
    order = Order(AN_EVENT, True, allocate_on_comm_stream)
    assert allocate(order) == [*expected, "let current stream use ['int32 [2, 3]']"]


def test_in_a_graph_memory_changes_its_stream_only_if_the_caller_says_so():
    assert allocate(Order(AN_EVENT, True, False), is_capturing=True)[-2:] == ["allocate", "wait for current stream"]
    assert allocate(Order(AN_EVENT, True, True), is_capturing=True)[1] == "on comm stream"


def test_an_event_of_before_all_work_is_not_waited_for():
    assert allocate(Order(EventOverlap(EventHandle(PastEvent())), True, False))[0] == "on comm stream"


def test_a_library_that_does_not_mind_other_streams_makes_the_call_wait_after_all():
    assert allocate(Order(AN_EVENT, True, True), library_minds_streams=False)[-1] == "wait for current stream"


def test_torch_records_the_stream_of_every_array_and_the_others_cannot(monkeypatch):
    recorded = []
    arrays = [SimpleNamespace(record_stream=lambda stream, i=i: recorded.append((i, stream))) for i in range(2)]
    torch = ModuleType("torch")
    torch._C = SimpleNamespace(_cuda_getDevice=lambda: 3, _cuda_getCurrentStream=lambda device: (7, device, 1))
    torch.cuda = SimpleNamespace(Stream=lambda **of: tuple(of.values()))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert TorchArrays.let_current_stream_use(arrays)
    assert recorded == [(0, (7, 3, 1)), (1, (7, 3, 1))]
    assert not CupyArrays.let_current_stream_use(arrays)
    assert not NumbaArrays.let_current_stream_use(arrays)
