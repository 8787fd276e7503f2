"""nbep's own scenarios, by the names that users type; and the steps of its kernels that their names alone tell."""

from nbep.check.faults import ENDLESS, FALSE, NOTHING, TRUE, UNORDERED
from nbep.check.scenario import Scenario
from nbep.scenarios import differ, elastic, internode, intranode, low_latency, network

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenarios in (
        (*intranode.SCENARIOS, differ.INTRANODE),
        elastic.SCENARIOS,
        (*low_latency.SCENARIOS, differ.LOW_LATENCY),
        (*internode.SCENARIOS, differ.INTERNODE),
        network.SCENARIOS,
    )
    for scenario in scenarios
}

# Steps that say by their name alone what they are: their kind, and what `nbep check` puts there.
STEPS = {
    "barrier_network": ("barrier", NOTHING),
    "meet_block": ("barrier", TRUE),
    "meet_ranks": ("barrier", TRUE),
    **dict.fromkeys(("add_to_arrival", "add_to_count"), ("network", UNORDERED)),
    "wait_credit": ("head", TRUE),
    "wait_total_free": ("head", ENDLESS),
    # Whether all went well, or whether a peer has come with another call.
    **dict.fromkeys(("wait_node", "wait_peer"), ("wait", FALSE)),
}
