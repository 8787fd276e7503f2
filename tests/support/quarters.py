"""`pytest --quarter K`, K from 0 to 3: a quarter of the tests that are selected, for a gate that has no time for all.

The tests of a function are dealt out in turn, because they take about as long as each other. What a fixture makes for a
whole file is made once: the tests that use such a fixture are all in one quarter. Names alone decide, not `-m` or `-k`.
"""

from collections import Counter
from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", type=int, choices=range(4), help="run only this quarter of the selected tests")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out: these count, too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--quarter")
    if wanted is None:
        return
    kept, others = [], []
    met: Counter[str] = Counter()
    for item in items:
        shared = shares_a_fixture(item)
        unit = item.nodeid.partition("::" if shared else "[")[0]
        quarter = (crc32(unit.encode()) + met[unit]) % 4
        met[unit] += not shared
        (kept if quarter == wanted else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def shares_a_fixture(item: pytest.Item) -> bool:
    """Does a test use what a fixture of its file or folder makes for more than one test?"""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(each[-1].scope != "function" and each[-1].baseid for each in fixtures)
