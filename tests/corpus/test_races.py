"""The report of each broken kernel of the corpus that ends in a data race finds its cause."""

import blocks
import flags
import kernels
import networks
import pytest
import rings
from entries import check_race
from parts import both_parts

pytestmark = [pytest.mark.emulator_only("the kernels are broken in Python"), pytest.mark.usefixtures("held_reports")]

ENTRIES = [*flags.ENTRIES, *blocks.ENTRIES, *rings.ENTRIES, *kernels.ENTRIES, *networks.ENTRIES]


@pytest.mark.parametrize(
    "race", both_parts([(e,) for e in ENTRIES[::18]], thorough=[(e,) for i, e in enumerate(ENTRIES) if i % 18])
)
def test_the_report_finds_the_cause(race):
    check_race(race)
