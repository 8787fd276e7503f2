"""Casts between bf16 and FP8 with a scale for every 128 columns of a token. They need a rank to run on, but no buffer.

Source: DeepEP tests/utils.py, per_token_cast_to_fp8 and per_token_cast_back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nbep.device.kernels.casts import CastOutputs, CastSizes
from nbep.device.kernels.casts import per_token_cast_back as cast_back_kernel
from nbep.device.kernels.casts import per_token_cast_to_fp8 as cast_kernel
from nbep.device.protocols.fp8 import COLUMNS
from nbep.host import validate
from nbep.host.arguments import flags
from nbep.host.block_sizes import block_sizes
from nbep.host.entry import leave_alone, untraced
from nbep.host.spawn import spawn
from nbep.host.target.base import Array, Kernel, Runtime, current_runtime

T = TypeVar("T")
WARP = 32
MAX_BLOCKS = 1024


@untraced
def per_token_cast_to_fp8(
    x: Array, round_scale: bool = False, column_major_scales: bool = False
) -> tuple[Array, Array]:
    """Cast tokens to FP8.

    Args:
        x: [num_tokens, hidden] bf16
        round_scale: makes every scale a power of two
        column_major_scales: lays the scales out by columns (their shape stays the same)

    Returns:
        x_fp8 [num_tokens, hidden] e4m3; scales [num_tokens, hidden / 128] float32: x is about x_fp8 * scales.
        A NaN stays NaN, and is left out of its scale. Where there is an infinity, that is NaN, the scale is
        infinity and the other columns are 0: cast back, all 128 are NaN

    Raises:
        ValueError: if hidden is not a multiple of 128

    Blocks:
        the caller's current stream; outside of a rank, a world of one emulated rank runs for the call
    """
    return _on_a_rank(lambda runtime: _cast_to_fp8(runtime, x, round_scale, column_major_scales))


@untraced
def per_token_cast_back(x_fp8: Array, scales: Array) -> Array:
    """Undo per_token_cast_to_fp8, up to rounding.

    Args:
        x_fp8: [num_tokens, hidden] e4m3
        scales: [num_tokens, hidden / 128] float32, any strides

    Returns:
        x [num_tokens, hidden] bf16

    Raises:
        ValueError: if hidden is not a multiple of 128, or if scales do not fit

    Blocks:
        as per_token_cast_to_fp8
    """
    return _on_a_rank(lambda runtime: _cast_back(runtime, x_fp8, scales))


def _cast_to_fp8(runtime: Runtime, x: Array, round_scale: bool, column_major_scales: bool) -> tuple[Array, Array]:
    flags(round_scale=round_scale, column_major_scales=column_major_scales)
    validate.array("x", runtime.view(x), "bfloat16", ("num_tokens", "hidden"))
    num_tokens, hidden = x.shape
    validate.hidden_size("x", hidden, COLUMNS)
    num_scales = hidden // COLUMNS
    x_fp8 = runtime.empty((num_tokens, hidden), "float8_e4m3fn", x)
    if column_major_scales:
        scales = runtime.empty((num_scales, num_tokens), "float32", x).T
    else:
        scales = runtime.empty((num_tokens, num_scales), "float32", x)
    _launch(runtime, cast_kernel, (CastOutputs(x_fp8, scales), x), scales, round_scale)
    return x_fp8, scales


def _cast_back(runtime: Runtime, x_fp8: Array, scales: Array) -> Array:
    validate.array("x_fp8", runtime.view(x_fp8), "float8_e4m3fn", ("num_tokens", "hidden"))
    num_tokens, hidden = x_fp8.shape
    validate.hidden_size("x_fp8", hidden, COLUMNS)
    view = runtime.view(scales)
    validate.array("scales", view, "float32", (num_tokens, hidden // COLUMNS), contiguous=False)
    if min(view.strides) < 0:
        validate.refuse("scales", f"strides {view.strides}", "of strides that are not negative")
    x = runtime.empty((num_tokens, hidden), "bfloat16", x_fp8)
    _launch(runtime, cast_back_kernel, (x, x_fp8, scales), scales, False)
    return x


def _launch(runtime: Runtime, kernel: Kernel, arguments: tuple[Any, ...], scales: Array, round_scale: bool) -> None:
    """One warp per 128 columns, on the caller's current stream. arguments: before the sizes"""
    (num_tokens, num_scales), (token_stride, hidden_stride) = scales.shape, runtime.view(scales).strides
    block = block_sizes(runtime).layout
    grid = max(1, min(MAX_BLOCKS, -(-num_tokens * num_scales // (block // WARP))))
    sizes = CastSizes(num_tokens, num_scales * COLUMNS, token_stride, hidden_stride, int(round_scale))
    runtime.launch(runtime.current_stream, kernel, grid, block, 0, *arguments, sizes)
    runtime.current_stream.record().current_stream_wait()


def _on_a_rank(call: Callable[[Runtime], T]) -> T:
    leave_alone()
    runtime = current_runtime()
    if runtime is not None:
        return call(runtime)
    return spawn(lambda comm: call(comm.runtime), 1, "emulator")[0]
