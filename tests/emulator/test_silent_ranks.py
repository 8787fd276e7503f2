"""A rank that makes fewer calls than the others: the report of the hang begins with it."""

import pytest

from nbep.emulator import DeadlockError, World, current_thread


def tell_all(tables, rank, phases):
    """Each rank tells each, itself too, how much comes; then it waits for as much."""
    t = current_thread()
    if phases & 1:
        t.store(tables[t.lane] + 4 * rank, "s32", 1, "release", "sys")
    if phases & 2:
        while t.load(tables[rank] + 4 * t.lane, "s32", "acquire", "sys") == 0:
            t.spin(1 << 62)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_never_sends_stands_first_and_alone(silent):
    """Both wait for what it has not sent. That the other waits for it, and it for the other, would be wrong."""
    world = World(2, 1)
    tables = {}

    def host(rank):
        context = world.ranks[rank]
        tables[rank] = context.space.allocate(8, "table", zero=True, describe=lambda o: f"count[src {o // 4}]")
        world.host_wait(lambda: len(tables) == 2, lambda: "the other's table")
        address = {peer: context.space.open(table.handle).address for peer, table in tables.items() if peer != rank}
        address[rank] = tables[rank].address
        stream = context.create_stream("comm")
        for phases in (2,) if rank == silent else (1, 2):
            stream.launch(tell_all, ([address[0], address[1]], rank, phases), 1, 2)
        stream.synchronize()

    with pytest.raises(DeadlockError) as caught:
        world.run([lambda: host(0), lambda: host(1)])
    lines = str(caught.value).partition("\n\n")[0].splitlines()
    assert lines[0] == f"rank {silent}, kernel `tell_all`, block 0, warp 0, lane {silent}, waits for rank {silent}"
    assert f"count[src {silent}]" in lines[1]
    assert f"Kernel `tell_all` was started once on rank {silent}, 2 times on rank {1 - silent}" in lines
    assert not any("wait for each other" in line or "in a circle" in line for line in lines)
