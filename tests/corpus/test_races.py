"""The report of each broken kernel of the corpus that ends in a data race names its cause."""

import blocks
import flags
import kernels
import pytest
import rings
from entries import check

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

ENTRIES = [*flags.ENTRIES, *blocks.ENTRIES, *rings.ENTRIES, *kernels.ENTRIES]


@pytest.mark.parametrize("broken", ENTRIES, ids=str)
def test_the_report_names_the_cause(broken):
    check(broken)
