"""What the transports of nbep.device.network need from the host."""

from __future__ import annotations

from nbep.host.arguments import refuse
from nbep.host.ranks.comm import Communicator
from nbep.host.target.base import Runtime
from nbep.host.target.memory import HandleType
from nbep.host.transport.base import DirectTransport, HostTransport, NetworkOptions, Transport
from nbep.host.transport.ibgda import IbgdaTransport


def check_target(runtime: Runtime, options: NetworkOptions) -> None:
    """Raises: ValueError if the transport needs GPUs, and this is the emulator"""
    if runtime.target == "emulator" and options.transport == "nvshmem":
        refuse("transport", "nvshmem on the emulator", "direct or ibgda there: NVSHMEM needs GPUs")


def mapped_transport(runtime: Runtime, rank: int, options: NetworkOptions, handle_type: HandleType) -> DirectTransport:
    """This rank's view of the peers of its node."""
    return (HostTransport if handle_type == "host" else DirectTransport)(runtime, rank, options)


def create_transport(
    runtime: Runtime, comm: Communicator, options: NetworkOptions, num_bytes: int, handle_type: HandleType
) -> Transport:
    """This rank's end of a new network, for a buffer of num_bytes. Collective.

    Raises: RuntimeError on all ranks if NVSHMEM is wanted and does not start on one
    """
    if options.transport == "direct":
        return mapped_transport(runtime, comm.rank, options, handle_type)
    if options.transport == "ibgda":
        return IbgdaTransport(runtime, comm.rank, comm.size, options, options.nic)
    # Imported here: it is an extra, and takes a GPU.
    from nbep.host.transport.nvshmem import NvshmemTransport

    return NvshmemTransport(runtime, comm, num_bytes, options.num_nvl_peers, options.num_qps, options.is_mapped)
