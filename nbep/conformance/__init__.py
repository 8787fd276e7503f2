"""Test a layer of expert parallelism without a card: its own sources, on the emulator, against loops.

    from nbep.conformance import conforms

    def layer(rank): ...                # makes the client's calls: see Rank and Case
    def test_layer(): conforms(layer, ranks=2, seeds=8)

Needs torch. `vectors` has the same cases as a file, for implementations that are not nbep.
"""

from nbep.conformance.cases import KINDS, Broken, Case
from nbep.conformance.cpu_as_cuda import cpu_as_cuda
from nbep.conformance.run import Failed, Finding, Rank, as_deep_ep, conforms, run

__all__ = ["KINDS", "Broken", "Case", "Failed", "Finding", "Rank", "as_deep_ep", "conforms", "cpu_as_cuda", "run"]
