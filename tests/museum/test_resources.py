"""The first lines about each exhibit of resources name what is missing, who holds it, or who took it too early."""

import pytest
from exhibits import Exhibit, assert_first_lines_name_the_cause, assert_repaired_form_is_clean
from parts import both_parts

from nbep.lab.check import perform

pytestmark = [pytest.mark.emulator_only("a GPU explores no schedules"), pytest.mark.usefixtures("held_reports")]

EXHIBITS = [
    Exhibit("deepep_496", "deadlock", ("block 1 of `all_gather` cannot start: all 4 SMs of rank",
            "waits for `dispatch` of rank", "the 3 blocks of `dispatch` cannot start together: 2 of the 4 SMs of rank",
            "waits for `all_gather` of rank")),
    Exhibit("mooncake_3637", "deadlock",
        ("kernel `work`", "head (byte 16)", "in a circle", "`submit`", "The last store", "the waiting thread's own"),
        "starved", 2),
    Exhibit("deepspeed_7965", "race", ("kernel `copy` on stream `copies` loads `x`",
            "kernel `fill`, launch 2 on stream `compute` stores it", "stream `compute` must wait",
            "no event of stream `copies`")),
    Exhibit("deepep_739", "memory check", ("load of 4 bytes", "never written")),
    Exhibit("megatron_5715", "race", ("the CPU", "`staging`", "queued kernel `copy`", "on stream `copies`"),
        lines=("staging.write(0, ", "ld_na_s32(staging")),
]  # fmt: skip  # fmt: skip


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=str)
def test_the_first_lines_name_the_cause(exhibit):
    assert_first_lines_name_the_cause(exhibit, exhibit.seed)


@pytest.mark.parametrize(
    ("exhibit", "seeds"),
    both_parts(
        [(exhibit, range(2)) for exhibit in EXHIBITS], thorough=[(exhibit, range(2, 12)) for exhibit in EXHIBITS]
    ),
)
def test_the_repaired_form_is_clean(exhibit, seeds, tmp_path):
    assert_repaired_form_is_clean(exhibit, seeds, tmp_path)


def test_with_more_sms_both_kernels_fit():
    exhibit = EXHIBITS[0]
    assert [perform(exhibit.run(seed, sms=5)) for seed in range(4)] == [None] * 4
