"""torch's tensors on the CPU are arrays of the emulator, as NumPy's are."""

import numpy as np
import pytest
from cases import make_case

import nbep
from nbep import reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.emulator_only("a GPU takes no tensors of the CPU")

CONFIG = nbep.Config(2, 2, 4)


@pytest.fixture
def case():
    return make_case(1, num_ranks=2, num_tokens=(5, 3), hidden=64)


def tensors_of(case, rank):
    """x, topk_idx and topk_weights of a rank; a leaf that wants a gradient is taken, too."""
    x = torch.from_numpy(case.x[rank].astype(np.float32)).bfloat16()
    return x, torch.from_numpy(case.topk_idx[rank]), torch.from_numpy(case.topk_weights[rank]).requires_grad_()


def dispatch(buffer, case, x, topk_idx, topk_weights):
    layout = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    return buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
        config=CONFIG,
    )


def test_tensors_come_out_where_tensors_went_in_with_the_references_values(case):
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 16)
        recv_x, recv_topk_idx, recv_topk_weights, _, handle, _ = dispatch(buffer, case, *tensors_of(case, comm.rank))
        combined_x, combined_weights, _ = buffer.combine(recv_x, handle, recv_topk_weights, config=CONFIG)
        again, *_ = buffer.dispatch(combined_x, handle=handle, config=CONFIG)
        buffer.destroy()
        received = recv_x, recv_topk_idx, recv_topk_weights, combined_x, combined_weights, again
        assert all(isinstance(array, torch.Tensor) for array in (*received, *handle))
        return [array.float().numpy() for array in received]

    outcomes = nbep.spawn(main, 2, "emulator")
    dispatched = reference.dispatch(case.x, case.layouts, 1, topk_idx=case.topk_idx, topk_weights=case.topk_weights)
    combined = reference.combine(
        [one.recv_x for one in dispatched], dispatched, topk_weights=[one.recv_topk_weights for one in dispatched]
    )
    for outcome, sent, back in zip(outcomes, dispatched, combined, strict=True):
        wanted = sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, *back
        for got, want in zip(outcome, wanted, strict=False):
            np.testing.assert_array_equal(got, want.astype(np.float32))
    again = reference.dispatch([combined_x for combined_x, _ in combined], case.layouts, 1)
    for outcome, sent in zip(outcomes, again, strict=True):
        np.testing.assert_array_equal(outcome[-1], sent.recv_x.astype(np.float32))


def test_contents_of_tensors_are_checked(case):
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 16)
        with pytest.raises(ValueError, match=r"topk_idx\[1, 0\]: got 99; must be -1"):
            buffer.get_dispatch_layout(torch.tensor([[0], [99]]), 4)
        x, topk_idx, topk_weights = tensors_of(case, comm.rank)
        *_, handle, _ = dispatch(buffer, case, x, topk_idx, topk_weights)
        handle.send_head[0] += 1
        with pytest.raises(ValueError, match=r"handle.send_head\[0, "):
            buffer.combine(torch.zeros(len(handle.recv_src_idx), 64, dtype=torch.bfloat16), handle, config=CONFIG)

    nbep.spawn(main, 2, "emulator")


def test_a_tensor_of_another_device_is_refused_with_its_device():
    def main(comm):
        with pytest.raises(ValueError, match="topk_idx: got Tensor on meta; must be an array of int64"):
            nbep.Buffer(comm, 1 << 16).get_dispatch_layout(torch.zeros(2, 1, dtype=torch.int64, device="meta"), 4)

    nbep.spawn(main, 2, "emulator")


def test_the_symmetric_buffer_as_a_tensor_is_the_same_memory():
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 10)
        tensor = buffer.get_local_buffer_tensor(torch.bfloat16, (2, 8), offset=16)
        tensor.copy_(torch.arange(16.0).view(2, 8))
        bits = buffer.get_local_buffer_tensor(np.uint16, (16,), offset=16)
        return tensor.dtype, tuple(tensor.shape), (bits.astype(np.uint32) << 16).view(np.float32).tolist()

    assert nbep.spawn(main, 2, "emulator") == [(torch.bfloat16, (2, 8), list(range(16)))] * 2
