"""What the benchmarks of the normal mode call, inside a node and between nodes: dispatch in two formats, and combine.

Source: DeepEP tests/test_intranode.py, tests/test_internode.py (test_main) and tests/utils.py (create_grouped_scores)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nbep

DISPATCH_BF16, DISPATCH_FP8, COMBINE_BF16 = WORKS = ("dispatch bf16", "dispatch fp8", "combine bf16")


class GpuArrays:
    """NumPy arrays as torch's on the GPU, and the bytes of those."""

    @staticmethod
    def put(array: np.ndarray) -> Any:
        import torch

        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(array).cuda()

    @staticmethod
    def get_bytes(array: Any) -> np.ndarray:
        """[rows, bytes]"""
        import torch

        return array.contiguous().view(torch.uint8).cpu().numpy()

    @staticmethod
    def wait() -> None:
        import torch

        torch.cuda.current_stream().synchronize()


arrays: Any = GpuArrays  # tests on the emulator bring others


class Inputs(NamedTuple):
    """One rank's, on its GPU. xs: x of each dispatch"""

    xs: dict[str, Any]
    topk_idx: Any
    topk_weights: Any


def make_inputs(rank: int, options: argparse.Namespace) -> Inputs:
    """Random tokens and choices of a rank."""
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((options.tokens, options.hidden), np.float32).astype(ml_dtypes.bfloat16)
    return put_inputs(x, choose_experts(rank, options.tokens, options.topk, options.experts))


def put_inputs(x: np.ndarray, topk_idx: np.ndarray) -> Inputs:
    """These, on the GPU. A buffer is made before, whose GPU is torch's current one from then on."""
    on_gpu = arrays.put(x)
    arrays.wait()
    xs = {DISPATCH_BF16: on_gpu, DISPATCH_FP8: nbep.per_token_cast_to_fp8(on_gpu, column_major_scales=True)}
    inputs = Inputs(xs, arrays.put(topk_idx), arrays.put(np.ones(topk_idx.shape, np.float32)))
    arrays.wait()
    return inputs


def choose_experts(
    rank: int, num_tokens: int, num_topk: int, num_experts: int, num_nodes: int = 1, num_groups: int = 1
) -> np.ndarray:
    """topk_idx [num_tokens, num_topk] int64: of the num_groups nodes with the best experts, the best experts."""
    rng = np.random.default_rng(rank)
    scores = np.abs(rng.standard_normal((num_tokens, num_experts), np.float32)) + 1
    of_nodes = scores.reshape(num_tokens, num_nodes, -1)
    best = np.argsort(-of_nodes.max(axis=2), axis=1)[:, :num_groups]
    is_chosen = np.zeros((num_tokens, num_nodes, 1), bool)
    np.put_along_axis(is_chosen, best[:, :, None], True, axis=1)
    masked = np.where(is_chosen, of_nodes, 0).reshape(num_tokens, num_experts)
    return np.argpartition(-masked, num_topk - 1, axis=1)[:, :num_topk].astype(np.int64)


def token_bytes(work: str, hidden: int) -> int:
    """Of a row and its scales."""
    return hidden + hidden // 128 * 4 if work.endswith("fp8") else 2 * hidden


def call_of(work: str, buffer: Any, inputs: Inputs, recv_x: Any, handle: Any, **how: Any) -> Callable[[], Any]:
    """The call of a work along the routes of a handle; recv_x is what its dispatch gave."""
    if work == COMBINE_BF16:
        return partial(buffer.combine, recv_x, handle, **how)
    return partial(buffer.dispatch, inputs.xs[work], handle=handle, **how)
