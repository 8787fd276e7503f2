"""A stage of a warp: who waits for its mbarrier has to know that it is there."""

import numpy as np
import pytest

from nbep.device.primitives import ld_shared_s32, smem_base, st_weak_s32, thread_idx
from nbep.device.protocols import staging
from nbep.emulator import EmulatorError, World
from nbep.lab.check import broken

ROW = 512


def read_row(row, out):
    """Every lane waits until the row is in the stage, and takes some of it."""
    lane = thread_idx()
    stage = staging.open_stage(smem_base(), 0, lane)
    staging.begin_fill(row, ROW, stage, lane)
    staging.wait_filled(stage, 0)
    st_weak_s32(out + 4 * lane, ld_shared_s32(stage.data + 16 * lane))


def run(seed):
    world = World(1, seed, memory_model="checked")
    rank = world.ranks[0]
    row, out = np.arange(ROW // 4, dtype=np.int32), np.zeros(32, np.int32)
    addresses = rank.space.map_array(row, "row", False).address, rank.space.map_array(out, "out", True).address
    stream = rank.create_stream("stream")
    stream.launch(read_row, addresses, 1, 32, staging.STAGE_STRIDE)
    stream.synchronize()
    np.testing.assert_array_equal(out, row[::4])


@pytest.mark.parametrize("seed", range(12))
def test_every_lane_may_wait_for_the_mbarrier_of_its_stage(seed):
    run(seed)


@pytest.mark.parametrize("seed", range(12))
def test_lanes_that_have_not_met_the_one_that_made_the_mbarrier_are_found(seed):
    with (
        broken("staging.open_stage: syncwarp"),
        pytest.raises(EmulatorError, match=r"8 bytes that another thread has stored|no mbarrier at"),
    ):
        run(seed)
