"""nbep's own scenarios, by the names that users type."""

from nbep.check.scenario import Scenario
from nbep.check.scenarios import intranode

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for module in (intranode,) for scenario in module.SCENARIOS}
