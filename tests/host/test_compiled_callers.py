"""Programs that torch compiles: a call of nbep breaks the graph, and what it does is not traced."""

import numpy as np
import pytest

import nbep

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.emulator_only("tensors of the CPU")

CONFIG = nbep.Config(2, 2, 4)
NUM_EXPERTS = 4


def inputs(rank):
    x = torch.arange(3 * 128).reshape(3, 128).add(rank).bfloat16()
    return x, torch.tensor([[0, 2], [1, 3], [2, -1]]), torch.full((3, 2), 0.5)


def normal(buffer, x, topk_idx, topk_weights):
    """Also with events and casts in between."""
    x_fp8, scales = nbep.per_token_cast_to_fp8(x * 2)
    overlap = {"async_finish": True, "previous_event": nbep.Buffer.capture()}
    layout = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS, **overlap)
    layout[-1].current_stream_wait()
    (recv_x, recv_scales), _, _, _, handle, event = buffer.dispatch(
        (x_fp8, scales),
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
        config=CONFIG,
        async_finish=True,
    )
    with event:
        weights = topk_weights + 1
    rows = nbep.per_token_cast_back(recv_x, recv_scales) * 3
    combined_x, _, _ = buffer.combine(rows, handle, config=CONFIG)
    return combined_x + weights.sum()


def low_latency(buffer, x, topk_idx, topk_weights):
    recv_x, recv_count, handle, _, hook = buffer.low_latency_dispatch(
        x + 1, topk_idx, 4, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
    )
    weights = topk_weights * 2
    hook()
    combined_x, event, _ = buffer.low_latency_combine(recv_x, topk_idx, weights, handle, async_finish=True)
    event.current_stream_wait()
    return combined_x - recv_count.sum()


@pytest.mark.parametrize("program", [normal, low_latency])
def test_a_compiled_caller_gets_what_the_caller_gets(program):
    def main(comm):
        num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(4, 128, 2, NUM_EXPERTS)
        buffer = nbep.Buffer(comm, 1 << 18, num_bytes, low_latency_mode=True)
        arguments = inputs(comm.rank)
        wanted = program(buffer, *arguments)
        compiled = torch.compile(program, backend="eager")
        results = [compiled(buffer, *arguments) for _ in range(2)]
        buffer.destroy()
        return [wanted, *results]

    for wanted, *results in nbep.spawn(main, 2, "emulator"):
        assert all(np.array_equal(wanted.float(), result.float()) for result in results)


def test_a_caller_that_must_be_one_graph_says_that_nbep_breaks_it():
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 18)
        layout_of = torch.compile(lambda topk_idx: buffer.get_dispatch_layout(topk_idx, 4), fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="nbep launches kernels that no graph of torch holds"):
            layout_of(inputs(0)[1])
        buffer.destroy()

    nbep.spawn(main, 2, "emulator")
