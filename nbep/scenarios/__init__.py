"""nbep's own scenarios, by the names that users type."""

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
