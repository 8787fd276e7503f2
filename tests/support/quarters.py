"""`pytest --quarter K`, K from 0 to 3: a quarter of the tests that are selected, for a gate that has no time for all.

The tests of a function are dealt out in turn, because they take about as long as each other. What a fixture makes for a
whole file is made once: the tests that use such a fixture are all in one quarter. If it has parameters, it makes
something for each of them, and these are dealt out in turn. Names alone decide, not `-m` or `-k`.
"""

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
    met: dict[str, list[str]] = {}
    for item in items:
        shared = shared_fixtures(item)
        unit = item.nodeid.partition("::" if shared else "[")[0]
        params = item.callspec.params if hasattr(item, "callspec") else {}
        one = repr([params[name] for name in shared if name in params]) if shared else item.nodeid
        of_unit = met.setdefault(unit, [])
        if one not in of_unit:
            of_unit.append(one)
        quarter = (crc32(unit.encode()) + of_unit.index(one)) % 4
        (kept if quarter == wanted else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def shared_fixtures(item: pytest.Item) -> list[str]:
    """The fixtures of its file or folder that make something for more than one test."""
    fixtures = item._fixtureinfo.name2fixturedefs.items()
    return [name for name, each in fixtures if each[-1].scope != "function" and each[-1].baseid]
