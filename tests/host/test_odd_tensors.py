"""Tensors without plain memory: each verb refuses each of them, names the argument, and leaves nothing behind."""

from importlib import import_module

import pytest

import nbep
from nbep.device.jit import kernel
from nbep.device.types import In, Out
from nbep.host.target.base import current_runtime

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.emulator_only("tensors of the CPU"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]

CONFIG = nbep.Config(2, 2, 4)
HIDDEN, NUM_EXPERTS, NUM_TOKENS, MAX_TOKENS = 128, 4, 3, 4


def negative(tensor):
    return torch._neg_view(tensor)


def fake(tensor):
    return import_module("torch._subclasses.fake_tensor").FakeTensorMode().from_tensor(tensor)


def freed(tensor):
    """As sharded training frees parameters."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def without_strides(tensor):
    nowhere, nothing = torch.empty(tensor.dim(), 0, dtype=torch.int64), tensor.new_empty(0)
    return torch.sparse_coo_tensor(nowhere, nothing, tensor.shape)


def batched(tensor):
    """As torch.vmap passes it on: here it gets out."""
    seen = []
    torch.vmap(lambda one: seen.append(one) or one)(tensor[None])
    return seen[0]


ODD = {
    negative: "negative or conjugate bit",
    fake: "without memory",
    freed: "without memory",
    without_strides: "data pointer",
    batched: "data pointer",
}


def odd_ones(tensor):
    for make, words in ODD.items():
        if not (make is negative and tensor.dtype is torch.bool):
            yield make(tensor), words


def refuses(call, arguments):
    """Each array among the arguments, also in tuples, in each of the odd ways."""
    for name, value in arguments.items():
        values = value if isinstance(value, tuple) else (value,)
        for i, tensor in enumerate(values):
            if not isinstance(tensor, torch.Tensor):
                continue
            for odd, words in odd_ones(tensor):
                changed = odd if value is tensor else (*values[:i], odd, *values[i + 1 :])
                with pytest.raises(ValueError, match=rf"(?s)^[\w.]*{name.split('_')[0]}.*: got .*{words}.*; must be"):
                    call(**{**arguments, name: changed})


def same(before, after):
    assert type(before) is type(after)
    if isinstance(before, tuple):
        assert all(same(*both) for both in zip(before, after, strict=True))
    return not isinstance(before, torch.Tensor) or torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def inputs(rank):
    x = torch.arange(NUM_TOKENS * HIDDEN).reshape(NUM_TOKENS, HIDDEN).add(rank).bfloat16()
    return x, torch.tensor([[0, 2], [1, 3], [2, -1]]), torch.rand(NUM_TOKENS, 2)


def refuses_and_goes_on(call, **arguments):
    """The call before all that it refuses is as the one behind."""
    before = call(**arguments)
    refuses(call, arguments)
    after = call(**arguments)
    assert all(same(*both) for both in zip(before[:2], after[:2], strict=True))
    return after


def test_normal_verbs_refuse_what_has_no_plain_memory_and_go_on():
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 18)
        x, topk_idx, topk_weights = inputs(comm.rank)
        layout = refuses_and_goes_on(buffer.get_dispatch_layout, topk_idx=topk_idx, num_experts=NUM_EXPERTS)
        recv_x, *_, handle, _ = refuses_and_goes_on(
            buffer.dispatch,
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            config=CONFIG,
        )
        scaled = x.to(torch.float8_e4m3fn), torch.ones(NUM_TOKENS, 1)
        for tokens in (x, scaled):
            refuses_and_goes_on(buffer.dispatch, x=tokens, handle=handle, config=CONFIG)
        refuses_and_goes_on(
            buffer.combine,
            x=recv_x,
            handle=tuple(handle),
            topk_weights=torch.rand(len(recv_x), 2),
            bias=(torch.ones_like(x), torch.ones_like(x)),
            config=CONFIG,
        )
        buffer.destroy()

    nbep.spawn(main, 2, "emulator")


@pytest.mark.parametrize("later", [{}, {"return_recv_hook": True}], ids=["at_once", "with_hook"])
def test_low_latency_verbs_refuse_what_has_no_plain_memory_and_go_on(later):
    def received(verb, number):
        def call(**arguments):
            result = verb(**arguments, **later)
            if result[-1] is not None:
                result[-1]()
            return result[:number]

        return call

    def main(comm):
        num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, 2, NUM_EXPERTS)
        buffer = nbep.Buffer(comm, 0, num_bytes, low_latency_mode=True, enable_shrink=True)
        x, topk_idx, topk_weights = inputs(comm.rank)
        dispatched = refuses_and_goes_on(
            received(buffer.low_latency_dispatch, 3),
            x=x,
            topk_idx=topk_idx,
            num_max_dispatch_tokens_per_rank=MAX_TOKENS,
            num_experts=NUM_EXPERTS,
            use_fp8=False,
            cumulative_local_expert_recv_stats=torch.zeros(2, dtype=torch.int32),
            dispatch_wait_recv_cost_stats=torch.zeros(2, dtype=torch.int64),
        )
        recv_x, _, handle = dispatched
        refuses_and_goes_on(
            received(buffer.low_latency_combine, 1),
            x=recv_x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            handle=tuple(handle),
            out=torch.empty_like(x),
            combine_wait_recv_cost_stats=torch.zeros(2, dtype=torch.int64),
        )
        mask = torch.zeros(2, dtype=torch.int32)
        refuses(buffer.low_latency_query_mask_buffer, {"mask_status": mask})
        buffer.low_latency_query_mask_buffer(mask)
        buffer.destroy()

    nbep.spawn(main, 2, "emulator")


def test_casts_and_launches_refuse_what_has_no_plain_memory():
    @kernel()
    def nothing(array: Out, other: In):
        pass

    def main(comm):
        x = inputs(0)[0]
        refuses(nbep.per_token_cast_to_fp8, {"x": x})
        x_fp8, scales = nbep.per_token_cast_to_fp8(x)
        refuses(nbep.per_token_cast_back, {"x_fp8": x_fp8, "scales": scales})
        runtime = current_runtime()
        number = torch.ones(1, dtype=torch.int64)
        for odd, words in odd_ones(number):
            with pytest.raises(ValueError, match=f"nothing, other: got .*{words}"):
                runtime.launch(runtime.current_stream, nothing, 1, 32, 0, number, odd)

    nbep.spawn(main, 1, "emulator")
