"""Inputs for the tests of the host layer, and a count of what a call starts and allocates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from arrays import to_target
from target import TARGET, spawn

import nbep
from nbep.host.target.base import current_runtime
from nbep.host.target.emulator import EmulatorRuntime

NUM_RANKS = 2
NUM_EXPERTS = 4
HIDDEN = 128


def make_inputs(buffer: nbep.Buffer, num_tokens: int = 3) -> dict:
    """The arguments of one correct dispatch."""
    rng = np.random.default_rng(buffer.rank)
    topk_idx = to_target(np.stack([rng.permutation(NUM_EXPERTS)[:2] for _ in range(num_tokens)]))
    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
        topk_idx, NUM_EXPERTS
    )
    return {
        "x": to_target(rng.standard_normal((num_tokens, HIDDEN)).astype(ml_dtypes.bfloat16)),
        "topk_idx": topk_idx,
        "topk_weights": to_target(rng.random((num_tokens, 2), np.float32)),
        "num_tokens_per_rank": num_tokens_per_rank,
        "is_token_in_rank": is_token_in_rank,
        "num_tokens_per_expert": num_tokens_per_expert,
        "config": nbep.Config(2, 2, 4),
    }


@pytest.fixture
def inputs() -> Callable[..., dict]:
    return make_inputs


@pytest.fixture
def on_two_ranks() -> Callable[..., list]:
    """Run fn(buffer) on two ranks, each with a buffer that is destroyed afterwards if it still lives."""

    def run(fn: Callable[[nbep.Buffer], object], num_nvl_bytes: int = 1 << 17, **spawn_options) -> list:
        def main(comm):
            buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes)
            result = fn(buffer)
            buffer.destroy()
            return result

        return spawn(main, NUM_RANKS, **spawn_options)

    return run


def runtime_class() -> type:
    """What runs the target's ranks."""
    if TARGET == "emulator":
        return EmulatorRuntime
    from nbep.host.target.cuda.runtime import CudaRuntime

    return CudaRuntime


@pytest.fixture
def starts_nothing(monkeypatch):
    """A context in which a launch, an allocation or a new array of this rank, or of any outside of one, fails."""

    @contextmanager
    def guard() -> Iterator[None]:
        with monkeypatch.context() as patch:
            runtime = current_runtime() or runtime_class()
            for name in ("launch", "start", "allocate", "allocate_symmetric", "allocate_host_visible", "empty"):
                refuse = partial(pytest.fail, f"{name} was called")
                if hasattr(runtime, name):  # only the emulator starts in a step of its own what is prepared
                    patch.setattr(runtime, name, lambda *_, refuse=refuse: refuse())
            yield

    return guard
