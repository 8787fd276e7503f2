"""PTX orders only accesses that overlap completely: a flag stored with one size and polled with another is a race.

Source: PTX ISA, memory consistency model: "Morally strong operations" ("If both are memory operations, then they
overlap completely"), "Limitations on Mixed-size Data-Races" ("The axioms in the memory consistency model do not apply
if a PTX program contains one or more mixed-size data-races")
"""

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from every_schedule import run_all, run_threads

from nbep.emulator import DataRace, World, current_thread

SIZES = {"u8": 1, "u16": 2, "s32": 4, "s64": 8, "v4": 16}
PAIRS = list(product(SIZES, SIZES))
ORDERS = list(product(["relaxed", "release", "acquire", "acq_rel"], repeat=2))
SEEDS = range(8)


def value_of(kind, value):
    return (value,) * 4 if kind == "v4" else value


def run(storing, polling, strategy="uniform", seed=0, offset=0, is_met=False, is_atomic=False):
    """One thread raises a flag; the other one polls it with another size, or at another byte of it."""
    world = World(1, seed, memory_model="checked", strategy=strategy)
    cell = world.ranks[0].space.allocate(32, "flag", zero=True)

    def kernel(address):
        t = current_thread()
        if t.thread_idx == 0:
            if is_atomic:
                t.atomic("add", address, storing, 1, "release", "sys")
            else:
                t.store(address, storing, value_of(storing, 0x01010101 % (1 << 8 * SIZES[storing])), "release", "sys")
        if is_met:
            t.barrier(0, 2)
        if t.thread_idx == 1:
            while t.load(address + offset, polling, "acquire", "sys") == value_of(polling, 0):
                t.spin(1 << 62)

    def host():
        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (cell.address,), 1, 2)
        stream.synchronize()

    world.run([host])


def races(*args, **options):
    """Whether a run ends so; another race is an error."""
    try:
        run(*args, **options)
    except DataRace as error:
        if [cause.kind for cause in error.causes] != ["mixed sizes"]:
            raise
        return True
    return False


@pytest.mark.parametrize(("storing", "polling"), PAIRS)
def test_a_flag_is_polled_with_the_size_that_it_is_stored_with(storing, polling):
    expected = {storing != polling}
    assert {races(storing, polling, seed=seed) for seed in SEEDS} == expected
    assert {races(storing, polling, seed=seed, is_met=True) for seed in SEEDS} == {False}
    _, found = run_all(lambda strategy: races(storing, polling, strategy))
    assert found == expected


@pytest.mark.parametrize(("storing", "polling", "offset"), [("s64", "s32", 4), ("s32", "u8", 1), ("s32", "u16", 2)])
def test_part_of_a_flag_is_another_size(storing, polling, offset):
    with pytest.raises(DataRace) as caught:
        run(storing, polling, offset=offset)
    size = SIZES[polling]
    here = f"bytes {offset}-{offset + size - 1}" if size > 1 else f"byte {offset}"
    words = f"overlap in part: the store has bytes 0-{SIZES[storing] - 1}, this load {here}, and PTX orders only"
    other = f"overlap in part: the load has {here}, this store bytes 0-{SIZES[storing] - 1}, and PTX orders only"
    assert words in str(caught.value) or other in str(caught.value)


@pytest.mark.parametrize(("adding", "polling"), [("s64", "s32"), ("s32", "s64")])
def test_an_atomic_is_no_exception(adding, polling):
    assert all(races(adding, polling, seed=seed, is_atomic=True) for seed in SEEDS)
    assert not any(races(adding, adding, seed=seed, is_atomic=True) for seed in SEEDS)


@pytest.mark.parametrize("orders", ORDERS, ids="-".join)
def test_an_atomic_observes_none_of_another_size(orders):
    def end(sizes, strategy="uniform", seed=0):
        world = World(1, seed, memory_model="checked", strategy=strategy)
        cell = world.ranks[0].space.allocate(16, "word", zero=True)

        def kernel(address):
            t = current_thread()
            kind, order = sizes[t.thread_idx], orders[t.thread_idx]
            t.atomic("cas" if t.thread_idx else "add", address, kind, 1, order, "sys", 1 if t.thread_idx else None)

        def host():
            stream = world.ranks[0].create_stream("main")
            stream.launch(kernel, (cell.address,), 1, 2)
            stream.synchronize()

        try:
            world.run([host])
        except DataRace as error:
            return tuple(cause.kind for cause in error.causes)
        return ()

    for sizes in product(["s32", "s64"], repeat=2):
        expected = {("mixed sizes",) if sizes[0] != sizes[1] else ()}
        assert {end(sizes, seed=seed) for seed in SEEDS} == expected
        _, found = run_all(lambda strategy, sizes=sizes: end(sizes, strategy))
        assert found == expected


@pytest.mark.parametrize(("scopes", "sizes", "is_race"), [
    (("gpu", "gpu"), ("s32", "s32"), False),
    (("cta", "cta"), ("s32", "s32"), True),
    (("cta", "gpu"), ("s32", "s32"), True),
    (("gpu", "gpu"), ("s32", "s64"), True),
])  # fmt: skip
@pytest.mark.parametrize("op", ["store", "add"])
def test_strong_accesses_of_two_blocks_race_unless_scopes_and_sizes_agree(scopes, sizes, is_race, op):
    def thread(t, number, cells):
        if op == "store":
            t.store(cells[0], sizes[number], 1, "relaxed", scopes[number])
        else:
            t.atomic(op, cells[0], sizes[number], 1, "relaxed", scopes[number])

    with pytest.raises(DataRace) if is_race else nullcontext():
        run_all(lambda strategy: run_threads(2, 1, thread, strategy))


def test_a_host_polls_words_with_the_size_that_kernels_store():
    def poll(dtype):
        world = World(1, 0, memory_model="checked")
        context = world.ranks[0]
        cell = context.space.allocate(16, "word", zero=True)

        def kernel(address):
            current_thread().store(address, "s32", 1, "release", "sys")

        def host():
            stream = context.create_stream("main")
            stream.launch(kernel, (cell.address,), 1, 1)
            world.host_wait(lambda: context.space.read(cell, dtype, 0, 1, polls=True)[0] != 0, "the word")

        world.run([host])

    poll(np.int32)
    host_late = "the CPU's load bytes 0-7: only accesses of the same bytes are ordered"
    kernel_late = "overlap in part: the load has bytes 0-7, this store bytes 0-3"
    with pytest.raises(DataRace, match=f"{host_late}|{kernel_late}"):
        poll(np.int64)
