"""The parameters that every communicating kernel takes: who the peers are, and the bounds of the waits for them."""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import ALIGNMENT_BYTES, POINTER_TABLE_BYTES
from nbep.device.jit import device_function
from nbep.device.protocols.waits import Bounds
from nbep.device.types import I32, Sym

MAX_NVL_PEERS = 8  # ranks of a node, whose memory is mapped
# Behind the bytes of a symmetric memory: the barrier signals, the table of buffers, the table of barrier signals.
BARRIER_SIGNAL_BYTES = ALIGNMENT_BYTES
BUFFER_PTRS = BARRIER_SIGNAL_BYTES
BARRIER_SIGNAL_PTRS = BUFFER_PTRS + POINTER_TABLE_BYTES
PEERS_BYTES = BARRIER_SIGNAL_PTRS + POINTER_TABLE_BYTES
# A barrier's signal counts above these bits; below is the digest of a call.
DIGEST_BITS = 24
ONE = 1 << DIGEST_BITS

__all__ = [
    "BARRIER_SIGNAL_BYTES",
    "BARRIER_SIGNAL_PTRS",
    "BUFFER_PTRS",
    "CLUSTERS",
    "DIGEST_BITS",
    "MAX_NVL_PEERS",
    "ONE",
    "PEERS_BYTES",
    "Bounds",
    "HostPeers",
    "Peers",
    "barrier_signals_of",
    "buffer_of",
]

# Clusters for kernels whose blocks all load the wire: spread evenly over the GPCs they slow each other down less, see
# records/measured.md.
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


def describe_peers(offset: int) -> str:
    """Name the cell at an offset behind the bytes of a symmetric memory, for reports."""
    if offset < BARRIER_SIGNAL_BYTES:
        return f"barrier_signal[rank {offset // 4}]"
    return f"pointer table + {offset - BARRIER_SIGNAL_BYTES}"
