"""Data races with late stores and early loads as choices: those of PTX, but for loads that are over by assumption."""

import late_races
import numpy as np
import programs_underway as underway
import pytest
from late_races import Branching, found_race, races_of
from litmus_programs import named, random_program
from oracle import Oracle
from oracle_programs import SHAPES
from oracle_runs import under_all
from parts import both_parts

from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.lab.litmus import PROGRAMS, allowed

NEVER_NS = 1 << 62
COPY = 16  # bytes
FLAG, DATA = 64, 128
SB = Branching(
    (
        ("st.relaxed x 1", "ld.relaxed r0 y", "if r0 0", "st.weak d 1"),
        ("st.relaxed y 1", "ld.relaxed r1 x", "if r1 0", "ld.weak r2 d"),
    ),
    "ranks",
)


def test_a_race_that_needs_two_late_stores_is_found():
    assert found_race(SB, 1000)
    assert not found_race(SB, 1000, is_weak=False)
    assert races_of(SB).by_ptx


@pytest.mark.parametrize("program", named(PROGRAMS))
def test_races_are_those_of_ptx_but_for_relaxed_heads(program):
    is_head = program.shape == "MP, load first" and "wait.relaxed" in program.threads[-1]
    assert found_race(late_races.of(program), 1000) == (allowed(program).has_race and not is_head)


# Programs of a GPU, and whether they have a race.
CHAINS = {
    "a strong store over a weak one does not hide it": ([["st.weak d 1", "st.release x 1"],
            ["wait.acquire x 1", "st.relaxed d 2", "st.relaxed y 1"], ["wait.relaxed y 1", "ld.relaxed r0 d"]], True),
    "a weak one does, for who knows of that": ([["st.weak d 1", "st.release x 1"],
            ["wait.acquire x 1", "st.weak d 2", "st.release y 1"], ["wait.acquire y 1", "ld.weak r0 d"]], False),
    "what a thread has observed goes on with its release": (
        [["st.relaxed d 1"], ["wait.relaxed d 1", "st.release y 1"], ["wait.acquire y 1", "st.weak d 2"]], False),
    "what came before that does not": ([["st.weak d 1", "st.relaxed x 1"], ["wait.relaxed x 1", "st.release y 1"],
            ["wait.acquire y 1", "ld.weak r0 d"]], True),
    "a relaxed chain of two tells that a load is over": ([["ld.weak r0 d", "st.relaxed x 1"],
            ["wait.relaxed x 1", "st.relaxed y 1"], ["wait.relaxed y 1", "st.weak d 2"]], False),
    "an atomic passes that on": ([["ld.weak r0 d", "st.relaxed x 1"], ["wait.relaxed x 1", "add.relaxed r1 x 1"],
            ["wait.relaxed x 2", "st.weak d 2"]], False),
    "a scope that does not reach tells nothing": (
        [["ld.weak r0 d", "st.relaxed.cta x 1"], ["wait.relaxed x 1", "st.weak d 2"]], True),
    "a poll that failed is a load, too": ([["st.weak x 0", "st.release x 1"], ["wait.acquire x 1"]], True),
    "who waits for somebody who waits has a race nevertheless": (
        [["wait.relaxed x 1", "st.release y 1", "st.weak d 1"], ["wait.acquire y 1", "st.relaxed x 1", "ld.weak r0 d"]],
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains_order_as_ptx_has_it(name):
    threads, has_race = CHAINS[name]
    program = Branching(tuple(map(tuple, threads)), "a GPU")
    assert check(program) is not None
    assert found_race(program, 500) == has_race


def check(program: Branching, most: int = 500) -> tuple[bool, bool] | None:
    """Compare the two; whether there is a race, and one that only late stores or early loads show."""
    found, expected = found_race(program, most), races_of(program)
    if found is None:
        return None
    assert expected.is_one or not found, f"false alarm: {program.name}"
    assert found or not expected.is_sure, f"missed: {program.name}"
    return found, found and found_race(program, most, is_weak=False) is False


@pytest.mark.parametrize("seeds", both_parts([range(25)], thorough=[range(25, 400)], long=[range(400, 3000)]))
def test_random_programs_have_a_race_where_the_axioms_have_one(seeds):
    found = [one for seed in seeds if (one := check(late_races.draw(seed)))]
    assert len(found) > len(seeds) * 9 // 10
    assert len(found) // 3 < sum(is_race for is_race, _ in found) < len(found) * 2 // 3


@pytest.mark.parametrize("seeds", both_parts([range(12)], thorough=[range(12, 150)], long=[range(150, 1000)]))
def test_races_behind_what_few_schedules_show_are_found(seeds):
    found = [one for seed in seeds if (one := check(late_races.draw_behind(seed)))]
    assert len(found) > len(seeds) * 9 // 10
    assert sum(only_weak for _, only_weak in found) > len(seeds) // 6


@pytest.mark.parametrize("numbers", both_parts([range(20)], thorough=[range(20, 80)], long=[range(80, 300)]))
def test_random_litmus_programs_have_a_race_where_the_axioms_have_one(numbers):
    assert sum(check(late_races.of(random_program(number))) is not None for number in numbers) > len(numbers) // 2


@pytest.mark.parametrize("seeds", both_parts([range(5)], thorough=[range(5, 60)], long=[range(60, 200)]))
def test_a_plain_enumeration_has_the_same_races(seeds):
    compared = 0
    for seed in seeds:
        program = late_races.draw_behind(seed)
        plain = found_race(program, 150, is_plain=True)
        if plain is not None:
            assert found_race(program, 2000) == plain, program.name
            compared += 1
    assert compared > len(seeds) // 4


# --- what no litmus test has ------------------------------------------------------------------------------------------


def race_of(*kernels, threads=1, host=None):
    """The report of the first race of any schedule: kernels(thread, base), each in a stream; then host(space, cells,
    streams). None if there is none."""
    tree = Tree(is_weak=True, finds_races=True)
    while tree.begin():
        world = World(1, 0, memory_model="delayed", strategy=Every(tree))
        context = world.ranks[0]
        cells = context.space.allocate(256, "cells", zero=True)

        def main(context=context, cells=cells):
            streams = []
            for number, kernel in enumerate(kernels):
                streams.append(context.create_stream(f"stream {number}"))
                run = lambda base, kernel=kernel: kernel(current_thread(), base)  # noqa: E731
                streams[-1].launch(run, (cells.address,), 1, threads, 256)
            if host is not None:
                host(context.space, cells, streams)
            for stream in streams:
                stream.synchronize()

        try:
            world.run([main])
        except Redundant:
            tree.end(is_redundant=True)
            continue
        except DeadlockError:
            pass
        except DataRace as error:
            return str(error)
        tree.end()
        assert tree.schedules < 500
    return None


def wait_for(t, cell, order, value=1):
    while t.load(cell, "s32", order, "sys") != value:
        t.spin(NEVER_NS)


def teller(order="release"):
    def tell(t, base):
        t.store(base + DATA, "s32", 1, "weak", "cta")
        t.store(base + FLAG, "s32", 1, order, "sys")

    return tell


def hearer(then, order="acquire"):
    def hear(t, base):
        wait_for(t, base + FLAG, order)
        then(t, base)

    return hear


def read_data(t, base):
    t.load(base + DATA, "s32", "weak", "cta")


def test_the_report_says_which_signal_is_too_weak():
    report = race_of(teller("relaxed"), hearer(read_data))
    assert report.startswith("the store to `cells` of rank 0: byte 64 is too weak to order the store before this load")
    assert "with relaxed.sys order it releases nothing, and no fence comes before it" in report
    assert "signal in `cells` of rank 0: byte 64" in report
    assert race_of(teller(), hearer(read_data)) is None


def test_accesses_of_other_sizes_race_however_strong_they_are():
    both = [lambda t, base, kind=kind: t.store(base, kind, 1, "relaxed", "sys") for kind in ("s32", "s64")]
    assert "overlap in part" in race_of(*both)
    assert race_of(both[0], both[0]) is None


def test_an_acquire_of_other_bytes_than_were_released_acquires_nothing():
    def add(t, base):
        t.atomic("add", base, "s64", 2, "acq_rel", "sys")

    def swap(t, base):
        t.atomic("exch", base + 4, "s32", 2, "acq_rel", "sys")

    assert "overlap in part" in race_of(add, swap)


def test_an_acquire_knows_of_a_release_over_which_its_thread_has_stored():
    """The flag's own store by release, too: it comes before what is behind the acquire."""

    def tell(t, base):
        t.store(base + FLAG, "s32", 3, "release", "sys")
        t.store(base + FLAG, "s32", 1, "relaxed", "sys")

    assert race_of(tell, hearer(lambda t, base: t.store(base + FLAG, "s32", 0, "weak", "sys"))) is None


def test_a_cell_is_known_though_its_neighbour_is_stored_to_many_times():
    """Of 16 bytes the latest stores are kept, and what an older one tells."""

    def tell(t, base):
        teller()(t, base)
        for number in range(1, 11):
            t.store(base + FLAG + 4, "s32", number, "release", "sys")

    def hear(t, base):
        if t.load(base + FLAG, "s32", "acquire", "sys") == 1:
            read_data(t, base)

    assert race_of(tell, hear) is None


# Copies. `tell` and `hear` in streams of their own, or one kernel alone.


def fetch(t, base, waits=True):
    t.mbarrier_init(0, 1)
    t.mbarrier_arrive_expect_tx(0, COPY)
    t.bulk_load(COPY, base + DATA, COPY, 0)
    while waits and not t.mbarrier_try_wait(0, 0):
        t.spin(NEVER_NS)


def fill_stage(t):
    for i in range(4):
        t.store_shared(4 * i, "s32", 1, "weak")
    t.fence_proxy_async()


def send_stage(waits_for, order="release"):
    def send(t, base):
        fill_stage(t)
        t.bulk_store(base + DATA, 0, COPY)
        t.bulk_commit_group()
        if waits_for == "all":
            t.bulk_wait_group(0)
        t.store(base + FLAG, "s32", 1, order, "sys")
        t.bulk_wait_group_read(0)

    return send


def use_stage(waits_for):
    def use(t, base):
        fill_stage(t)
        t.bulk_store(base + DATA, 0, COPY)
        t.bulk_commit_group()
        if waits_for == "read":
            t.bulk_wait_group_read(0)
        t.store_shared(0, "s32", 2, "weak")
        t.bulk_wait_group_read(0)

    return use


def store_back(t, base):
    t.store(base + DATA, "s32", 2, "weak", "cta")


def fetch_and_tell(waits):
    def both(t, base):
        fetch(t, base, waits)
        t.store(base + FLAG, "s32", 1, "release", "sys")
        while not t.mbarrier_try_wait(0, 0):
            t.spin(NEVER_NS)

    return both


def read_early(t, base):
    for i in range(0, COPY, 4):
        t.store_shared(COPY + i, "s32", 1, "weak")
    t.fence_proxy_async()
    fetch(t, base, waits=False)
    t.load_shared(COPY, "s32", "weak")


def fetch_twice(waits):
    def twice(t, base):
        t.mbarrier_init(0, 1)
        for number in (0, 1):
            t.mbarrier_arrive_expect_tx(0, COPY)
            t.bulk_load(COPY, base + DATA, COPY, 0)
            while (waits or number) and not t.mbarrier_try_wait(0, number if waits else 0):
                t.spin(NEVER_NS)

    return twice


def fetch_and_send(waits):
    def both(t, base):
        fetch(t, base, waits)
        t.bulk_store(base + FLAG, COPY, COPY)
        t.bulk_commit_group()
        t.bulk_wait_group(0)
        while not t.mbarrier_try_wait(0, 0):
            t.spin(NEVER_NS)

    return both


COPIES = {
    "two loads into one stage": ([fetch_twice(waits=False)], "no thread has waited on the mbarrier"),
    "the same with a wait between them": ([fetch_twice(waits=True)], None),
    "a store of a stage that a load fills": ([fetch_and_send(waits=False)], "no thread has waited on the mbarrier"),
    "the same with a wait between": ([fetch_and_send(waits=True)], None),
    "a source that is not there": ([teller("relaxed"), hearer(fetch)], "is too weak"),
    "a source that is": ([teller(), hearer(fetch)], None),
    "bytes that nobody has waited for": ([read_early], "no thread has waited on the mbarrier"),
    "a source that may still be read": ([fetch_and_tell(False), hearer(store_back)], "no thread has waited on"),
    "a source that has been read": ([fetch_and_tell(True), hearer(store_back)], None),
    "a target that may not be there": ([send_stage("nothing"), hearer(read_data)], "a wait_group is missing"),
    "a target that is, and no release": ([send_stage("all", "relaxed"), hearer(read_data)], "nothing orders the store"),
    "a target that is": ([send_stage("all"), hearer(read_data)], None),
    "a stage that may still be read": ([use_stage("nothing")], "a wait_group.read is missing"),
    "a stage that has been read": ([use_stage("read")], None),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_race_with_those_who_have_not_waited(name):
    kernels, words = COPIES[name]
    report = race_of(*kernels)
    assert report is None if words is None else words in report


# Threads of a block.


def by_lanes(between):
    def both(t, base):
        if t.lane == 0:
            t.store_shared(0, "s32", 0, "weak")
        t.syncwarp(0b11)
        if t.lane == 0:
            t.store_shared(0, "s32", 1, "weak")
        between(t)
        if t.lane == 1:
            t.load_shared(0, "s32", "weak")

    return both


def flag_in_shared(order):
    def both(t, base):
        if t.lane == 0:
            t.store_shared(4, "s32", 0, "relaxed")
        t.syncwarp(0b11)
        if t.lane == 0:
            t.store(base + DATA, "s32", 1, "weak", "cta")
            t.store_shared(0, "s32", 1, "weak")
            t.store_shared(4, "s32", 1, order)
        elif t.load_shared(4, "s32", "acquire") == 1:
            t.load(base + DATA, "s32", "weak", "cta")
            t.load_shared(0, "s32", "weak")

    return both


LANES = {
    "nothing between": (by_lanes(lambda t: None), "no syncwarp is between"),
    "a vote": (by_lanes(lambda t: t.vote("any", 0b11, True)), "a "),
    "a syncwarp": (by_lanes(lambda t: t.syncwarp(0b11)), None),
    "a barrier": (by_lanes(lambda t: t.barrier(0, 2)), None),
    "a released flag": (flag_in_shared("release"), None),
    "a relaxed flag": (flag_in_shared("relaxed"), "is too weak to order the store before this load"),
}


@pytest.mark.parametrize("name", LANES)
def test_threads_of_a_block_race_unless_they_meet(name):
    kernel, words = LANES[name]
    report = race_of(kernel, threads=2)
    assert report is None if words is None else words in report


# Hosts and streams.


def read(space, cells, at, polls):
    return int(space.read(cells, np.int32, at, 1, polls=polls)[0])


def reads_by(waits):
    def host(space, cells, streams):
        if waits == "stream":
            streams[0].synchronize()
        if waits == "flag" and read(space, cells, FLAG, True) != 1:
            return
        read(space, cells, DATA, False)

    return host


def writes(at, waits=False):
    def host(space, cells, streams):
        if waits:
            streams[0].synchronize()
        space.write(cells, at, np.array([1], np.int32))

    return host


HOSTS = {
    "reads at once": ([teller()], reads_by(None), "loaded by the CPU"),
    "reads behind the stream": ([teller()], reads_by("stream"), None),
    "reads behind a flag": ([teller()], reads_by("flag"), None),
    "reads behind a relaxed flag": ([teller("relaxed")], reads_by("flag"), "the CPU reads 4 bytes"),
    "writes what a kernel reads": ([read_data], writes(DATA), "`cells` of rank 0: byte 128"),
    "writes behind the kernel": ([read_data], writes(DATA, True), None),
    "writes a flag that is polled": (
        [lambda t, base: t.load(base + FLAG, "s32", "acquire", "sys")],
        writes(FLAG),
        None,
    ),
    "starts two kernels at once": ([teller(), read_data], None, "nothing orders"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_and_kernels_race_unless_one_waits(name):
    kernels, host, words = HOSTS[name]
    report = race_of(*kernels, host=host)
    assert report is None if words is None else words in report


# --- beside the oracle of `--all`, which knows no late stores ---------------------------------------------------------


@pytest.mark.parametrize("seeds", both_parts([range(4)], thorough=[range(4, 25)], long=[range(25, 100)]))
@pytest.mark.parametrize("shape", SHAPES)
def test_programs_of_the_oracle_have_its_races(shape, seeds):
    """Hosts, streams, barriers, lanes, scopes, sizes. Those that look at data have races by early loads, too."""
    for seed in seeds:
        program = SHAPES[shape](seed)
        expected = Oracle(program).verdict()[0]
        found, is_whole = under_all(program, 100, Tree(is_weak=True, finds_races=True))
        if shape != "observed":
            assert "race" in expected or "race" not in found.faults, f"{shape} {seed}: false alarm"
        assert "race" not in expected or found.faults or not is_whole, f"{shape} {seed}: missed"


@pytest.mark.parametrize("kind", underway.KINDS)
@pytest.mark.parametrize("seeds", both_parts([range(8)], thorough=[range(8, 40)], long=[range(40, 150)]))
def test_random_programs_whose_copies_are_waited_for_have_no_race(kind, seeds):
    for seed in seeds:
        tree = underway.explore(*underway.draw(seed, *underway.KINDS[kind]), is_weak=True, finds_races=True)[0]
        assert tree.is_whole
