"""The table of records/planted.md is what `--all` finds in small programs."""

from pathlib import Path

import pytest
from fault_table import lines_in
from parts import both_parts
from planted_table import HEAD, SMALL, look, rows_in, text_of, words_of

pytestmark = pytest.mark.emulator_only("every schedule is one of the emulator")

RECORDS = Path(__file__).resolve().parents[2] / "records"
PAGE = (RECORDS / "planted.md").read_text()
ROWS = rows_in(PAGE)
LINES = {line.fault: line for line in lines_in((RECORDS / "faults.md").read_text())}
DISPATCH = [row for row in ROWS if row.run == SMALL[1]]
LATE = [row for row in ROWS if row.schedule > 1]
BY_FAULT = {row.fault: row for row in ROWS}
SHORT = [row.fault for row in (ROWS[0], *DISPATCH[:1])]
THOROUGH = [row.fault for row in (*LATE[:3], *ROWS[5::12]) if row.fault not in SHORT]
LONG = [fault for fault in BY_FAULT if fault not in SHORT and fault not in THOROUGH]


def test_the_table_is_read_as_it_is_written():
    table = PAGE[PAGE.index(HEAD) :]
    assert table == text_of(ROWS)
    assert len(BY_FAULT) == len(ROWS)


def test_the_seeds_are_those_of_the_table_of_faults():
    assert [row.fault for row in ROWS if LINES[row.fault].num_seeds != row.num_seeds] == []


def test_the_numbers_of_the_page_are_those_of_its_table():
    assert f"{len(ROWS)} steps" in PAGE
    assert f"{len(ROWS) - len(LATE)} of them in the first schedule" in PAGE
    assert all(f"`{words_of(run)}`" in PAGE for run in {row.run for row in ROWS})


@pytest.mark.parametrize("fault", both_parts(SHORT, dict.fromkeys(THOROUGH), LONG))
def test_the_schedule_of_a_line_finds_its_fault(fault):
    assert look((LINES[fault], (BY_FAULT[fault].run,))) == BY_FAULT[fault]
