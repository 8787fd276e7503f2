"""Hosts of several ranks, each of which knows for itself; and memory that is given up while somebody may use it."""

import numpy as np
import pytest
from every_schedule import all_of, numbers_in, run_all, run_host

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import st_weak_s32, thread_idx
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.emulator import DataRace, UseAfterFree, World, current_thread

ONE = np.ones(1, np.int32)


def two_hosts(strategy, between, before=lambda space, cell: space.write(cell, 0, ONE), seed=0):
    """The host of rank 0 does something to a cell; that of rank 1 does `between`, and starts a kernel that reads it."""
    world = World(2, seed, memory_model="checked", strategy=strategy)
    space, other = world.ranks[0].space, world.ranks[1]
    cell, word = space.allocate(64, "cell", zero=True), space.allocate(64, "word", zero=True)
    seen, come = [], []

    def kernel(address):
        seen.append(int(current_thread().load(address, "s32", "weak", "sys")))

    def first():
        before(space, cell)
        if between == "meeting":
            come.append(0)
            world.host_wait(lambda: len(come) == 2, "the other host")
        elif between == "word":
            space.write(word, 0, ONE)

    def second():
        if between == "meeting":
            come.append(1)
            world.host_wait(lambda: len(come) == 2, "the other host")
        elif between == "word":
            world.host_wait(lambda: space.read(word, np.int32, 0, 1, polls=True)[0] == 1, "a word")
        elif between == "event":
            other.create_stream("another").synchronize()
        stream = other.create_stream("main")
        stream.launch(kernel, (other.space.open(cell).address,), 1, 1)
        stream.synchronize()

    world.run([first, second])
    return seen[0]


@pytest.mark.parametrize("between", ["nothing", "event"])
def test_what_a_host_stores_is_a_race_with_kernels_of_another_that_has_not_waited_for_it(between):
    with pytest.raises(DataRace):
        run_all(lambda strategy: two_hosts(strategy, between))
    for seed in range(8):
        with pytest.raises(DataRace):
            two_hosts("uniform", between, seed=seed)


@pytest.mark.parametrize("between", ["meeting", "word"])
def test_hosts_that_meet_or_tell_each_other_by_a_word_know_what_they_did_before(between):
    assert run_all(lambda strategy: two_hosts(strategy, between))[1] == {1}
    assert {two_hosts("uniform", between, seed=seed) for seed in range(8)} == {1}


def test_the_report_names_both_hosts():
    with pytest.raises(DataRace) as caught:
        two_hosts("uniform", "event", seed=0)
    text = str(caught.value)
    assert "the host of rank 0 stores `cell` of rank 0: byte 0, and kernel `kernel` of rank 1 loads it" in text
    assert "stored by the CPU, for rank 0" in text


def test_two_hosts_may_not_access_the_same_bytes_unless_they_have_met():
    def program(strategy):
        world = World(2, 0, memory_model="checked", strategy=strategy)
        space = world.ranks[0].space
        cell = space.allocate(64, "cell", zero=True)
        world.run(
            [
                lambda: space.write(cell, 0, ONE),
                lambda: space.read(world.ranks[0].space.segments[cell.number], np.int32, 0, 1),
            ]
        )

    with pytest.raises(DataRace) as caught:
        run_all(program)
    assert "the host of rank 0 writes 4 bytes that the host of rank 1 has loaded: nothing orders the two" in str(
        caught.value
    )


def give_up(strategy, how, waits_for, seed=0):
    """The host frees memory, or closes a mapping of it, once one block has signalled; another may still store."""

    def kernel(base, data):
        t = current_thread()
        if t.block_idx == 0:
            for _ in range(300):
                t.fence("acq_rel", "gpu")  # it takes its time
            t.store(data, "s32", 1, "weak", "sys")
        t.store(base + 16 * t.block_idx, "s32", 1, "release", "sys")

    def main(context, cells, world):
        data = context.space.allocate(16, "data")
        mapping = context.space.open(data)
        stream = context.create_stream("main")
        stream.launch(kernel, (cells.address, mapping.address), 2, 1)
        for thread in waits_for:
            world.host_wait(
                lambda thread=thread: context.space.read(cells, np.int32, 16 * thread, 1, polls=True)[0] == 1,
                "a thread",
            )
        if how == "close":
            context.space.close(mapping)
        context.space.free(data)
        stream.synchronize()

    run_host(strategy, main, num_cells=2, seed=seed)


@pytest.mark.parametrize("how", ["free", "close"])
def test_memory_that_a_kernel_may_still_use_is_not_given_up(how):
    with pytest.raises(DataRace) as caught:
        run_all(lambda strategy: give_up(strategy, how, [1]))
    done = "frees" if how == "free" else "closes"
    assert f"the CPU {done} `data` of rank 0, where a thread has stored: nothing orders the two" in str(caught.value)
    for seed in range(8):
        with pytest.raises((DataRace, UseAfterFree)):
            give_up("uniform", how, [1], seed)


def test_memory_is_given_up_behind_all_accesses():
    assert run_all(lambda strategy: give_up(strategy, "close", [0]))[0].is_whole
    for seed in range(8):
        give_up("uniform", "close", [0], seed)


def test_a_kernel_may_not_start_to_use_what_is_freed():
    """Also a strong access, which is a step of the tree, says what is wrong."""

    def program(strategy):
        def main(context, cells, world):
            data = context.space.allocate(16, "data", zero=True)
            stream = context.create_stream("main")
            stream.launch(
                lambda address: current_thread().load(address, "s32", "acquire", "sys"), (data.address,), 1, 1
            )
            context.space.free(data)
            stream.synchronize()

        run_host(strategy, main, num_cells=1)

    with pytest.raises(UseAfterFree):
        run_all(program)


@pytest.mark.parametrize(("address", "words"), [(0, "the null address"), (1 << 40, "no rank has such an address")])
def test_a_strong_access_to_no_memory_says_so_under_all_schedules(address, words):
    def program(strategy):
        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(lambda: current_thread().store(address, "s32", 1, "release", "sys"), (), 1, 1)
            stream.synchronize()

        run_host(strategy, main, num_cells=1)

    with pytest.raises(Exception, match=words):
        run_all(program)


# --- whom a host has met --------------------------------------------------------------------------------------------


@kernel(max_threads=32)
def store_at_rank_0(peers: Peers):
    if thread_idx() == 0 and peers.rank == 1:
        st_weak_s32(buffer_of(peers, 0), 1)


def read_after(comm, meet):
    """Rank 1's kernel stores in rank 0's memory. Both wait for their own kernels and meet; then rank 0's host reads."""
    memory = nbep.SharedMemory.create(comm, 128)
    solo = comm.Split(comm.rank)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, store_at_rank_0, 1, 32, 0, memory.peers)
    memory.wait()
    meet(comm, solo)
    seen = 0
    if comm.rank == 0:
        symmetric = memory.symmetric
        seen = int(symmetric.space.read(symmetric.allocation, np.int32, 0, 1)[0])
    comm.barrier()
    memory.close()
    return seen


MEETINGS = {
    "barrier": (lambda comm, solo: comm.barrier(), True),
    "gather to the reader": (lambda comm, solo: comm.gather(0, root=0), True),
    "bcast to the reader": (lambda comm, solo: comm.bcast(0, root=1), True),
    "bcast from the reader": (lambda comm, solo: comm.bcast(0, root=0), False),
    "gather from the reader": (lambda comm, solo: comm.gather(0, root=1), False),
    "barrier of itself alone": (lambda comm, solo: solo.barrier(), False),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_a_host_knows_those_whom_a_meeting_tells_it_of(name):
    meet, is_told = MEETINGS[name]
    if is_told:
        assert {seen[0] for _, seen in all_of(read_after, 2, meet)} == {1}
    else:
        with pytest.raises(DataRace):
            list(all_of(read_after, 2, meet))


def test_a_wait_that_has_timed_out_is_no_meeting():
    def program(strategy, seed):
        world = World(2, seed, memory_model="checked", strategy=strategy, on_deadlock="expire")
        space = world.ranks[0].space
        cell = space.allocate(64, "cell", zero=True)

        def second():
            assert not world.host_wait(lambda: False, "nobody", timeout_ns=10)
            space.write(cell, 0, ONE)

        world.run([lambda: space.read(cell, np.int32, 0, 1), second])

    for seed in range(8):
        with pytest.raises(DataRace):
            program("uniform", seed)


def look_until_two(strategy, scope, seed=0):
    """The host polls for 2, which comes behind a store of 1 with another scope."""

    def kernel(base):
        t = current_thread()
        t.atomic("add", base, "s32", 1, "release", scope)
        t.atomic("add", base, "s32", 1, "release", "sys")

    def main(context, cells, world):
        stream = context.create_stream("main")
        stream.launch(kernel, (cells.address,), 1, 1)
        world.host_wait(lambda: numbers_in(context.space, cells) == [2], "2")
        stream.synchronize()

    run_host(strategy, main, num_cells=1, seed=seed)


def test_a_look_that_fails_may_be_a_race():
    assert run_all(lambda strategy: look_until_two(strategy, "sys"))[0].is_whole
    with pytest.raises(DataRace, match="scope cta does not reach the CPU"):
        run_all(lambda strategy: look_until_two(strategy, "cta"))
