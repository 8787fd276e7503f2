"""Handles whose arrays are not as dispatch made them, however they came to be, are refused by name."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from internode import Options as NodeOptions
from internode import make_node_case
from intranode import combine, dispatch, make_buffer
from parts import both_parts, dear

import nbep
import nbep.reference

pytestmark = pytest.mark.emulator_only("contents are never looked at on a GPU")
CONFIG = nbep.Config(2, 2, 4)
CHANGES = {
    "rank_prefix_matrix": "sums, from 0 on, that never get less",
    "channel_prefix_matrix": "as handle.is_token_in_rank says",
    "recv_channel_prefix_matrix": "tokens of a rank",
    "is_token_in_rank": "as handle.is_token_in_rank says",
    "send_head": "as dispatch made it",
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", [lambda handle: handle, tuple, replace], ids=["same", "tuple", "replaced"])
def test_arrays_that_contradict_each_other_are_refused(name, make, on_two_ranks, inputs):
    def main(buffer):
        recv_x, *_, handle, _ = buffer.dispatch(**inputs(buffer))
        if buffer.rank == 0:
            array = getattr(handle, name)
            before = array.copy()
            array[0, 0] = ~array[0, 0] if array.dtype == bool else 77
            with pytest.raises(ValueError, match=rf"^handle\..*{CHANGES[name]}"):
                buffer.combine(recv_x, make(handle), config=CONFIG)
            array[:] = before
        return buffer.combine(recv_x, make(handle), config=CONFIG)[0].shape

    assert on_two_ranks(main) == [(3, 128)] * 2


def test_a_handle_that_was_put_together_is_checked_like_a_tuple(on_two_ranks, inputs):
    def main(buffer):
        recv_x, *_, handle, _ = buffer.dispatch(**inputs(buffer))
        message = r"^handle\.send_head: got int64 \[3, 2\]; must be int32 \[3, 2\]"
        with pytest.raises(ValueError, match=message):
            buffer.combine(recv_x, replace(handle, send_head=handle.send_head.astype(np.int64)), config=CONFIG)
        assert replace(handle).owner is None

    on_two_ranks(main)


def test_handles_between_nodes_are_checked_too(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 17, 1 << 17, num_nvl_peers=1)
        layout = buffer.get_dispatch_layout(np.array([[0, 2], [1, 3], [2, -1]]), 4)
        per_rank, per_node, per_expert, is_token_in_rank, _ = layout
        x = np.ones((3, 64), nbep.reference.BF16)
        recv_x, *_, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_token_in_rank,
            config=nbep.Config(2, 2, 4, 2, 4),
        )
        names = [each.name for each in fields(handle) if each.init]
        for name in names:
            array = getattr(handle, name)
            first = (0,) * array.ndim
            before = array[first]
            array[first] = ~before if array.dtype == bool else 77
            with pytest.raises(ValueError, match=r"^handle\."):
                buffer.combine(recv_x, list(handle))
            array[first] = before
        combined = buffer.combine(recv_x, list(handle))[0]
        buffer.destroy()
        return len(names), combined.shape

    assert nbep.spawn(main, 2, "emulator") == [(10, (3, 64))] * 2


@dear
@pytest.mark.parametrize(
    ("shape", "all_known"), both_parts([((2, 2), True)], thorough=[((3, 2), True), ((2, 4), False)]), ids=str
)
def test_heads_of_tokens_that_went_elsewhere_are_refused(shape, all_known):
    """Heads that count up as heads do, but not for the tokens that came. What went to other places alone is unknown."""
    case, options = make_node_case(3, *shape, num_tokens=5), NodeOptions()

    def main(comm):
        buffer = make_buffer(comm, case, options)
        outcome = dispatch(buffer, case, options, comm.rank)
        handle, place = outcome.handle, comm.rank % shape[1]
        received = handle.recv_rdma_channel_prefix_matrix
        firsts = np.concatenate([[0], handle.recv_rdma_rank_prefix_sum[:-1]])
        ends = np.unique((firsts[:, None] + received).ravel())
        goes = handle.send_nvl_head >= 0
        tried = 0
        for row, other in np.ndindex(goes.shape):
            changed = goes.copy()
            changed[row, other] ^= True
            if not all_known and other != place and not goes[row, place] and changed[row].any():
                continue
            heads = np.full(goes.shape, -1, np.int32)
            for begin, end in pairwise([0, *ends]):
                counted = np.cumsum(changed[begin:end], axis=0) - 1
                heads[begin:end] = np.where(changed[begin:end], counted, -1)
            with pytest.raises(ValueError, match=r"^handle\.send_nvl_head"):
                buffer.combine(outcome.recv_x, (*handle[:-1], heads), config=options.config)
            tried += 1
        combine(buffer, case, options, comm.rank, outcome)
        buffer.dispatch(case.x[comm.rank], tuple(handle), config=options.config)  # whose heads combine has rewritten
        buffer.destroy()
        return tried

    assert sum(nbep.spawn(main, case.num_ranks, "emulator")) > 20


def test_a_low_latency_handle_is_checked_too():
    def main(comm):
        buffer = nbep.Buffer(comm, 0, 1 << 16, low_latency_mode=True)
        topk_idx, weights = np.array([[0, 1], [1, -1]]), np.ones((2, 2), np.float32)
        x = np.ones((2, 128), nbep.reference.BF16)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, 2, use_fp8=False)
        for array, name, value in ((handle.layout_range, "layout_range", 1 << 35), (handle.src_info, "src_info", 9)):
            before = array.copy()
            array[:] = value | (array & 7) if name == "layout_range" else value
            with pytest.raises(ValueError, match=rf"^handle\.{name}\["):
                buffer.low_latency_combine(recv_x, topk_idx, weights, handle)
            array[:] = before
        changed = type(handle)((handle.src_info, handle.layout_range.astype(np.int32)), handle.sizes, handle.call)
        with pytest.raises(ValueError, match=r"^handle\.layout_range: got int32"):
            buffer.low_latency_combine(recv_x, topk_idx, weights, changed)
        combined, *_ = buffer.low_latency_combine(recv_x, topk_idx, weights, handle)
        buffer.destroy()
        return combined[:, 0].tolist()

    assert nbep.spawn(main, 2, "emulator") == [[2.0, 1.0]] * 2


def test_a_bool_of_another_byte_than_0_and_1_is_refused(on_two_ranks, inputs):
    def main(buffer):
        arguments = inputs(buffer)
        twos = arguments["is_token_in_rank"].astype(np.uint8) * 2
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        with pytest.raises(ValueError, match=r"^is_token_in_rank\[\d, \d\]: got a bool of the byte 2; must be 0 or 1"):
            buffer.dispatch(**{**arguments, "is_token_in_rank": twos.view(bool)})
        parts = (*handle[:4], twos.view(bool), handle[5])
        with pytest.raises(ValueError, match=r"^handle.is_token_in_rank\[\d, \d\]: got a bool of the byte 2"):
            buffer.combine(recv_x, parts)

    on_two_ranks(main)
