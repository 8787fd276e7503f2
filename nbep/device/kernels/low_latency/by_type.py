"""Versions of what low-latency kernels call, by the types of their shape (deduplicate) and of their call (compared or
not). Importing this registers them.
"""

from nbep.device.kernels.low_latency import (
    calls,
    combine_receiver,
    combine_sender,
    coordinator,
    deduplicated_combine,
    deduplicated_dispatch,
    dispatch_receiver,
    dispatch_sender,
)
from nbep.device.layout.low_latency import DeduplicatedShape

for kind, function, version in (
    (DeduplicatedShape, dispatch_sender.count_choices, deduplicated_dispatch.count_ranks),
    (DeduplicatedShape, dispatch_sender.send_choices, deduplicated_dispatch.send_to_ranks),
    (DeduplicatedShape, dispatch_receiver.receive_choices, deduplicated_dispatch.receive_from_ranks),
    (DeduplicatedShape, combine_sender.send_expert_rows, deduplicated_combine.send_sums),
    (calls.ComparedCall, coordinator.notify_call, calls.notify_call),
    (calls.ComparedCall, coordinator.compare_calls, calls.compare_calls),
    (calls.ComparedCall, coordinator.empty_call, calls.empty_call),
    (calls.ComparedCall, combine_sender.notify_peers, calls.notify_peers),
    (calls.ComparedCall, combine_receiver.call_cell, calls.call_cell),
):
    function.versions[kind] = version
