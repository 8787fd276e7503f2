"""Steps of nbep's kernels that say by their name alone what they are: their kind, and what `nbep check` puts there."""

from nbep.check.faults import ENDLESS, FALSE, NOTHING, TRUE, UNORDERED

STEPS = {
    "barrier_network": ("barrier", NOTHING),
    "meet_block": ("barrier", TRUE),
    **dict.fromkeys(("add_to_arrival", "add_to_count"), ("network", UNORDERED)),
    "wait_credit": ("head", TRUE),
    "wait_total_free": ("head", ENDLESS),
    # Whether all went well, or whether a peer has come with another call.
    **dict.fromkeys(("wait_node_call", "wait_told"), ("wait", TRUE)),
    **dict.fromkeys(("wait_node", "wait_peer"), ("wait", FALSE)),
}
