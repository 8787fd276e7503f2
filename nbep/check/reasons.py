"""Faults that nothing finds, and why: the step is not needed there, or the emulator does not show that it is missing.

`nbep check --faults` prints the reason where others have a finding. A fault that is neither found nor listed here is a
hole: in the emulator, in the scenarios, or in the kernel, which may not need the step.
"""

from __future__ import annotations

TOGETHER = "brings the lanes together again"
AFTER_TIMEOUT = "runs only after a wait that was over time"
MASKS = "no scenario masks ranks; tests/low_latency/test_shrink.py does"
OLD_PTX = "for versions of PTX that do not say how the engine accesses an mbarrier: docs/memory_orders.md"
WITHOUT_RINGS = "no scenario goes without rings; tests/intranode/test_broken_direct.py does"
SLOTS_ALONE = "kernels only use slots again behind it; tests/network/test_broken_steps.py reads more"
SAME_CALLS = "in all scenarios all ranks call the same; tests/host/test_calls_alike.py differs"
BENCHMARK = "no scenario runs the benchmark's kernel; tests/network/test_push.py does"

# By the name of a fault, or of a place: then all faults there have the reason.
REASONS = {
    # Not needed
    "intranode.combine.receive_tokens: syncwarp": "sums.list_rows has one before rows are read",
    "intranode.dispatch.announce_tokens: syncwarp": TOGETHER,
    "staging.end_copy: syncwarp": "fill_slot has one before lanes write into the stage again",
    "internode.combine_rdma_receiver.receive_sums: syncwarp": "sums.list_rows has one behind what lanes write down",
    "internode.cached_notify.come_together: amo_add": "publishes nothing: what peers fill next was loaded before",
    "internode.dispatch_rdma_sender.send_token: syncwarp 2": "a place is filled again by the lane that has read it",
    "internode.notify_dispatch.send_message: syncwarp 2": "quiet has one before it",
    "arrivals.tell: amo_add": "for networks where an add is a message of its own: they order it behind their queue",
    "low_latency.combine_sender.put_row: syncwarp": "direct: a lane puts what it has written; others need it",
    "low_latency.send_once.count_ranks: syncwarp 2": "the one in may_warp_send comes before its loads, too",
    "low_latency.send_once.tell_counts: syncwarp": TOGETHER,
    "low_latency.dispatch_sender.count_choices: syncwarp": TOGETHER,
    "low_latency.expand.expand_messages: syncwarp": TOGETHER,
    "low_latency.sum_first.announce_parts: syncwarp": TOGETHER,
    "low_latency.sum_first.send_sums: syncwarp": "the vote in the next part comes before its stores, too",
    "network.ibgda.transport.post_few: syncwarp": "comes before stores over what the NIC has read: so says the vote",
    "network.ibgda.completion.wait_done": SLOTS_ALONE,
    "staging.drain_stage: syncwarp": "a shuffle comes before it, but for messages without a row: none without masks",
    "staging.open_stage: syncwarp": "lanes meet again before they wait; tests/device/test_staging.py does without",
    # Not shown by the emulator
    "arrivals.tell: acquire and release of arrival-sum": "atomics of a thread: the emulator keeps their order",
    "staging.open_stage: fence_mbarrier_init": OLD_PTX,
    "staging.open_stage: fence_proxy_async_shared": OLD_PTX,
    # Not run by the scenarios
    "waits.report_fault": AFTER_TIMEOUT,
    "arrivals.give_up": AFTER_TIMEOUT,
    "arrivals.mask_rank": AFTER_TIMEOUT,
    "arrivals.empty_cell": MASKS,
    "low_latency.update_mask_buffer": MASKS,
    "calls.tell_call": SAME_CALLS,
    "waits.wait_told": SAME_CALLS,
    "calls.meet_with: syncthreads": SAME_CALLS,
    "calls.meet_with: syncthreads 2": SAME_CALLS,
    "internode.meet_nodes: syncthreads": SAME_CALLS,
    "internode.meet_nodes: syncthreads 2": SAME_CALLS,
    "internode.cached_notify.come_together: syncthreads": SAME_CALLS,
    "intranode.direct_dispatch": WITHOUT_RINGS,
    "intranode.direct_combine": WITHOUT_RINGS,
    "staged_sums": WITHOUT_RINGS,
    "waits.wait_blocks_arrived": WITHOUT_RINGS,
    "waits.wait_landed": WITHOUT_RINGS,
    "network_push": BENCHMARK,
    "waits.wait_pushed": BENCHMARK,
}


def reason_for(fault: str) -> str:
    """Why nothing finds a fault; "" if something should."""
    place = fault.partition(":")[0]
    parts = place.split(".")
    for name in (fault, *(".".join(parts[:end]) for end in range(len(parts), 0, -1))):
        if name in REASONS:
            return REASONS[name]
    return ""
