"""Steps of nbep's kernels that nothing finds when they are broken, and why.

The step is not needed there, or the emulator does not show that it is missing.

tools/fault_table.py writes the reason where others have a finding. A fault that is neither found nor listed here is a
hole: in the emulator, in the scenarios, or in the kernel, which may not need the step.
"""

from __future__ import annotations

PLACE = "the place of a message is that of its peer: it takes calls of two shapes in one half"
TOGETHER = "brings the lanes together again"
END_OF_KERNEL = "no kernel reads the rows before this one has ended, copies included; DeepEP also waits until read"
FLAG = "publishes nothing, and only this GPU's threads look at it: relaxed.gpu would do"
INPUTS = "loads inputs, which no kernel writes while this one runs"
STATISTICS = "only this GPU's threads add to it: relaxed.gpu would do"
OFFERED = "no rank writes to what is offered before all have met behind this kernel: ld_nc would do"
HALF = "no rank writes to a half while a kernel reads it: ld_nc would do"
WORDS = "the release of the status takes the words along, whatever their own scope"
SLOTS_ALONE = "kernels only use slots again behind it; tests/network/test_broken_steps.py reads more"
DIFFERENCE = "comes around the report that calls differ, and from there on nothing is checked"
LOOKS_AGAIN = "the loop around it looks again"
WORST_TOKENS = "for num_worst_tokens, which no scenario passes; tests/intranode/test_options.py does"
ONE_ROUND_BEHIND = "takes a rank that stays behind its node for a round; tests/internode/test_rounds_ahead.py"
ADDS_64_BITS = "no kernel of nbep's adds to 64 bits; tests/network/test_broken_steps.py does"
REFUSED = "only for an entry that is refused, and kernels write none; after a report nothing is checked"
LEFT_BEHIND = "kernels leave nothing that counts behind for the NIC; tests/network/test_nic_end.py does"
NO_READER = "the messages are never read: only the time counts, and a launch would end before they are there"
OLD_PTX = "for versions of PTX that do not say how the engine accesses an mbarrier: records/shared_cells.md"
AFTER_TIMEOUT = "runs only after a wait timed out, when `checked` checks nothing; few schedules show it"
CLAIM = "0 until a wait times out, and `checked` checks nothing after that"
ONE_WARP = "takes a block of two warps, and the emulator gives it one, whose lanes read their own words"
MASKS = "masks are written by kernels that have ended, or after a wait timed out, when `checked` checks nothing"

# By the name of a fault, or of a place: then all faults there have the reason.
REASONS = {
    # Not needed
    "internode.combine_sender.send_row: coherent loads": INPUTS,
    "intranode.combine.send_tokens: coherent loads": INPUTS,
    "intranode.direct_dispatch.send_token: coherent loads": INPUTS,
    "low_latency.combine_receiver.list_rows: coherent loads": INPUTS,
    "low_latency.deduplicated_dispatch.take_places: coherent loads": INPUTS,
    "low_latency.deduplicated_combine.add_part: coherent loads": INPUTS,
    "header.write_header: coherent loads": INPUTS,
    "intranode.combine.receive_tokens: syncwarp": "sums.list_rows has one before rows are read",
    "intranode.dispatch.receive_tokens: wait_tail_past": LOOKS_AGAIN,
    "internode.dispatch_receiver.receive_tokens: wait_tail_past": LOOKS_AGAIN,
    "internode.notify_dispatch.counts_from: place of a round": ONE_ROUND_BEHIND,
    "elastic.combine.push_row: coherent loads": INPUTS,
    "elastic.combine.push_sum: coherent loads": INPUTS,
    **{
        f"elastic.dispatch.{function}: coherent loads": HALF
        for function in ("find_item", "find_rows", "load_choice", "spread_row", "fetch_tokens")
    },
    "elastic.send_dispatch.put_kept: coherent loads": HALF,
    "elastic.meet.meet_ranks: bar_red_and": "another one follows; this one decides only whether calls differ",
    "elastic.meet.meet_ranks: bar_red_and 2": AFTER_TIMEOUT,
    "elastic.meet.meet_ranks: syncthreads": "what the others read was written by the kernels before",
    "elastic.meet.elastic_meet_dispatch: bar_red_and": AFTER_TIMEOUT,
    "elastic.dispatch.fetch_tokens: tma_store_wait_all until read": END_OF_KERNEL,
    "elastic.notify.elastic_notify_dispatch: bar_red_and": AFTER_TIMEOUT,
    "elastic.notify.count_nothing": AFTER_TIMEOUT,
    "elastic.notify.count_tokens: syncthreads": ONE_WARP,
    "elastic.publish.elastic_publish: bar_red_and": AFTER_TIMEOUT,
    "elastic.publish.lay_out_tokens: tma_store_wait_all until read": END_OF_KERNEL,
    **{
        f"{function}: coherent loads": OFFERED
        for function in (
            "elastic.dispatch.find_sources",
            "elastic.fetch_combine.weight_of_choice",
            "fetched_sums.find_origins",
            "intranode.direct_combine.sum_weights_of",
        )
    },
    "intranode.offer_rows.lay_out_rows: tma_store_wait_all until read": END_OF_KERNEL,
    "intranode.offer_rows.lay_out_row: coherent loads": INPUTS,
    "intranode.dispatch.announce_tokens: syncwarp": TOGETHER,
    "intranode.dispatch.copy_own_tokens: tma_store_wait_all until read": END_OF_KERNEL,
    "intranode.dispatch.receive_tokens: tma_store_wait_all until read": END_OF_KERNEL,
    "staged_sums.open_sum_stage: syncwarp": "sums.list_rows has one before the first copy",
    "staging.drain_stage: syncwarp": "a shuffle comes before it, but for messages without a row: none without masks",
    "copies.end_copy: syncwarp": "fill_slot has one before lanes write into the stage again",
    "staging.open_stage: syncwarp": "lanes meet again before they wait; tests/device/test_staging.py does without",
    "grid_barrier.barrier_grid: syncthreads": "thread 0, which arrives, has written itself what other blocks read",
    "internode.cached_notify.come_together: amo_add": "publishes nothing: what peers fill next was loaded before",
    "internode.combine_forwarder.forward_sums: syncwarp": "quiet has one before it, behind the last loads",
    "internode.combine_receiver.receive_sums: syncwarp": "sums.list_rows has one behind what lanes write down",
    "internode.dispatch_forwarder.deliver_tokens: tma_store_wait_all until read": END_OF_KERNEL,
    "internode.dispatch_receiver.receive_tokens: tma_store_wait_all until read": END_OF_KERNEL,
    "internode.notify_dispatch.send_message: syncwarp 2": "quiet has one before it",
    "arrivals.empty_cell: acquire and release of cell": "publishes nothing: relaxed would do",
    "low_latency.calls.empty_word: acquire and release of cell": "publishes nothing: relaxed would do",
    "low_latency.calls.empty_word: scope of cell": "the peer adds behind a credit, which brings the 0 along",
    "arrivals.leave_out": FLAG,
    "arrivals.notify: amo_add": "for networks where an add is a message of its own: they order it behind their queue",
    "low_latency.combine_sender.put_row: syncwarp": "direct: a lane puts what it has written; others need it",
    "low_latency.dispatch_receiver.note_range: scope of cumulative_recv_stats": "one thread of a launch adds to a cell",
    "low_latency.clean_low_latency_buffer: clear_vectors 2": "sums are 0 between launches, but for one that gave up",
    "low_latency.dispatch_sender.count_choices: syncwarp": TOGETHER,
    "low_latency.deduplicated_dispatch.receive_from_ranks: syncwarp": TOGETHER,
    "arrivals.note_wait: scope of cell": "runs only where statistics are asked for, as no scenario does",
    "arrivals.note_wait: scope of stats": STATISTICS,
    "low_latency.deduplicated_dispatch.count_ranks: syncwarp 2": "the one in may_warp_send comes before its loads, too",
    "low_latency.deduplicated_dispatch.notify_counts: syncwarp": TOGETHER,
    "low_latency.deduplicated_combine.announce_parts: syncwarp": TOGETHER,
    "low_latency.deduplicated_combine.send_sums: syncwarp": "the one in may_warp_send comes before its stores, too",
    "network.host.amo_add: scope of cell": "what it loads is this GPU's own, or was emptied before a credit",
    "low_latency.mask_buffer.give_up_rank: empty_rank": (
        "the counts are given up, too; with deduplicate a source without counts has no rows"
    ),
    "low_latency.deduplicated_dispatch.send_to_ranks: wait_send_area": PLACE,
    "low_latency.deduplicated_combine.send_sums: wait_send_area": PLACE,
    "low_latency.coordinator.wait_send_area: syncwarp": TOGETHER,
    "low_latency.coordinator.end_send_phase: wait_coordinator": (
        "no launch receives in the half that the one before has received in: the hook launches one in between"
    ),
    "low_latency.mask_buffer.update_mask_buffer: acquire and release of mask": FLAG,
    "low_latency.mask_buffer.update_mask_buffer: scope of the acquire and release of mask": FLAG,
    "waits.report_fault: acquire and release of claim": FLAG,
    "waits.report_fault: acquire and release of claim 2": FLAG,
    "waits.report_fault: scope of the acquire and release of claim": FLAG,
    "waits.report_fault: scope of the acquire and release of claim 2": FLAG,
    **{f"waits.report_fault: scope of report{number}": WORDS for number in ("", *(f" {i}" for i in range(2, 8)))},
    # Not needed by nbep's own kernels
    "network.ibgda.completion.wait_done: acquire of ibgda-completion": SLOTS_ALONE,
    "network.nic.complete: release of ibgda-completion": SLOTS_ALONE,
    "network.ibgda.completion.syndrome_at: scope of SYNDROME_WORD": REFUSED,
    "network.nic.complete: scope of SYNDROME_WORD": REFUSED,
    "network.nic.complete: scope of qp": REFUSED,
    "network.nic.execute_add: acquire and release of network-amo": ADDS_64_BITS,
    "network.nic.execute_add: scope of the acquire and release of network-amo": ADDS_64_BITS,
    "network.nic.must_stop: fence_acq_rel_sys": LEFT_BEHIND,
    "network.nic.must_stop: scope of the fence": LEFT_BEHIND,
    "network_push: amo_add": NO_READER,
    "network_push: wait_neighbours": NO_READER,
    "network_push.wait_neighbours": NO_READER,
    "network_push.wait_pushed: acquire of network-amo": NO_READER,
    # Runs after the report that calls differ
    "internode.meet_nodes.send_to_ranks: syncthreads": DIFFERENCE,
    "elastic.meet.meet_ranks: syncthreads 2": DIFFERENCE,
    "calls.store_word: scope of cell": "no kernel reads it: the host does, once a kernel has reported",
    "internode.notify_dispatch.count_none": DIFFERENCE,
    "intranode.notify_dispatch.count_nothing": DIFFERENCE,
    # Not run by the scenarios
    "header.clean_choices": WORST_TOKENS,
    "staged_sums.sum_rows_staged: reset of dst": "for a token that goes nowhere; tests/intranode/test_zero_copy.py",
    "sums.sum_rows: coherent loads": "for the ninth row of a sum and later ones: eight ranks and a bias",
    # Not shown by the emulator
    "arrivals.give_up": AFTER_TIMEOUT,
    "arrivals.is_masked: scope of mask": MASKS,
    "arrivals.notify: acquire and release of arrival-sum": "atomics of a thread: the emulator keeps their order",
    "low_latency.mask_buffer.query_mask_buffer: scope of mask": MASKS,
    "network.nic.serve_entry: scope of RECEIVED": "the peer's CPU reads it only when a wait has timed out",
    "staged_sums.open_sum_stage: fence_mbarrier_init": OLD_PTX,
    "staged_sums.open_sum_stage: fence_proxy_async_shared": OLD_PTX,
    "staging.open_stage: fence_mbarrier_init": OLD_PTX,
    "staging.open_stage: fence_proxy_async_shared": OLD_PTX,
    "waits.has_fault: scope of claim": CLAIM,
    "waits.has_timed_out: scope of claim": CLAIM,
}


def reason_for(fault: str) -> str:
    """Why nothing finds a fault; "" if something should."""
    place = fault.partition(":")[0]
    parts = place.split(".")
    for name in (fault, *(".".join(parts[:end]) for end in range(len(parts), 0, -1))):
        if name in REASONS:
            return REASONS[name]
    return ""
