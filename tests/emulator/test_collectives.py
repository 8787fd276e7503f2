"""Warps converge where the code says so, and barriers count threads; anything else is an error that names threads."""

import dis

import numpy as np
import pytest

from nbep.emulator import FULL_MASK, DeadlockError, Divergence, EmulatorError, current_thread
from nbep.emulator.machine.source import is_same_call

SEEDS = range(4)


def per_thread(launch, kernel, block=32, seed=0):
    """What `kernel(thread)` returns in each thread of a block."""
    results = [None] * block

    def record():
        t = current_thread()
        results[t.thread_idx] = kernel(t)

    launch(record, block=block, seed=seed)
    return results


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_and_parts_of_warps_are_independent(launch, seed):
    def halves(t):
        mask = 0xFFFF if t.lane < 16 else 0xFFFF0000
        for _ in range(t.lane // 16 * 3):  # the halves do different numbers of collectives before they meet
            t.syncwarp(mask)
        return t.vote("ballot", mask, t.warp == 1)

    expected = [0] * 32 + [0xFFFF] * 16 + [0xFFFF0000] * 16

    def on_one_line_each(t):
        return halves(t)

    assert per_thread(launch, on_one_line_each, block=64, seed=seed) == expected


def test_lanes_at_different_collectives_are_named(launch):
    def split(t):
        if t.lane < 8:
            return t.vote("any", FULL_MASK, True)
        return t.shfl("idx", FULL_MASK, 0, 0)

    for seed in SEEDS:
        with pytest.raises(Divergence) as caught:
            per_thread(launch, split, seed=seed)
        text = str(caught.value)
        assert "shfl.idx" in text
        assert "vote.any" in text
        assert text.count("test_collectives.py") >= 2
        assert "mask 0xffffffff" in text


def test_lanes_at_different_lines_are_named(launch):
    def split(t):
        if t.lane == 5:
            t.syncwarp(FULL_MASK)
        else:
            t.syncwarp(FULL_MASK)

    with pytest.raises(Divergence, match=r"lanes? .* at syncwarp, .*\(split\)"):
        per_thread(launch, split, seed=1)


def test_lanes_that_wait_for_each_other_with_different_masks_are_named(launch):
    def split(t):
        t.syncwarp(FULL_MASK if t.lane < 4 else 0xFFFFFFFE)

    for seed in SEEDS:
        with pytest.raises(Divergence, match=r"syncwarp with mask 0xf.*:(.|\n)*lanes? .* at syncwarp"):
            per_thread(launch, split, seed=seed)


def test_some_lanes_may_meet_once_more_while_the_others_wait_for_all(launch):
    def meet(t):
        count = 0
        if t.lane < 4:
            t.syncwarp(0x3 if t.lane < 2 else 0xC)
            count = t.shfl("xor", 0xF, t.lane, 3)
        t.syncwarp(FULL_MASK)
        return count

    for seed in SEEDS:
        assert per_thread(launch, meet, seed=seed) == [3, 2, 1, 0] + 28 * [0]


def test_lane_that_leaves_is_named(launch):
    def lane_nine_returns(t):
        if t.lane == 9:
            return
        t.syncwarp(FULL_MASK)

    for seed in SEEDS:
        with pytest.raises(Divergence, match=r"lanes? 9 .*ha(s|ve) left the kernel"):
            per_thread(launch, lane_nine_returns, seed=seed)


def test_mask_must_name_the_caller_and_exist(launch):
    with pytest.raises(Divergence, match="mask 0x0000fffe does not name the calling lane"):
        per_thread(launch, lambda t: t.syncwarp(0xFFFE), block=1)
    with pytest.raises(Divergence, match="lanes 16-31, which do not exist"):
        per_thread(launch, lambda t: t.syncwarp(FULL_MASK), block=16)


def test_shuffle_from_a_lane_outside_the_mask(launch):
    with pytest.raises(Divergence, match="reads lane 3, which mask 0x00000003 does not name"):
        per_thread(launch, lambda t: t.shfl("idx", 3, 0, 3), block=2)


def test_lane_waiting_elsewhere_is_found_by_the_deadlock_report(launch):
    def kernel(flag):
        t = current_thread()
        if t.lane == 0:
            while t.load(flag, "s32", "acquire", "gpu") == 0:
                t.spin(10**9)
        t.syncwarp(FULL_MASK)

    with pytest.raises(DeadlockError) as caught:
        launch(kernel, np.zeros(1, np.int32), block=32)
    assert "warp 0, lane 1-31" in str(caught.value)
    assert "waits at syncwarp with mask 0xffffffff" in str(caught.value)
    assert "missing: warp 0, lane 0, which are at" in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_can_be_used_again_at_once(launch, seed):
    rounds = np.zeros(64, np.int32)

    def kernel():
        t = current_thread()
        for i in range(5):
            assert all(rounds >= i), rounds
            assert all(rounds <= i + 1), rounds
            rounds[t.thread_idx] += 1
            t.barrier(1, 64)

    launch(kernel, block=64, seed=seed)


def test_missing_thread_at_a_barrier_is_reported_and_does_not_hang(launch):
    def kernel():
        t = current_thread()
        if t.thread_idx not in (70, 71):
            t.barrier(0, 96)

    for seed in SEEDS:
        with pytest.raises(DeadlockError) as caught:
            launch(kernel, block=96, seed=seed)
        assert "barrier 0 of rank 0, kernel `kernel`, block 0 can never fill" in str(caught.value)
        assert "left the kernel" in str(caught.value)
        assert "(kernel)" in caught.value.source


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_that_arrives_twice_at_a_barrier_that_is_not_full_is_named(launch, seed):
    def kernel():
        t = current_thread()
        for _ in range(2):
            if t.warp == 0:
                t.barrier_arrive(1, 64)  # nothing tells it that the others have come
            else:
                t.barrier(1, 64)

    with pytest.raises(Divergence, match=r"^barrier 1: this thread arrives again, but \d+ of 64") as caught:
        launch(kernel, block=64, seed=seed)
    assert "warp 0" in caught.value.thread


def test_barrier_is_reported_when_the_missing_thread_leaves_last(launch):
    arrived = []

    def kernel():
        t = current_thread()
        if t.thread_idx != 70:
            arrived.append(t.thread_idx)
            t.barrier(4, 96)
        while len(arrived) < 95:
            t.fence("acq_rel", "cta")

    with pytest.raises(
        DeadlockError,
        match=r"barrier 4 .*: it takes 96 threads, threads 0-69, 71-95 have arrived, and thread 70 has left",
    ):
        launch(kernel, block=96, seed=2)


def test_thread_waiting_elsewhere_is_reported_with_its_place(launch):
    def kernel(flag):
        t = current_thread()
        if t.warp == 2:
            while t.load(flag, "s32", "acquire", "gpu") == 0:
                t.spin(10**9)
        t.barrier(2, 96)

    with pytest.raises(DeadlockError) as caught:
        launch(kernel, np.zeros(1, np.int32), block=96)
    text = str(caught.value)
    assert "waits at barrier 2: 64 of 96 threads have arrived" in text
    assert "missing: warp 2, which are at" in text
    assert "block 0, warp 0-1\n" in text


def test_disagreeing_counts_and_bad_barriers_are_errors(launch):
    with pytest.raises(Divergence, match=r"this thread says (32|64) threads, threads .* said (64|32)"):
        launch(lambda: current_thread().barrier(1, 32 * (1 + current_thread().warp)), block=64)
    with pytest.raises(EmulatorError, match="there are 16"):
        launch(lambda: current_thread().barrier(16, 32), block=32)
    with pytest.raises(EmulatorError, match="must be a multiple of 32, at most the block's 64"):
        launch(lambda: current_thread().barrier(1, 40), block=64)
    with pytest.raises(EmulatorError, match="at most the block's 64"):
        launch(lambda: current_thread().barrier(1, 96), block=64)


def test_a_call_and_the_caches_behind_it_are_one_site():
    """Where a frame stands differs once calls are traced, by a debugger or by torch.compile, in the midst of a run."""
    code = compile("vote(0); vote(0)", "kernel", "exec")
    instructions = list(dis.get_instructions(code, show_caches=True))
    first, second = [i.offset for i in instructions if i.opname.startswith("CALL")]
    caches = [i.offset for i in instructions if i.opname == "CACHE" and first < i.offset < second]
    assert is_same_call((code, first), (code, caches[0]))
    assert not is_same_call((code, first), (code, second))
    assert not is_same_call((code, first), None)
