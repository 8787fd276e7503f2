"""`nbep check`: run a scenario under many seeds, strategies and memory models; break kernels by name.

Read in this order: scenario, scenarios/; runs, every; faults, catalogue; then command.
"""

from nbep.lab.check.catalogue import fault_of, faults_of
from nbep.lab.check.command import main
from nbep.lab.check.faults import Fault, broken, edited
from nbep.lab.check.runs import Finding, Run, perform

__all__ = ["Fault", "Finding", "Run", "broken", "edited", "fault_of", "faults_of", "main", "perform"]
