"""The host reads what kernels write for it, and writes what they read: "checked" wants an order for that.

And "delayed" shows late stores late.
"""

import numpy as np
import pytest

from nbep.emulator import DataRace, World, current_thread

WORDS, STATUS, BEGUN = 0, 32, 48  # 32 bytes apart: stores to the same 16 bytes arrive in order
SEEDS = range(20)


def store_words(t, memory, order="weak"):
    for i in range(4):
        t.store(memory + WORDS + 4 * i, "s32", 7, order, "sys")


def publish(order, scope="sys", fence=None):
    """A kernel that writes the words, and then the status, with these orders."""

    def kernel(memory):
        t = current_thread()
        store_words(t, memory)
        if fence is not None:
            t.fence("acq_rel", fence)
        t.store(memory + STATUS, "s32", 1, order, scope)
        for _ in range(400):
            t.globaltimer()

    return kernel


def status_first(memory):
    t = current_thread()
    t.store(memory + STATUS, "s32", 1, "release", "sys")
    store_words(t, memory)


class Machine:
    """One rank whose kernel writes memory that its host reads."""

    def __init__(self, kernel, model, seed=0):
        self.world = World(1, seed, memory_model=model)
        rank = self.world.ranks[0]
        self.space = rank.space
        self.memory = self.space.allocate(64, "memory", zero=True)
        self.stream = rank.create_stream("stream")
        self.stream.launch(kernel, (self.memory.address,), 1, 1, name="publish")

    def poll(self, offset=STATUS):
        return int(self.space.read(self.memory, np.int32, offset, 1, polls=True)[0])

    def words(self):
        return self.space.read(self.memory, np.int32, WORDS, 4).tolist()

    def poll_and_read(self):
        self.world.host_wait(lambda: self.poll() != 0, "the status")
        return self.words()


@pytest.mark.parametrize("fence", [None, "sys"])
def test_what_is_released_before_a_polled_status_is_there(fence):
    kernel = publish("relaxed" if fence else "release", fence=fence)
    for model in ("sc", "delayed", "checked"):
        for seed in SEEDS:
            assert Machine(kernel, model, seed).poll_and_read() == [7] * 4


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (publish("relaxed"), "has released nothing since"),
        (publish("relaxed", fence="gpu"), "released with scope sys since"),
        (publish("release", "gpu"), "scope gpu does not reach the CPU|this store needs a larger scope: sys"),
        (publish("weak"), "that takes a store with an order, and scope sys|this store needs an order, and scope sys"),
        (status_first, "has released nothing since"),
    ],
    ids=["relaxed", "narrow fence", "narrow scope", "weak", "status first"],
)
def test_a_status_that_does_not_order_its_words_is_a_data_race(kernel, why):
    for seed in SEEDS:
        with pytest.raises(DataRace, match=why):
            Machine(kernel, "checked", seed).poll_and_read()


@pytest.mark.parametrize("kernel", [publish("relaxed"), status_first])
def test_words_come_late_if_stores_may_be_late(kernel):
    assert {tuple(Machine(kernel, "delayed", seed).poll_and_read()) for seed in SEEDS} > {(7,) * 4}


def test_a_count_that_is_its_own_message_may_be_relaxed():
    for seed in SEEDS:
        machine = Machine(publish("relaxed"), "checked", seed)
        machine.world.host_wait(lambda machine=machine: machine.poll() != 0, "the count")
        assert machine.poll() == 1


@pytest.mark.parametrize("wait", ["stream", "event"])
def test_a_stream_or_an_event_that_was_waited_for_orders_all_that_its_kernels_have_stored(wait):
    machine = Machine(publish("weak"), "checked")
    if wait == "stream":
        machine.stream.synchronize()
    else:
        event = machine.stream.record()
        machine.world.host_wait(lambda: event.done, "the event")
        event.tell_host()
    assert machine.words() == [7] * 4


def test_an_event_says_nothing_of_what_comes_behind_it():
    machine = Machine(publish("release"), "checked")
    event = machine.stream.record()
    machine.stream.launch(publish("release"), (machine.memory.address,), 1, 1, name="again")
    end = machine.stream.record()
    machine.world.host_wait(lambda: end.done, "the end")
    event.tell_host()
    with pytest.raises(DataRace, match=r"kernel `again`(.|\n)*nor waited for an event since"):
        machine.words()
    end.tell_host()
    assert machine.words() == [7] * 4


def test_the_report_names_the_cell_the_store_and_the_hosts_line():
    with pytest.raises(DataRace) as caught:
        Machine(publish("relaxed"), "checked").poll_and_read()
    message = str(caught.value)
    assert "the CPU reads 16 bytes that a thread has stored: nothing orders the two" in message
    assert "in `memory` of rank 0: byte 0" in message
    assert "stored with weak order by rank 0, kernel `publish`, block 0, warp 0, lane 0" in message
    assert "(store_words)" in message
    assert "(words)" in message


def wait_for_word(order, scope="sys"):
    """A kernel that waits until the CPU has written a word, and then loads what it had written before."""

    def kernel(memory):
        t = current_thread()
        t.store(memory + BEGUN, "s32", 1, "relaxed", "sys")
        while t.load(memory + STATUS, "s32", order, scope) == 0:
            t.spin(1 << 62)
        assert t.load(memory + WORDS, "s32", "weak", "sys") == 7

    return kernel


def write_to(machine):
    machine.world.host_wait(lambda: machine.poll(BEGUN) != 0, "the kernel")
    machine.space.write(machine.memory, WORDS, np.full(4, 7, np.int32))
    machine.space.write(machine.memory, STATUS, np.ones(1, np.int32))
    machine.stream.synchronize()


def test_a_word_that_the_cpu_writes_may_be_polled_with_scope_sys():
    for seed in SEEDS:
        write_to(Machine(wait_for_word("acquire"), "checked", seed))


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (wait_for_word("weak"), "takes a load with an order, and scope sys|this load needs an order, and scope sys"),
        (wait_for_word("acquire", "gpu"), "scope gpu does not reach the CPU|this load needs a larger scope: sys"),
        (wait_for_word("relaxed"), r"weak load of 4 bytes that the CPU has stored(.|\n)*    stored by the CPU"),
    ],
    ids=["weak", "narrow scope", "relaxed"],
)
def test_a_poll_that_is_too_weak_for_the_cpus_word_is_a_data_race(kernel, what):
    for seed in SEEDS:
        with pytest.raises(DataRace, match=what):
            write_to(Machine(kernel, "checked", seed))


def overwrite(begins):
    """A kernel that stores to the words when the CPU has written the status."""

    def kernel(memory):
        t = current_thread()
        while begins and t.load(memory + STATUS, "s32", begins, "sys") == 0:
            t.spin(1 << 62)
        store_words(t, memory)

    return kernel


def read_and_write_to(machine):
    """The CPU reads the words, and then writes the status."""
    machine.words()
    machine.space.write(machine.memory, STATUS, np.ones(1, np.int32))
    machine.stream.synchronize()


@pytest.mark.parametrize("order", ["relaxed", "acquire"])
def test_a_kernel_may_store_to_what_the_cpu_has_read_before_it_wrote_the_status(order):
    """That a load is over a relaxed load of the status tells, too."""
    for seed in SEEDS:
        read_and_write_to(Machine(overwrite(order), "checked", seed))


def test_a_kernel_may_not_store_to_what_the_cpu_reads_while_it_runs():
    words = (
        "the CPU reads `memory` of rank 0: byte 0 after it has queued kernel `publish` on stream `stream`, which "
        "stores it, and before it has waited for that"
    )
    for seed in SEEDS:
        with pytest.raises(DataRace, match=words):
            read_and_write_to(Machine(overwrite(None), "checked", seed))


def test_a_kernel_that_is_queued_later_knows_of_what_the_cpu_has_read():
    machine = Machine(publish("release"), "checked")
    machine.stream.synchronize()
    assert machine.words() == [7] * 4
    machine.stream.launch(overwrite(None), (machine.memory.address,), 1, 1)
    machine.stream.synchronize()


def test_what_the_cpu_has_written_is_known_to_kernels_that_start_later():
    machine = Machine(publish("release"), "checked")
    machine.stream.synchronize()
    machine.space.write(machine.memory, WORDS, np.full(4, 7, np.int32))
    machine.stream.launch(wait_for_word("weak"), (machine.memory.address,), 1, 1)
    machine.stream.synchronize()


def test_the_cpu_may_not_overwrite_what_a_running_kernel_has_stored():
    machine = Machine(publish("relaxed"), "checked")
    machine.world.host_wait(lambda: machine.poll() != 0, "the status")
    with pytest.raises(DataRace, match="the CPU writes 16 bytes that a thread has stored: nothing orders the two"):
        machine.space.write(machine.memory, WORDS, np.zeros(4, np.int32))
