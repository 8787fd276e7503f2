"""The first paragraph about a kernel that hangs names the cause: the wait, the cell, what is expected and seen."""

import hangs_groups
import hangs_users
import pytest
from entries import Broken, check

pytestmark = pytest.mark.emulator_only("a GPU reports no deadlock")

ENTRIES = [*hangs_users.ENTRIES, *hangs_groups.ENTRIES]


@pytest.mark.parametrize("broken", ENTRIES, ids=str)
def test_the_report_names_why_it_hangs(broken: Broken) -> None:
    check(broken)
