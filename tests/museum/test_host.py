"""The first lines about each exhibit of host code name the launches, the streams and the wait that is missing."""

import pytest
from exhibits import Exhibit, assert_first_lines_name_the_cause, assert_repaired_form_is_clean
from parts import both_parts

pytestmark = [pytest.mark.emulator_only("a GPU explores no schedules"), pytest.mark.usefixtures("held_reports")]

EXHIBITS = [
    Exhibit("sglang_31072", "deadlock", ("kernel `copy_result` of rank 1 cannot start",
            "record 2 of an event of stream `forward`", "behind kernel `replay`, launch 2, which waits for it",
            "record 1 is done")),
    Exhibit("deepep_589", "race", ("kernel `fill` on stream `compute` stores `out`",
            "kernel `combine` on stream `comm`", "stream `comm` must wait", "an event, recorded before kernel `fill`")),
    Exhibit("sglang_26376", "race", ("kernel `dispatch` on stream `comm` loads `x`",
            "kernel `prepare`, launch 2 on stream `compute` stores it", "stream `compute` must wait",
            "no event of stream `comm`")),
    Exhibit("torchtitan_3413", "race", ("kernel `masked_fill` on stream `compute` stores `topk_idx`",
            "kernel `get_dispatch_layout` on stream `comm`", "stream `comm` must wait",
            "no event of stream `compute`")),
    Exhibit("vllm_43547", "deadlock", ("waits for rank 2", "collective calls, rank 2 has made 4, the last one combine",
            "ranks 0-1, 3 have made 5, the last one dispatch", "Rank 2 runs no kernel"), lines=("buffer.destroy()",)),
    Exhibit("deepspeed_8213", "wrong result", ("the gradient of x is [1.0, 4.0, 5.0], and must be [3.0, 12.0, 5.0]",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("exhibit", "seed"),
    both_parts(
        [(exhibit, 0) for exhibit in EXHIBITS],
        thorough=[(exhibit, seed) for exhibit in EXHIBITS for seed in range(1, 8)],
    ),
)
def test_the_first_lines_name_the_cause(exhibit, seed):
    """Whichever order the kernels run in."""
    assert_first_lines_name_the_cause(exhibit, seed)


@pytest.mark.parametrize(
    ("exhibit", "seeds"),
    both_parts(
        [(exhibit, range(1)) for exhibit in EXHIBITS if exhibit.name != "vllm_43547"],
        thorough=[(exhibit, range(1, 12) if exhibit.name != "vllm_43547" else range(2)) for exhibit in EXHIBITS],
    ),
)
def test_the_repaired_form_is_clean(exhibit, seeds, tmp_path):
    assert_repaired_form_is_clean(exhibit, seeds, tmp_path)
