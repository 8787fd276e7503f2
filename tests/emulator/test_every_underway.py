"""The tree of all schedules goes through what is under way: copies, hosts, kernels that start, events."""

import numpy as np
import pytest
from every_schedule import numbers_in, run_all, run_host

from nbep.emulator import DataRace, DeadlockError, current_thread

NEVER_NS = 1 << 62
COPY = 16  # bytes


def store(space, cells, index, number):
    space.write(cells, 16 * index, np.array([number], np.int32))


# --- bulk loads -----------------------------------------------------------------------------------------------------


def copy_to_stage(look, num_threads=1, num_copies=1):
    """A kernel whose first thread starts copies; look(thread, its stage) is what each of them does then."""

    def program(strategy, seed=0):
        looks = {}

        def kernel(data):
            t = current_thread()
            if t.thread_idx == 0:
                t.mbarrier_init(0, 1)
            t.barrier(0, num_threads)
            if t.thread_idx == 0:
                t.mbarrier_arrive_expect_tx(0, num_copies * COPY)
                for i in range(num_copies):
                    t.bulk_load(COPY * (i + 1), data, COPY, 0)
            looks[t.thread_idx] = look(t)

        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(kernel, (cells.address,), 1, num_threads, COPY * (num_copies + 1))
            stream.synchronize()

        run_host(strategy, main, seed=seed)
        return tuple(looks[i] for i in range(num_threads))

    return program


def wait(t):
    while not t.mbarrier_try_wait(0, 0):
        t.spin(NEVER_NS)


def test_who_waits_for_copies_does_not_multiply_schedules():
    tree, _ = run_all(copy_to_stage(wait, num_threads=32, num_copies=4))
    assert (tree.schedules, tree.redundant) == (1, 0)


def test_who_asks_whether_a_copy_is_there_may_get_both_answers():
    tree, answers = run_all(copy_to_stage(lambda t: t.mbarrier_try_wait(0, 0)))
    assert (tree.schedules, tree.redundant, answers) == (2, 0, {(False,), (True,)})


def tell_too_late(strategy, seed=0):
    """One thread stores after the phase for which the other one has waited, and then arrives in the next phase."""

    def kernel(data):
        t = current_thread()
        if t.thread_idx == 0:
            t.mbarrier_init(0, 2)
        t.barrier(0, 2)
        t.mbarrier_arrive(0)
        wait(t)
        if t.thread_idx == 0:
            t.load(data, "s32", "weak", "cta")
        else:
            t.store(data, "s32", 1, "weak", "cta")
            t.mbarrier_arrive(0)

    def main(context, cells, world):
        stream = context.create_stream("main")
        stream.launch(kernel, (cells.address,), 1, 2, COPY)
        stream.synchronize()

    run_host(strategy, main, seed=seed)


def test_who_arrives_in_the_next_phase_tells_nothing_in_this_one():
    with pytest.raises(DataRace):
        run_all(tell_too_late)
    for seed in range(20):
        with pytest.raises(DataRace):
            tell_too_late("uniform", seed)


# --- hosts ----------------------------------------------------------------------------------------------------------


def count_up(base, most):
    t = current_thread()
    for _ in range(most):
        t.atomic("add", base, "s32", 1, "release", "sys")


def look_at_counter(most):
    def program(strategy):
        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(count_up, (cells.address, most), 1, 1)
            seen = numbers_in(context.space, cells)[0]
            stream.synchronize()
            return seen

        return run_host(strategy, main)

    return program


def test_a_host_that_looks_at_a_counter_sees_each_of_its_numbers_once():
    tree, numbers = run_all(look_at_counter(3))
    assert (tree.schedules, tree.redundant, numbers) == (4, 0, {0, 1, 2, 3})


def test_a_host_that_waits_for_a_counter_does_not_multiply_schedules():
    def program(strategy):
        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(count_up, (cells.address, 4), 1, 1)
            world.host_wait(lambda: numbers_in(context.space, cells)[0] == 4, "the counter")

        run_host(strategy, main)

    tree, _ = run_all(program)
    assert (tree.schedules, tree.redundant) == (1, 0)


def test_what_a_host_stores_may_come_early_or_late():
    def program(strategy):
        seen = []

        def kernel(base):
            t = current_thread()
            seen.extend(int(t.load(base, "s32", "acquire", "sys")) for _ in range(2))

        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(kernel, (cells.address,), 1, 1)
            store(context.space, cells, 0, 1)
            stream.synchronize()

        run_host(strategy, main)
        return tuple(seen)

    tree, seen = run_all(program)
    assert (tree.schedules, seen) == (3, {(0, 0), (0, 1), (1, 1)})


def test_a_kernel_that_waits_for_the_host_does_not_multiply_schedules():
    def program(strategy):
        def kernel(base):
            t = current_thread()
            while t.load(base, "s32", "acquire", "sys") == 0:
                t.spin(NEVER_NS)

        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(kernel, (cells.address,), 2, 32)
            store(context.space, cells, 0, 1)
            stream.synchronize()

        run_host(strategy, main)

    tree, _ = run_all(program)
    assert (tree.schedules, tree.redundant) == (1, 0)


def test_who_asks_whether_a_kernel_is_done_may_get_both_answers():
    def program(strategy):
        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(count_up, (cells.address, 1), 1, 1)
            end = stream.record()
            is_done = end.done
            world.host_wait(lambda: end.done, "the end")
            return is_done, end.done

        return run_host(strategy, main)

    tree, answers = run_all(program)
    assert (tree.schedules, tree.redundant, answers) == (2, 0, {(False, True), (True, True)})


# --- starts of kernels ----------------------------------------------------------------------------------------------


def meet_on(num_sms):
    """Two kernels of two streams: the first one waits for the second. Says how that ends."""

    def program(strategy):
        def await_other(base):
            t = current_thread()
            while t.load(base, "s32", "acquire", "sys") == 0:
                t.spin(NEVER_NS)

        def tell(base):
            current_thread().store(base, "s32", 1, "release", "sys")

        def main(context, cells, world):
            streams = [context.create_stream(name) for name in ("first", "second")]
            for stream, kernel in zip(streams, (await_other, tell), strict=True):
                stream.launch(kernel, (cells.address,), 1, 1)
            for stream in streams:
                stream.synchronize()

        try:
            run_host(strategy, main, num_sms=num_sms)
        except DeadlockError:
            return "hangs"
        return "ends"

    return program


def test_who_comes_first_to_the_only_sm_is_a_choice():
    """One order alone hangs."""
    assert run_all(meet_on(1))[1] == {"ends", "hangs"}
    assert run_all(meet_on(2))[1] == {"ends"}


def test_without_a_limit_a_start_is_no_choice():
    tree, ends = run_all(meet_on(None))
    assert (tree.schedules, tree.redundant, ends) == (1, 0, {"ends"})


def test_two_allocations_of_one_name_are_two_memories():
    def program(strategy):
        def main(context, cells, world):
            for number in range(2):
                own = context.space.allocate(16, "cells", zero=True)
                context.create_stream(f"stream {number}").launch(
                    lambda base: [int(current_thread().atomic("add", base, "s32", 1, "relaxed", "sys")) for _ in "ab"],
                    (own.address,),
                    1,
                    1,
                )

        run_host(strategy, main)

    tree, _ = run_all(program)
    assert (tree.schedules, tree.redundant) == (1, 0)
