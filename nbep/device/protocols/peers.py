"""The parameters that every communicating kernel takes: who the peers are, and the bounds of the waits for them."""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.waits import Bounds
from nbep.device.types import I32, Sym

MAX_NVL_PEERS = 8  # ranks of a node, whose memory is mapped
# A barrier's signal counts above these bits; below is the digest of a call.
DIGEST_BITS = 24
ONE = 1 << DIGEST_BITS

__all__ = [
    "CLUSTERS",
    "DIGEST_BITS",
    "MAX_NVL_PEERS",
    "ONE",
    "Bounds",
    "HostPeers",
    "Peers",
    "barrier_signals_of",
    "buffer_of",
]

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


@device_function
def buffer_of(peers, rank):
    """Address at which this rank sees the symmetric buffer of another (or of itself)."""
    return ptx.ld_nc_s64(peers.buffer_ptrs + 8 * rank)


@device_function
def barrier_signals_of(peers, rank):
    """Address at which this rank sees the barrier signals of another (or of itself)."""
    return ptx.ld_nc_s64(peers.barrier_signal_ptrs + 8 * rank)
