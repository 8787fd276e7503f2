"""Rows that were never written: `nbep.debug.unwritten` names them, and under "checked" no kernel reads them."""

import numpy as np
import pytest
from arrays import to_numpy, to_target
from cases import make_case
from intranode import Options, dispatch_arguments, make_buffer
from low_latency import HOOK, Trip, make_low_latency_case
from low_latency import Options as LowLatencyOptions
from low_latency import make_buffer as make_low_latency_buffer
from target import MEMORY_MODELS, spawn

import nbep
from nbep.emulator import Uninitialized

pytestmark = pytest.mark.emulator_only("a GPU's memory says nothing of who wrote it")
CASE = make_case(1, num_tokens=3, hidden=128)
WORST = 11
LOW_LATENCY = make_low_latency_case(1, num_tokens=3, hidden=512)
models = pytest.mark.parametrize("memory_model", MEMORY_MODELS)


def dispatched(buffer, rank):
    options = Options(num_worst_tokens=WORST)
    _, arguments = dispatch_arguments(buffer, CASE, options, rank)
    return buffer.dispatch(**arguments)


@models
def test_rows_past_those_that_came_are_unwritten(memory_model):
    def main(comm):
        buffer = make_buffer(comm, CASE, Options(num_worst_tokens=WORST))
        recv_x, _, _, _, handle, _ = dispatched(buffer, comm.rank)
        num_received = int(to_numpy(handle.rank_prefix_matrix)[-1, comm.rank])
        buffer.destroy()
        return nbep.debug.unwritten(recv_x).tolist() == [row >= num_received for row in range(WORST)]

    assert spawn(main, 2, memory_model=memory_model) == [True, True]


@models
@pytest.mark.parametrize("use_fp8", [False, True])
def test_rows_of_a_low_latency_dispatch_are_unwritten_before_its_hook_and_past_the_count(memory_model, use_fp8):
    options = LowLatencyOptions(dispatch_as=HOOK, use_fp8=use_fp8)

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(LOW_LATENCY, options)])
        trip = Trip(buffer, LOW_LATENCY, options)
        trip.send_dispatch()
        arrays = trip._recv_x if use_fp8 else (trip._recv_x,)
        before = [nbep.debug.unwritten(array).all() for array in (*arrays, trip._recv_count)]
        trip.receive_dispatch()
        counts = to_numpy(trip._recv_count)
        past = np.arange(arrays[0].shape[1]) >= counts[:, None]
        after = [(nbep.debug.unwritten(array) == past).all() for array in arrays]
        buffer.destroy()
        return before, after, nbep.debug.unwritten(trip._recv_count).any()

    for before, after, of_count in spawn(main, 2, memory_model=memory_model):
        assert all(before)
        assert all(after)
        assert not of_count


USES = {
    "cast": lambda buffer, recv_x, handle: nbep.per_token_cast_to_fp8(recv_x),
    "dispatch": lambda buffer, recv_x, handle: buffer.dispatch(recv_x[-3:], handle, config=Options().config),
}


@pytest.mark.parametrize("use", USES)
def test_a_kernel_that_reads_an_unwritten_row_is_stopped(use):
    def main(comm):
        buffer = make_buffer(comm, CASE, Options(num_worst_tokens=WORST))
        recv_x, _, _, _, handle, _ = dispatched(buffer, comm.rank)
        USES[use](buffer, recv_x, handle)

    with pytest.raises(Uninitialized, match=r"`x` of rank \d: row \d+, which no call has written: it is past the rows"):
        spawn(main, 2, memory_model="checked")


def test_what_the_caller_has_written_there_is_read():
    def main(comm):
        buffer = make_buffer(comm, CASE, Options(num_worst_tokens=WORST))
        recv_x, _, _, _, handle, _ = dispatched(buffer, comm.rank)
        mask = nbep.debug.unwritten(recv_x)
        recv_x[to_target(mask)] = 1
        assert not nbep.debug.unwritten(recv_x).any()
        nbep.per_token_cast_to_fp8(recv_x)
        buffer.combine(recv_x, handle, config=Options().config)
        buffer.destroy()

    spawn(main, 2, memory_model="checked")
