"""nbep's own scenarios, by the names that users type."""

from nbep.check.scenario import Scenario
from nbep.check.scenarios import internode, intranode, low_latency, network

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for module in (intranode, low_latency, internode, network) for scenario in module.SCENARIOS
}
