"""SMs of a rank: blocks that find none wait, and a deadlock by it says who holds them."""

import pytest

import nbep
from nbep.emulator import DeadlockError, World, current_thread

SEEDS = range(6)


def wait_for(address, value):
    t = current_thread()
    while t.load(address, "s32", "acquire", "gpu") < value:
        t.spin(10**12)


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_blocks_are_there_at_once_as_there_are_sms(seed):
    world = World(2, seed, num_sms=3)
    there, most, order = {0: 0, 1: 0}, {0: 0, 1: 0}, []

    def kernel():
        t = current_thread()
        there[t.rank] += 1
        most[t.rank] = max(most[t.rank], there[t.rank])
        order.append((t.rank, t.block_idx))
        t.atomic("add", counts[t.rank], "s32", 1, "acq_rel", "gpu")
        wait_for(counts[t.rank], 3)  # for two others of the first three
        there[t.rank] -= 1

    counts = [world.ranks[rank].space.allocate(16, "count", zero=True).address for rank in range(2)]
    launches = []

    def host(rank):
        launches.append(world.ranks[rank].create_stream("main").launch(kernel, (), 8, 1))

    world.run([lambda: host(0), lambda: host(1)])
    assert most == {0: 3, 1: 3}
    assert sorted(order) == [(rank, block) for rank in range(2) for block in range(8)]
    assert all(launch.done for launch in launches)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_start_together_wait_for_room_for_all(seed):
    world = World(1, seed, num_sms=4)
    begun = []

    def short():
        begun.append("short")
        for _ in range(50):
            current_thread().fence("acq_rel", "gpu")
        begun.append("end")

    def host():
        a, b = (world.ranks[0].create_stream(name) for name in "ab")
        first = a.launch(short, (), 2, 1)
        world.host_wait(lambda: len(begun) >= 2, "the first kernel")
        b.launch(lambda: begun.append("all"), (), 4, 1, name="all", starts_together=True)
        b.synchronize()
        assert first.done

    world.run([host])
    assert begun[-4:] == ["all"] * 4
    assert begun[:-4].count("end") == 2


def test_more_blocks_than_sms_never_start_together():
    stream = World(1, num_sms=4).ranks[0].create_stream("main")
    with pytest.raises(ValueError, match="grid: 5; at most 4 blocks"):
        stream.launch(lambda: None, (), 5, 1, starts_together=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_that_waits_for_one_without_an_sm_is_the_cause(seed):
    world = World(1, seed, num_sms=2)
    flag = world.ranks[0].space.allocate(16, "flag", zero=True)

    def dispatch(flag):
        wait_for(flag, 1)

    def combine(flag):
        current_thread().store(flag, "s32", 1, "release", "gpu")

    def host():
        first, second = (world.ranks[0].create_stream(name) for name in ("first", "second"))
        first.launch(dispatch, (flag.address,), 2, 1)
        world.host_wait(lambda: world.ranks[0].sms.held == 2, "the SMs")
        second.launch(combine, (flag.address,), 4, 1)
        second.synchronize()

    with pytest.raises(DeadlockError) as caught:
        world.run([host])
    first = str(caught.value).splitlines()[0]
    assert first == (
        "blocks 0-3 of `combine` cannot start: all 2 SMs of rank 0 are held by `dispatch`, which waits for it"
    )


def test_a_grid_barrier_with_too_many_blocks_waits_for_its_own():
    world = World(1, num_sms=3)
    count = world.ranks[0].space.allocate(16, "count", zero=True)

    def meet(count):
        current_thread().atomic("add", count, "s32", 1, "acq_rel", "gpu")
        wait_for(count, 4)

    with pytest.raises(DeadlockError) as caught:
        world.run([lambda: world.ranks[0].create_stream("main").launch(meet, (count.address,), 4, 1)])
    first = str(caught.value).splitlines()[0]
    assert "block 3 of `meet` cannot start: all 3 SMs of rank 0 are held by its blocks 0-2, which wait for it" in first


def test_spawn_takes_a_number_of_sms():
    with pytest.raises(ValueError, match="num_sms"):
        nbep.spawn(lambda comm: None, 2, "emulator", num_sms=0)
    assert nbep.spawn(lambda comm: comm.runtime.world.ranks[comm.rank].sms.number, 2, "emulator", num_sms=7) == [7, 7]
