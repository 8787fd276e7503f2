"""The words for the sites of `protocols.waits`, of which the host makes a report: who waits, for which cell, for what.

Kernels of others get numbers for their own words by `own_site`.
"""

import zlib

from nbep.device.protocols.waits import (
    BARRIER,
    CALL_TOLD,
    CALLS_DIFFER,
    COMBINE_COORDINATOR,
    COMBINE_RECEIVER_TAIL,
    COMBINE_SENDER_HEAD,
    DIRECT_ARRIVED,
    DIRECT_LANDED,
    DISPATCH_RECEIVER_OFFSETS,
    DISPATCH_RECEIVER_ROWS,
    DISPATCH_RECEIVER_TAIL,
    DISPATCH_SENDER_HEAD,
    FORWARDER_COORDINATOR,
    FORWARDER_NVL_HEAD,
    FORWARDER_NVL_TAIL,
    FORWARDER_RDMA_HEAD,
    FORWARDER_RDMA_TAIL,
    GRID_BARRIER,
    IBGDA_COMPLETION,
    IBGDA_ERROR,
    IBGDA_TURN,
    INTERNODE_NOTIFY,
    LOW_LATENCY_BARRIER,
    LOW_LATENCY_CALL,
    LOW_LATENCY_CALLS_DIFFER,
    LOW_LATENCY_CHOICE,
    LOW_LATENCY_COMBINE_COUNT,
    LOW_LATENCY_CREDIT,
    LOW_LATENCY_DISPATCH_COUNT,
    LOW_LATENCY_HALF,
    NETWORK_PUSH,
    NODE_CALL,
    NVL_RECEIVER_TAIL,
    NVL_SENDER_HEAD,
    OWN_SITES,
    RDMA_RECEIVER_COORDINATOR,
    RDMA_RECEIVER_TAIL,
    RDMA_SENDER_COORDINATOR,
    RDMA_SENDER_HEAD,
)

SITES = {
    BARRIER: ("notify", "barrier_signal", "the peer's arrival at the barrier"),
    DISPATCH_SENDER_HEAD: ("dispatch sender", "head", "free slots in the peer's ring"),
    DISPATCH_RECEIVER_OFFSETS: ("dispatch receiver", "start/end", "the peer's announcement of its tokens"),
    DISPATCH_RECEIVER_TAIL: ("dispatch receiver", "tail", "the peer's next chunk of tokens"),
    COMBINE_SENDER_HEAD: ("combine sender", "head", "free slots in the peer's ring"),
    COMBINE_RECEIVER_TAIL: ("combine receiver", "tail", "the peer's next chunk of tokens"),
    COMBINE_COORDINATOR: ("combine coordinator", "heads", "the receivers of its own block"),
    GRID_BARRIER: ("grid barrier", "arrivals", "the other blocks of its own launch"),
    DISPATCH_RECEIVER_ROWS: ("dispatch receiver", "recv_x", "rows for all tokens"),
    LOW_LATENCY_CREDIT: ("low-latency sender", "credit", "the peer's half of the buffer to be free again"),
    LOW_LATENCY_DISPATCH_COUNT: ("low-latency dispatch receiver", "count", "the peer's tokens and their number"),
    LOW_LATENCY_COMBINE_COUNT: ("low-latency combine receiver", "count", "the rows of the peer's experts"),
    LOW_LATENCY_HALF: ("low-latency sender", "journal", "calls that take the two halves in turn"),
    LOW_LATENCY_BARRIER: ("clean_low_latency_buffer", "barrier_signal", "the peer's arrival at the barrier"),
    LOW_LATENCY_CHOICE: ("low-latency dispatch sender", "topk_idx", "experts that are there, each once for a token"),
    LOW_LATENCY_CALL: ("low-latency notify", "calls", "the peer's call"),
    LOW_LATENCY_CALLS_DIFFER: ("low-latency notify", "calls", "the same call on all ranks"),
    IBGDA_TURN: ("sender on a queue pair", "READY", "the entries before its own to be written"),
    IBGDA_COMPLETION: ("sender on a queue pair", "completion", "the NIC to be done with an entry"),
    IBGDA_ERROR: ("sender on a queue pair", "completion", "an entry that the NIC has refused"),
    INTERNODE_NOTIFY: ("internode notify", "arrived", "the peer's arrival, and its counts if it sends some"),
    RDMA_SENDER_HEAD: ("internode dispatch RDMA sender", "head", "free slots in the peer's RDMA ring"),
    RDMA_SENDER_COORDINATOR: ("internode dispatch sender coordinator", "done", "the senders of its own block"),
    FORWARDER_RDMA_TAIL: (
        "internode dispatch forwarder",
        "tail",
        "the next tokens in an RDMA ring, the peer's among them",
    ),
    FORWARDER_NVL_HEAD: ("internode dispatch forwarder", "head", "free slots in the peer's NVL ring"),
    FORWARDER_COORDINATOR: ("internode forwarder coordinator", "heads", "the forwarders of its own block"),
    NVL_RECEIVER_TAIL: ("internode dispatch NVL receiver", "tail", "the peer's next chunk of tokens"),
    NVL_SENDER_HEAD: ("internode combine NVL sender", "head", "free slots in the peer's NVL ring"),
    FORWARDER_NVL_TAIL: ("internode combine forwarder", "tail", "the peer's next chunk of rows"),
    FORWARDER_RDMA_HEAD: ("internode combine forwarder", "head", "free slots in the peer's RDMA ring"),
    RDMA_RECEIVER_TAIL: ("internode combine RDMA receiver", "tail", "the peer's next sums"),
    RDMA_RECEIVER_COORDINATOR: ("internode combine coordinator", "heads", "the RDMA receivers of its own block"),
    DIRECT_ARRIVED: ("direct dispatch receiver", "arrived", "all blocks of the peer to have sent their tokens"),
    DIRECT_LANDED: ("direct combine receiver", "landed", "the peer's row of a token"),
    CALL_TOLD: ("notify", "told", "the peer to say what it has called: something else than this rank"),
    CALLS_DIFFER: ("notify", "call", "the same call on all ranks"),
    NODE_CALL: ("internode notify", "call", "the peer to say what it has called: something else than this rank"),
    NETWORK_PUSH: ("network_push", "arrived", "the neighbour's messages, or its word that all have arrived"),
}


def own_site(role: str, cell: str, awaited: str) -> int:
    """A number for a site of kernels that are not nbep's: who waits, for which cell, for what.

    It comes from the words. So it is the same in all processes, and in kernels that were compiled before.

    Raises: ValueError if other words have it
    """
    words = role, cell, awaited
    number = OWN_SITES + zlib.crc32("\n".join(words).encode()) % (1 << 24)
    if SITES.setdefault(number, words) != words:
        raise ValueError(f"site {words}: has the number of {SITES[number]}; change a word")
    return number
