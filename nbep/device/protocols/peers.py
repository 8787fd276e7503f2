"""The parameters that every communicating kernel takes: who the peers are, and how long to wait for them."""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.types import I32, I64, Sym

# Clusters for kernels whose blocks all load the wire: spread evenly over the GPCs they slow each other down less, see
# docs/measured.md.
CLUSTERS = (4, 5, 6, 2)


class Peers(NamedTuple):
    """The ranks of a node as a kernel sees them. Both tables hold num_ranks addresses and never change after `sync`."""

    buffer_ptrs: Sym
    barrier_signal_ptrs: Sym
    rank: I32
    num_ranks: I32


class HostPeers(Peers):
    """The same for ranks whose buffers lie in the host's memory, where only loads and stores are promised."""

    __slots__ = ()


class Bounds(NamedTuple):
    """How a launch bounds its waits.

    timeout_ns  longest time that one wait may take
    claim       s32 cell in the rank's own memory, 0 until the first wait fails
    report      the words of `protocols.waits.FaultReport`, in memory that the host can read while kernels run
    """

    timeout_ns: I64
    claim: Sym
    report: Sym


@device_function
def buffer_of(peers, rank):
    """Address at which this rank sees the symmetric buffer of another (or of itself)."""
    return ptx.ld_nc_s64(peers.buffer_ptrs + 8 * rank)


@device_function
def barrier_signals_of(peers, rank):
    """Address at which this rank sees the barrier signals of another (or of itself)."""
    return ptx.ld_nc_s64(peers.barrier_signal_ptrs + 8 * rank)
