"""For pytest: `pytest_plugins = ["nbep.conformance.plugin"]` in conftest.py.

    @pytest.mark.conforms(ranks=2, without=["idle"])
    def test_layer(rank): ...           # is a layer; see `conforms`, whose options the marker takes

In pyproject.toml, under [tool.pytest.ini_options], for all that a marker leaves open: conforms_ranks, conforms_seeds.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    parser.addini("conforms_ranks", "ranks of each test marked with conforms", default="2")
    parser.addini("conforms_seeds", "schedules of each test marked with conforms", default="8")


def pytest_configure(config: Any) -> None:
    config.addinivalue_line(
        "markers", "conforms(ranks, seeds, without, ...): the test is a layer; see nbep.conformance"
    )


@pytest.fixture
def rank() -> None:
    """What a layer gets is made for each of its runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    marker = pyfuncitem.get_closest_marker("conforms")
    if marker is None:
        return None
    from nbep.conformance.run import Rank, conforms

    names = [name for name in pyfuncitem._fixtureinfo.argnames if name != "rank"]
    given = {name: pyfuncitem.funcargs[name] for name in names}

    def layer(rank: Rank) -> Any:
        return pyfuncitem.obj(rank=rank, **given)

    layer.__name__ = pyfuncitem.name
    options = {name: int(pyfuncitem.config.getini(f"conforms_{name}")) for name in ("ranks", "seeds")}
    conforms(layer, **(options | marker.kwargs))
    return True
