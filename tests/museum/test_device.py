"""The first lines about each exhibit of device code name its cause: the kind, the line, the rank and the cell."""

import re
from pathlib import Path

import pytest
from exhibits import MUSEUM, Exhibit, assert_first_lines_name_the_cause, assert_repaired_form_is_clean
from parts import both_parts

from nbep.lab.check import perform

pytestmark = [pytest.mark.emulator_only("a GPU explores no schedules"), pytest.mark.usefixtures("held_reports")]

EXHIBITS = [
    Exhibit("uccl_940", "deadlock", ("count[3] (byte 12), expects anything but 0 and sees 0", "waits for rank 3",
            "Rank 3 has left kernel", "to `count`"),
        lines=("wait_or_report(ld_acquire_sys_s32, cell", "st_release_sys_s32(buffer_of(peers, peer)")),
    Exhibit("uccl_993", "deadlock",
        ("lane 0, waits\nIt polls", "flag (byte 0)", "It was 1, stored by rank ", "overwritten", "kernel `clean`"),
        lines=("FLAG, 0)", "FLAG, 1)", "FLAG, 1, bounds)"), seed=1),
    Exhibit("sglang_9660", "race", ("the atomic on", "signal (byte 0) is too weak", "relaxed.gpu"),
        lines=("atom_add_relaxed_gpu_s32(memory", "st_weak_s32(memory + TILE")),
    Exhibit("aiter_2890", "race", ("the scope of the load of", ": start[", "too small: gpu", "it takes sys"),
        lines=("while ld_acquire_gpu_s32", "st_release_sys_s32(")),
    Exhibit("deepep_317", "deadlock", ("done[2] (byte 136), expects 6 or more and sees 0, to which nobody",
            "head (byte 64), expects 2 or more and sees 0", "in a circle"),
        lines=("wait_or_report(ld_acquire_sys_s32, head", "wait_expired(deadline):  # else it looks again")),
    Exhibit("deepep_215", "deadlock", ("tail[1] (byte 68)", "gone back from 2,", "warp 1, lane 1", "to 1, by"),
        lines=("TAIL + 4 * lane) < NUM_WARPS", "TAIL + 4 * lane, warp + 1)"), seed=7),
    Exhibit(
        "mori_597", "deadlock",
        ("arrived (byte 0), expects 2 or more and sees 0", "gone back from 2,", "to 0, by"),
        lines=("wait_or_report(ld_acquire_gpu_s32, own + ARRIVED", "ARRIVED, 0)"),
    ),
    Exhibit("mori_494", "deadlock",
        ("open (byte 0), expects 1 or more and sees 0", "gone back from 1, stored by", "to 0, by", "block 0, warp 0"),
        lines=("wait_or_report(ld_acquire_gpu_s32, own + OPEN, is_at_least, 1,", "own + OPEN, 0)")),
    Exhibit("uccl_1052", "deadlock", ("count[0, 0] (byte 64), expects anything but 0",
            "`notify` was started once on rank 1, 2 times on rank 0",
            "signal[1] (byte 4), expects 0 or less and sees 1"),
        lines=("while ld_acquire_sys_s32(own) > 0", "+ count + 4 * peer) == 0"), seed=1),
    Exhibit("nccl_2303", "race", ("row[0]", "is overwritten by this store", "before the other thread has read"),
        lines=("st_weak_s32(there + row", "ld_weak_s32(own + row")),
    Exhibit("mori_80", "race", ("stage", "is overwritten by this store", "before the other thread has read"),
        lines=("st_weak_s32(there + stage", "return ld_weak_s32(own + stage"), seed=2),
    Exhibit("mori_625", "race", ("two threads store to `out`", "nothing at all orders"),
        lines=("st_weak_s32(out + 4 * row",)),
    Exhibit("deepep_621", "race", ("the copy engine", "flag (byte 0)", "no fence.proxy.async.global", "row"),
        lines=("tma_load_1d(stage", "st_weak_s32(there")),
]  # fmt: skip  # fmt: skip


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=str)
def test_the_first_lines_name_the_cause(exhibit):
    assert_first_lines_name_the_cause(exhibit, exhibit.seed)


@pytest.mark.parametrize(
    ("exhibit", "seeds"),
    both_parts(
        [(exhibit, range(2)) for exhibit in EXHIBITS], thorough=[(exhibit, range(2, 12)) for exhibit in EXHIBITS]
    ),
    ids=str,
)
def test_the_repaired_form_is_clean(exhibit, seeds, tmp_path):
    assert_repaired_form_is_clean(exhibit, seeds, tmp_path)


def test_as_many_peers_as_lanes_need_no_second_round():
    exhibit = next(e for e in EXHIBITS if e.name == "mori_597")
    assert [perform(exhibit.run(seed, ranks=2)) for seed in range(4)] == [None] * 4


def test_an_exhibit_is_short():
    for path in MUSEUM.glob("*/program.py"):
        assert len(path.read_text().splitlines()) < 100, path


def test_the_list_has_every_exhibit():
    listed = (MUSEUM / "README.md").read_text()
    for page in MUSEUM.glob("*/README.md"):
        assert f"]({page.parent.name}/README.md)" in listed, f"{page.parent.name} is not in {MUSEUM / 'README.md'}"


def test_each_exhibit_has_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [p.parent.name for p in MUSEUM.glob("*/program.py") if f'"{p.parent.name}"' not in tests] == []


def test_no_exhibit_says_what_is_wrong_before_it_is_asked():
    """Neither its name nor what stands before the hint; the program has one form."""
    for path in MUSEUM.glob("*/program.py"):
        before = (path.parent / "README.md").read_text().partition("<summary>A hint</summary>")[0]
        assert re.fullmatch(r"[a-z]+_\d+", path.parent.name), "a project and a number"
        assert "What was found" not in before
        assert "repair" not in path.read_text()
