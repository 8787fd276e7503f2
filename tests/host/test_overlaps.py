"""What a call writes is in memory of its own: no output over an input, no input in memory through which it sends."""

import numpy as np
import pytest
from arrays import assign, over, to_numpy, to_target
from internode import Options as NodeOptions
from internode import make_node_case
from intranode import Options, dispatch, dispatch_arguments, make_buffer
from low_latency import Options as LowLatencyOptions
from low_latency import Trip, make_low_latency_case
from low_latency import make_buffer as make_low_latency_buffer
from refusals import check_refused
from target import spawn

from nbep.reference import BF16

CASES = {
    "inside a node": (Options(), make_node_case(1, num_nodes=1, num_tokens=4)),
    "between nodes": (NodeOptions(), make_node_case(1, num_tokens=4)),
}
OWN = r"lies in too; must be in memory of its own: the call writes it$"
SENDS = r"got memory of the buffer through which the call sends; must be in memory of its own$"
both_ways = pytest.mark.parametrize("where", CASES)


@both_ways
def test_heads_of_a_handle_over_what_combine_reads_are_refused(where, starts_nothing):
    options, case = CASES[where]

    def main(comm):
        buffer = make_buffer(comm, case, options)
        outcome = dispatch(buffer, case, options, comm.rank)
        handle = outcome.handle
        for head in handle.rewritten:
            bias = to_target(np.zeros((4, case.hidden), BF16))
            own = getattr(handle, head)
            heads = over(bias, "int32", tuple(own.shape))
            assign(heads, to_numpy(own))
            changed = tuple((handle.arrays | {head: heads}).values())
            with starts_nothing(), pytest.raises(ValueError, match=rf"^handle\.{head}: got memory that bias_0 {OWN}"):
                buffer.combine(outcome.recv_x, changed, bias=bias, config=options.config)
        buffer.destroy()

    spawn(main, case.num_ranks)


@pytest.mark.emulator_only("on a GPU it is not checked where inputs lie")
@both_ways
def test_inputs_in_the_rings_are_refused(where, starts_nothing):
    options, case = CASES[where]

    def main(comm):
        buffer = make_buffer(comm, case, options)
        _, arguments = dispatch_arguments(buffer, case, options, comm.rank)
        outcome = dispatch(buffer, case, options, comm.rank)
        for rdma in [False, True][: case.num_nodes]:

            def inside(dtype, *shape, rdma=rdma):
                return over(buffer.get_local_buffer_tensor(arguments["x"].dtype, use_rdma_buffer=rdma), dtype, shape)

            calls = {
                "x": lambda: buffer.dispatch(**arguments | {"x": inside("bfloat16", 4, case.hidden)}),
                "topk_idx": lambda: buffer.dispatch(**arguments | {"topk_idx": inside("int64", 4, 2)}),
                "cached x": lambda: buffer.dispatch(
                    inside("bfloat16", 4, case.hidden), outcome.handle, config=options.config
                ),
                "x ": lambda: buffer.combine(
                    inside("bfloat16", *outcome.recv_x.shape), outcome.handle, config=options.config
                ),
                "bias_0": lambda: buffer.combine(
                    outcome.recv_x, outcome.handle, bias=inside("bfloat16", 4, case.hidden), config=options.config
                ),
            }
            for name, call in calls.items():
                with starts_nothing(), pytest.raises(ValueError, match=f"^{name.split()[-1]}: {SENDS}"):
                    call()
        buffer.destroy()

    spawn(main, case.num_ranks)


# Low latency

CASE = make_low_latency_case(1, num_tokens=3, hidden=512, unused=0)  # of 2 ranks, with 4 experts and 2 choices
TRIP = LowLatencyOptions(spare=1, deduplicate=True)  # deduplicate for the size of the buffer


def two_over_one(output, dtype, shape, other, other_dtype, other_shape):
    """Two arguments whose memory begins at one place."""

    def change(_):
        memory = to_target(np.zeros(1 << 14, np.int64))
        return {output: over(memory, dtype, shape), other: over(memory, other_dtype, other_shape)}

    return change, f"{output}: got memory that {other} lies in too; must be in memory of its own: the call writes it"


RECV_STATS = "cumulative_local_expert_recv_stats", "int32", (2,)
WAITS = "dispatch_wait_recv_cost_stats", "int64", (2,)
OUT = "out", "bfloat16", (3, 512)
WAITS_OF_COMBINE = "combine_wait_recv_cost_stats", "int64", (2,)
X, ROWS = ("x", "bfloat16", (3, 512)), ("x", "bfloat16", (2, 8, 512))
CHOICES, WEIGHTS = ("topk_idx", "int64", (3, 2)), ("topk_weights", "float32", (3, 2))


def table(outputs_and_others):
    return {f"{output[0]} over {other[0]}": two_over_one(*output, *other) for output, other in outputs_and_others}


DISPATCH = {
    **table([(RECV_STATS, X), (RECV_STATS, CHOICES), (WAITS, X), (WAITS, CHOICES), (WAITS, RECV_STATS)]),
    "statistics that begin in the last token": (
        lambda a: {RECV_STATS[0]: over(a["x"], "int32", (2,), start=3 * 256 - 2)},
        "cumulative_local_expert_recv_stats: got memory that x lies in too",
    ),
}
COMBINE = {
    **table([(OUT, ROWS), (OUT, CHOICES), (OUT, WEIGHTS), (WAITS_OF_COMBINE, ROWS), (WAITS_OF_COMBINE, WEIGHTS)]),
    **table([(WAITS_OF_COMBINE, OUT)]),
    "waits over the handle": (
        lambda a: {WAITS_OF_COMBINE[0]: over(a["handle"].layout_range, "int64", (2,))},
        "combine_wait_recv_cost_stats: got memory that handle.layout_range lies in too",
    ),
}


@pytest.mark.parametrize("is_prepared", [False, True])
def test_outputs_of_low_latency_calls_over_other_arrays_are_refused(is_prepared, starts_nothing):
    """On a GPU what was accepted once is not checked again, but for this."""

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(CASE, TRIP)])
        memory = {each[0]: to_target(np.zeros(each[2], each[1])) for each in (RECV_STATS, WAITS)}
        given = {
            "x": to_target(CASE.x[comm.rank]),
            "topk_idx": to_target(CASE.topk_idx[comm.rank]),
            "num_max_dispatch_tokens_per_rank": 4,
            "num_experts": CASE.num_experts,
            "use_fp8": False,
        }
        *_, handle, _, _ = buffer.low_latency_dispatch(**given, **memory)
        combined = {
            "x": to_target(np.zeros((2, 8, 512), BF16)),
            "topk_idx": given["topk_idx"],
            "topk_weights": to_target(np.ones((3, 2), np.float32)),
            "handle": handle,
        }
        if is_prepared:
            outputs = to_target(np.zeros((3, 512), BF16)), to_target(np.zeros(2, np.int64))
            buffer.low_latency_combine(**combined, out=outputs[0], combine_wait_recv_cost_stats=outputs[1])
        check_refused(buffer.low_latency_dispatch, given, DISPATCH, starts_nothing)
        weights = {"over weights that travel": two_over_one(*WAITS, *WEIGHTS)}
        check_refused(buffer.low_latency_dispatch, given | {"deduplicate": True}, weights, starts_nothing)
        check_refused(buffer.low_latency_combine, combined, COMBINE, starts_nothing)
        buffer.destroy()

    spawn(main, 2)


def test_outputs_may_lie_side_by_side_with_inputs():
    """The last permitted place: one byte more would be refused."""

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(CASE, TRIP)])
        memory = to_target(np.zeros(2 + 6 + 2, np.int64))
        choices = over(memory, "int64", (3, 2), start=2)
        assign(choices, CASE.topk_idx[comm.rank])
        outputs = {RECV_STATS[0]: over(memory, "int32", (2,), start=2), WAITS[0]: over(memory, "int64", (2,), start=8)}
        x = to_target(CASE.x[comm.rank])
        _, count, *_ = buffer.low_latency_dispatch(x, choices, 4, CASE.num_experts, use_fp8=False, **outputs)
        received = to_numpy(outputs[RECV_STATS[0]]).tolist() == to_numpy(count).tolist()
        buffer.destroy()
        return received, to_numpy(choices).tolist() == CASE.topk_idx[comm.rank].tolist()

    assert spawn(main, 2) == [(True, True)] * 2


@pytest.mark.emulator_only("on a GPU it is not checked where inputs lie")
def test_arrays_in_the_low_latency_buffer_are_refused(starts_nothing):
    case = make_low_latency_case(1, num_tokens=3)

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(case, LowLatencyOptions())])
        trip = Trip(buffer, case, LowLatencyOptions())
        trip.send_dispatch()
        trip.receive_dispatch()
        rows = buffer.get_next_low_latency_combine_buffer(trip.handle)
        weights = trip.topk_idx, trip.topk_weights
        out, x = over(rows, "bfloat16", (3, case.hidden)), to_target(np.zeros(tuple(rows.shape), BF16))
        calls = {
            "x": lambda: buffer.low_latency_combine(rows, *weights, trip.handle),
            "out": lambda: buffer.low_latency_combine(x, *weights, trip.handle, out=out, zero_copy=True),
            "x ": lambda: buffer.low_latency_dispatch(out, trip.topk_idx, 3, case.num_experts),
        }
        for name, call in calls.items():
            with starts_nothing(), pytest.raises(ValueError, match=f"^{name.strip()}: {SENDS}"):
                call()
        rows[:] = 0
        buffer.low_latency_combine(rows, *weights, trip.handle, zero_copy=True)
        buffer.destroy()

    spawn(main, 2)
