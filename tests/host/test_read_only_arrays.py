"""What a call writes is refused where it is read-only, by the argument's name, before anything starts."""

import numpy as np
import pytest
from arrays import LIBRARY
from internode import CONFIG, make_node_case
from internode import Options as NodeOptions
from intranode import dispatch_arguments
from intranode import make_buffer as make_node_buffer
from low_latency import Options, Trip, make_buffer, make_low_latency_case
from target import spawn

from nbep.reference import BF16

pytestmark = [
    pytest.mark.emulator_only("NumPy's arrays say that they are read-only"),
    pytest.mark.skipif(LIBRARY != "numpy", reason="torch's tensors do not say that they are read-only"),
]

CASE = make_low_latency_case(1, num_tokens=3)
NODE_CASE = make_node_case(1, num_tokens=3, routing="everywhere", num_topk=4)


def read_only(array: np.ndarray) -> np.ndarray:
    """Its bytes in memory that Python holds to be immutable."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def refused(starts_nothing, name: str, call, *args, **arguments) -> None:
    with starts_nothing(), pytest.raises(ValueError, match=rf"^{name}: got a read-only \w+ \[.*\]; must be writeable"):
        call(*args, **arguments)


def test_low_latency_calls_refuse_them(starts_nothing):
    def main(comm):
        buffer = make_buffer(comm, [(CASE, Options())], enable_shrink=True)
        refused(starts_nothing, "mask_status", buffer.low_latency_query_mask_buffer, read_only(np.zeros(2, np.int32)))
        trip = Trip(buffer, CASE, Options())
        rank = buffer.rank
        sent = CASE.x[rank], CASE.topk_idx[rank], 3, CASE.num_experts
        for name, values in {
            "cumulative_local_expert_recv_stats": np.zeros(2, np.int32),
            "dispatch_wait_recv_cost_stats": np.zeros(2, np.int64),
        }.items():
            refused(starts_nothing, name, buffer.low_latency_dispatch, *sent, **{name: read_only(values)})
        trip.send_dispatch()
        trip.receive_dispatch()
        given = trip.outcome.dispatched.recv_x, CASE.topk_idx[rank], CASE.topk_weights[rank], trip.handle
        for name, values in {
            "out": np.zeros(CASE.x[rank].shape, BF16),
            "combine_wait_recv_cost_stats": np.zeros(2, np.int64),
        }.items():
            refused(starts_nothing, name, buffer.low_latency_combine, *given, **{name: read_only(values)})
        buffer.destroy()

    spawn(main, 2)


def test_heads_of_a_tuple_are_refused(on_two_ranks, inputs, starts_nothing):
    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        parts = (*handle[:5], read_only(handle.send_head))
        refused(starts_nothing, "handle.send_head", buffer.combine, recv_x, parts, config=arguments["config"])

    on_two_ranks(main)


@pytest.mark.parametrize("name", ["send_rdma_head", "send_nvl_head"])
def test_heads_of_a_tuple_between_nodes_are_refused(name, starts_nothing):
    def main(comm):
        buffer = make_node_buffer(comm, NODE_CASE, NodeOptions())
        sent = dispatch_arguments(buffer, NODE_CASE, NodeOptions(), buffer.rank)[1]
        recv_x, _, _, _, handle, _ = buffer.dispatch(**sent)
        parts = tuple(read_only(part) if part is getattr(handle, name) else part for part in handle)
        refused(starts_nothing, f"handle.{name}", buffer.combine, recv_x, parts, config=CONFIG)
        buffer.destroy()

    spawn(main, 4)
