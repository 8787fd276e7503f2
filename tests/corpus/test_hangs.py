"""The first paragraph about a kernel that hangs names the cause: the wait, the cell, what is expected and seen."""

import hangs_groups
import hangs_nbep
import hangs_users
import pytest
from entries import Broken, check
from parts import both_parts

pytestmark = pytest.mark.emulator_only("a GPU reports no deadlock")

ENTRIES = [*hangs_nbep.ENTRIES, *hangs_users.ENTRIES, *hangs_groups.ENTRIES]


@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 3)]), ids=str)
@pytest.mark.parametrize("broken", ENTRIES, ids=str)
def test_the_report_names_why_it_hangs(broken: Broken, seeds: range) -> None:
    check(broken._replace(seeds=seeds, least=len(seeds)))
