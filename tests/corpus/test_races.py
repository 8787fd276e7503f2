"""The report of each broken kernel of the corpus that ends in a data race names its cause."""

import blocks
import flags
import kernels
import networks
import pytest
import rings
from entries import check
from parts import both_parts

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

ENTRIES = [*flags.ENTRIES, *blocks.ENTRIES, *rings.ENTRIES, *kernels.ENTRIES, *networks.ENTRIES]


@pytest.mark.parametrize(
    "broken", both_parts([(e,) for e in ENTRIES[::4]], thorough=[(e,) for i, e in enumerate(ENTRIES) if i % 4])
)
def test_the_report_names_the_cause(broken):
    check(broken)
