"""Replay a CUDA graph of a layer with new inputs, one process per GPU."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from mpi4py import MPI

NUM_TOKENS = (23, 9, 0, 31, 5, 17, 40, 2)  # of the ranks
NUM_REPLAYS = 6  # of each kind: in turn, and in a row


class Layer(Protocol):
    """One rank's inputs, in memory that stays, and the calls on them."""

    def forward(self) -> Any: ...

    def load(self, arrays: tuple) -> None: ...


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call of the function, and what the call returned: arrays that each replay fills."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls count: MPI may have threads that call CUDA too.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        arrays = function()
    return graph, arrays


def replay(
    comm: MPI.Intracomm, layer: Layer, inputs: Sequence[tuple], compare: Callable[[int, Any, str], None]
) -> None:
    """Compare a layer's results before, in and after replays of its graph.

    inputs: what each replay loads; the layer has the first one's already
    compare: is given the number of the inputs, what `Layer.forward` returned, and when that was
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            eager = layer.forward()
        compare(0, eager, "before the capture")
    torch.cuda.synchronize()
    comm.barrier()
    graph, outcome = capture(layer.forward)
    comm.barrier()
    for number, arrays in enumerate(inputs):
        layer.load(arrays)
        graph.replay()
        compare(number, outcome, "replay")
    for arrays in reversed(inputs):  # the host waits for none of these but the last
        layer.load(arrays)
        graph.replay()
    compare(0, outcome, "replays in a row")
    compare(0, layer.forward(), "after the replays")
    torch.cuda.synchronize()
    comm.barrier()
