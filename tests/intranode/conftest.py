"""Tests of the mode inside a node run both ways, through rings and without, if their module asks for `both_ways`."""

import intranode
import pytest


def pytest_generate_tests(metafunc):
    if "both_ways" in metafunc.fixturenames:
        marked = {mark.name for mark in metafunc.definition.iter_markers()}
        ways: list = ["rings"]
        if "about_rings" not in marked:
            marks = [pytest.mark.thorough] if "costs_time" in marked else []
            ways.append(pytest.param("zero_copy", marks=marks))
        metafunc.parametrize("both_ways", ways, indirect=True)


@pytest.fixture
def both_ways(request, monkeypatch):
    """What `Options` of the test say if they do not say which way."""
    monkeypatch.setitem(intranode.DEFAULTS, "zero_copy", request.param == "zero_copy")
