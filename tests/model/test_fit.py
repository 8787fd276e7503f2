"""The fit uses at most half of the rows, finds what was planted, and the file has what it finds."""

from dataclasses import replace

import pytest

from research.model import fit as module
from research.model.fit import PARAMETERS, fit, is_fitted
from research.model.published import Row, rows, table, unit_bytes, us_of, work_of
from research.model.times import Links, loads_of, time_of

H800 = Links.read()


def with_parameters(*values):
    links = H800
    for (_, write), value in zip(PARAMETERS.values(), values, strict=True):
        links = write(links, value)
    return links


def parameters(links):
    return [read(links) for read, _ in PARAMETERS.values()]


def test_at_most_half_of_the_rows_are_fitted_and_none_of_combine():
    assert sum(map(is_fitted, rows())) <= len(rows()) / 2
    assert not any(is_fitted(row) for row in rows() if row.verb == "combine")


def test_other_rows_do_not_move_the_fit(monkeypatch):
    before = parameters(fit(H800))
    monkeypatch.setattr(module, "us_of", lambda row: us_of(row) * (1 if is_fitted(row) else 3))
    assert parameters(fit(H800)) == before


def test_planted_parameters_are_found(monkeypatch):
    planted = with_parameters(40.0, 90.0, 30.0, 8.0)

    def planted_us(row):
        return time_of(loads_of(work_of(row.mode, row.ranks), row.verb), planted).us

    monkeypatch.setattr(module, "us_of", planted_us)
    assert parameters(fit(H800)) == pytest.approx(parameters(planted), rel=0.02)


def test_the_search_ends_at_the_same_place_wherever_it_begins():
    assert parameters(fit(with_parameters(5.0, 60.0, 20.0, 50.0))) == pytest.approx(parameters(fit(H800)), rel=0.02)


def test_the_file_of_links_has_the_fitted_parameters():
    assert [round(value, 1) for value in parameters(fit(H800))] == parameters(H800)


def test_no_link_is_fitted_beyond_what_the_hardware_can_do(monkeypatch):
    monkeypatch.setattr(module, "us_of", lambda row: us_of(row) / 10)
    found = fit(replace(H800))
    assert found.network.gb_per_s <= found.network.limit_gb_per_s == 50
    assert found.nvlink.gb_per_s <= found.nvlink.limit_gb_per_s == 160


def test_published_rates_and_times_of_low_latency_agree():
    for row in rows():
        if row.us is not None:
            assert unit_bytes(row) / row.us / 1e3 == pytest.approx(row.gb_per_s, rel=0.025)


def test_a_rate_is_in_the_unit_of_deepeps_tests():
    inside = Row("intranode", "combine", 8, 100.0)
    destinations = sum(int(work_of("intranode", 8).routes(rank).sum()) for rank in (0, 7)) / 2
    assert us_of(inside) == pytest.approx(destinations * 2 * 7168 / 100e3)
    between = Row("internode", "dispatch", 16, 100.0)
    nodes = sum(int(work_of("internode", 16).routes(r).reshape(-1, 2, 8).any(axis=2).sum()) for r in (0, 15)) / 2
    assert us_of(between) == pytest.approx(nodes * (7168 + 4 * 56) / 100e3)


def test_the_table_has_twenty_rows():
    assert len(table()["row"]) == 20
