"""What the transports of nbep.device.network need from the host."""

from __future__ import annotations

from nbep.host.comm import Communicator
from nbep.host.network.direct import DirectTransport
from nbep.host.network.ibgda import IbgdaTransport
from nbep.host.network.transport import NetworkOptions, Transport
from nbep.host.runtime.base import Runtime


def create_transport(runtime: Runtime, comm: Communicator, options: NetworkOptions) -> Transport:
    """This rank's end of a new network."""
    if options.transport == "ibgda":
        return IbgdaTransport(runtime, comm.rank, comm.size, options)
    return DirectTransport(runtime, comm.rank, options)
