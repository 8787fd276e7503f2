"""The first lines about each exhibit of device code name its cause: the kind, the line, the rank and the cell."""

import pytest
from exhibits import MUSEUM, Exhibit, assert_first_lines_name_the_cause, assert_repaired_form_is_clean
from parts import both_parts

from nbep.check import perform

pytestmark = pytest.mark.emulator_only("a GPU explores no schedules")

EXHIBITS = [
    Exhibit(
        "rank_without_tokens", "deadlock",
        ("count[3] (byte 12), expects anything but 0 and sees 0", "waits for rank 3",
         "Rank 3 has left kernel", "to `count`"),
        lines=("wait_or_report(ld_acquire_sys_s32, cell", "st_release_sys_s32(buffer_of(peers, peer)"),
    ),
    Exhibit(
        "cleaned_flag", "deadlock",
        ("lane 0, waits\nIt polls", "flag (byte 0)",
         "It was 1, stored by rank ", "overwritten", "kernel `clean`"),
        lines=("FLAG, 0)", "FLAG, 1)", "FLAG) == 0"),
    ),
    Exhibit(
        "counted_by_atomics", "race", ("the atomic on", "signal (byte 0) is too weak", "relaxed.gpu"),
        lines=("atom_add_relaxed_gpu_s32(memory", "st_weak_s32(memory + TILE"),
    ),
    Exhibit(
        "scope_of_one_gpu", "race", ("the scope of the load of", ": start[", "too small: gpu", "it takes sys"),
        lines=("while ld_acquire_gpu_s32", "st_release_sys_s32("),
    ),
    Exhibit(
        "short_chunk", "deadlock",
        ("done[2] (byte 136), expects 6 or more and sees 0, to which nobody",
         "head (byte 64), expects 2 or more and sees 0", "in a circle"),
        lines=("wait_or_report(ld_acquire_sys_s32, head", "wait_expired(deadline):  # else it looks again"),
    ),
    Exhibit(
        "lock_before_tail", "deadlock", ("tail[1] (byte 68)", "gone back from 2,", "warp 1, lane 1", "to 1, by"),
        lines=("TAIL + 4 * lane) < NUM_WARPS", "TAIL + 4 * lane, warp + 1)"),
        seed=7,
    ),
    Exhibit(
        "barrier_in_the_loop", "deadlock",
        ("arrived (byte 0), expects 2 or more and sees 0", "gone back from 2,", "to 0, by"),
        lines=("wait_or_report(ld_acquire_gpu_s32, own + ARRIVED", "ARRIVED, 0)"),
    ),
    Exhibit(
        "lowered_too_soon", "deadlock",
        ("open (byte 0), expects 1 or more and sees 0", "gone back from 1, stored by", "to 0, by", "block 0, warp 0"),
        lines=("wait_or_report(ld_acquire_gpu_s32, own + OPEN, is_at_least, 1,", "own + OPEN, 0)"),
    ),
    Exhibit(
        "polled_then_copied", "race", ("the copy engine", "flag (byte 0)", "no fence.proxy.async.global", "row (byte"),
        lines=("tma_load_1d(stage", "st_weak_s32(there"),
    ),
]  # fmt: skip


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
def test_the_repaired_form_is_clean(exhibit, seeds):
    assert_repaired_form_is_clean(exhibit, seeds)


def test_as_many_peers_as_lanes_need_no_second_round():
    exhibit = next(e for e in EXHIBITS if e.name == "barrier_in_the_loop")
    assert [perform(exhibit.run(seed, ranks=2)) for seed in range(4)] == [None] * 4


def test_an_exhibit_is_short():
    for path in MUSEUM.glob("*/program.py"):
        assert len(path.read_text().splitlines()) < 100, path


def test_the_list_has_every_exhibit():
    listed = (MUSEUM / "README.md").read_text()
    for page in MUSEUM.glob("*/README.md"):
        assert f"]({page.parent.name}/README.md)" in listed, f"{page.parent.name} is not in {MUSEUM / 'README.md'}"
