"""nbep's kernels for what the lower half does with them: compile, load, check, name cells. See device.library."""

from collections.abc import Callable

from nbep.device.jit import over, spec_of
from nbep.device.kernels.internode.combine import internode_combine, kernel_for
from nbep.device.kernels.low_latency.arguments import Call
from nbep.device.kernels.low_latency.calls import ComparedCall
from nbep.device.kernels.shared_cells import shared_cells
from nbep.device.layout.internode import MAX_RDMA_RANKS
from nbep.device.layout.low_latency import DeduplicatedShape, LowLatencyShape
from nbep.device.library import KernelLibrary


def variants(kernel: Callable) -> tuple[Callable, ...]:
    """A kernel and, of those of low-latency calls, the one with deduplicate; of combine, the one for many nodes."""
    if kernel is internode_combine:
        return kernel, kernel_for(MAX_RDMA_RANKS)
    if spec_of(kernel).hints.get("shape") is not LowLatencyShape:
        return (kernel,)
    return kernel, over(kernel, DeduplicatedShape, "shape")


def comparing_calls(kernel: Callable) -> tuple[Callable, ...]:
    """The variant that compares calls, if there is one."""
    return (over(kernel, ComparedCall, "call"),) if spec_of(kernel).hints.get("call") is Call else ()


LIBRARY = KernelLibrary(
    "nbep.device.kernels",
    ("kernels.parts.", "kernels.", "protocols."),
    variants,
    comparing_calls,
    {
        "notify_dispatch": "peers",
        "cached_notify_dispatch": "peers",
        "cached_notify_combine": "peers",
        "low_latency_dispatch": "network",
        "low_latency_combine": "network",
        "clean_low_latency_buffer": "network",
    },
    shared_cells,
)
