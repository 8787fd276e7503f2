"""The routing of a dispatch and its combine, kept in a folder, and the same calls on the emulator.

 rank r on a GPU: save_call --> FOLDER/rank_r.npz, FOLDER/program.py --> nbep check FOLDER/program.py

Rows are short there and hold small numbers: what tokens hold does not matter for who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nbep
from nbep.host.ranks.timeouts import saved_calls
from nbep.lab.debug import Text
from nbep.specimens.workloads.cases import routes_of

HIDDEN = {False: 64, True: 128}  # by low_latency: the least that is allowed
PROGRAM = '''"""A dispatch and its combine that nbep.debug.save_call has kept."""

from nbep.specimens.workloads.saved_call import program_of

NUM_RANKS, main, check = program_of(__file__)
'''


def save_call(
    folder: str | Path,
    rank: int,
    num_ranks: int,
    topk_idx: Any,
    num_experts: int,
    config: Any = None,
    low_latency: bool = False,
) -> Text:
    """Keep the routing of a dispatch, on any target, to run it and its combine on the emulator. Each rank calls it.

    It is `nbep.debug.save_call`.

    Args:
        folder: that all ranks can write to
        topk_idx: as of the call
        config: of both, None: a small one

    Returns:
        the command that runs the calls: `nbep check FOLDER/program.py`
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    on_host = topk_idx
    for name in ("cpu", "get"):  # torch's and CuPy's
        on_host = getattr(on_host, name)() if hasattr(on_host, name) else on_host
    settings = () if config is None else tuple(getattr(config, name) for name in CONFIG)
    np.savez(
        path / f"rank_{rank}.npz",
        topk_idx=np.asarray(on_host),
        sizes=np.array([num_ranks, num_experts, low_latency]),
        config=np.array(settings, np.int64),
    )
    (path / "program.py").write_text(PROGRAM)
    saved_calls[:] = [f"nbep check {path / 'program.py'}"]
    return Text(saved_calls[0])


TOOLS = {"save_call": save_call}  # of nbep.debug


CONFIG = (
    "num_sms",
    "num_max_nvl_chunked_send_tokens",
    "num_max_nvl_chunked_recv_tokens",
    "num_max_rdma_chunked_send_tokens",
    "num_max_rdma_chunked_recv_tokens",
)


def program_of(file: str) -> tuple[int, Callable[..., Any], Callable[..., None]]:
    """NUM_RANKS, main and check of the calls in the folder of a file.

    Raises:
        FileNotFoundError: if the file of a rank is missing
    """
    folder = Path(file).parent
    first = np.load(folder / "rank_0.npz")
    num_ranks, num_experts, low_latency = first["sizes"].tolist()
    choices = [np.load(folder / f"rank_{rank}.npz")["topk_idx"] for rank in range(num_ranks)]
    config = nbep.Config(*first["config"].tolist()) if first["config"].size else nbep.Config(2, 6, 256)
    most = max(len(topk_idx) for topk_idx in choices)

    def main(comm: Any, tokens: int = most) -> bool:
        topk_idx = choices[comm.rank][:tokens]
        x = np.repeat(np.arange(len(topk_idx))[:, None] % 64, HIDDEN[bool(low_latency)], axis=1)
        call = _low_latency if low_latency else _normal
        combined, expected = call(comm, x.astype(ml_dtypes.bfloat16), topk_idx, num_experts, config, max(tokens, 1))
        return bool((combined == x * expected[:, None]).all())

    def check(results: list[bool], **_: int) -> None:
        wrong = [rank for rank, is_right in enumerate(results) if not is_right]
        assert not wrong, f"combined_x is wrong on ranks {wrong}"

    return num_ranks, main, check


def _normal(comm: Any, x: Any, topk_idx: Any, num_experts: int, config: Any, tokens: int) -> tuple[Any, Any]:
    """Combined rows, and how many ranks each token went to."""
    nvl = config.get_nvl_buffer_size_hint(2 * x.shape[1], comm.size)
    rdma = config.get_rdma_buffer_size_hint(2 * x.shape[1], comm.size)
    buffer = nbep.Buffer(comm, nvl, rdma)
    routes = routes_of(buffer.get_dispatch_layout(topk_idx, num_experts))
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=np.ones(topk_idx.shape, np.float32),
        **routes,
        config=config,
    )
    assert handle is not None  # only a cached dispatch returns none
    combined, _, _ = buffer.combine(recv_x, handle, config=config)
    buffer.destroy()
    return combined, routes["is_token_in_rank"].sum(axis=1)


def _low_latency(comm: Any, x: Any, topk_idx: Any, num_experts: int, config: Any, tokens: int) -> tuple[Any, Any]:
    """Combined rows, and how many experts each token went to."""
    size = nbep.Buffer.get_low_latency_rdma_size_hint(tokens, x.shape[1], comm.size, num_experts)
    buffer = nbep.Buffer(comm, 0, size, low_latency_mode=True, num_qps_per_rank=num_experts // comm.size)
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, num_experts, use_fp8=False)
    weights = np.ones(topk_idx.shape, np.float32)
    combined, _, _ = buffer.low_latency_combine(recv_x, topk_idx, weights, handle)
    buffer.destroy()
    return combined, (topk_idx >= 0).sum(axis=1)
