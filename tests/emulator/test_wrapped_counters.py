"""A wait for a counter that has wrapped: the report says so, and expects nothing that the cell cannot hold."""

import operator

import pytest

from nbep.emulator import DeadlockError, World, current_thread

NEVER_NS = 1 << 62
MOST = {"s32": (1 << 31) - 1, "s64": (1 << 63) - 1}


def hang(kind, start, holds, count):
    """One thread counts a cell up; the other one waits until holds(value). Returns the report."""
    world = World(1, 0)
    cell = world.ranks[0].space.allocate(16, "counter", zero=True)

    def kernel(address):
        t = current_thread()
        if t.thread_idx == 0:
            count(t, address, kind, start)
            t.barrier(0, 2)
        else:
            t.barrier(0, 2)
            while not holds(t.load(address, kind, "acquire", "sys")):
                t.spin(NEVER_NS)

    def host():
        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (cell.address,), 1, 2)
        stream.synchronize()

    with pytest.raises(DeadlockError) as caught:
        world.run([host])
    return str(caught.value).partition("\n\n")[0]


def by_stores(t, address, kind, start):
    for value in range(start, start + 6):
        t.store(address, kind, value, "release", "sys")


def by_adds(t, address, kind, start):
    t.store(address, kind, start, "release", "sys")
    for _ in range(5):
        t.atomic("add", address, kind, 1, "release", "sys")


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("count", [by_stores, by_adds])
@pytest.mark.parametrize(
    ("beyond", "words"),
    [(0, "expects {} or more and sees "), (1, "expects {} or more, which no {kind} can be, and sees ")],
)
def test_a_counter_that_has_wrapped_is_named(kind, count, beyond, words):
    most = MOST[kind]
    wanted = most + beyond
    report = hang(kind, most - 2, lambda value: value >= wanted, count)
    assert words.format(wanted, kind=kind) + str(-most + 1) in report
    assert f"It has wrapped: {most + 1}, stored by " in report
    assert f"is {-most - 1} in an {kind}, which holds {-most - 1} to {most}" in report


@pytest.mark.parametrize("kind", MOST)
def test_of_two_conditions_that_is_left_out_which_no_value_meets(kind):
    most = MOST[kind]
    report = hang(kind, most - 2, lambda value: value >= most + 1 or value <= -most, by_stores)
    assert f"expects {-most} or less and sees {-most + 1}" in report
    assert "or more" not in report


@pytest.mark.parametrize(
    ("kind", "holds", "other", "text"),
    [
        ("u32", operator.lt, 0, "-1 or less"),
        ("u64", operator.eq, 1 << 64, str(1 << 64)),
        ("s32", operator.eq, 1 << 31, str(1 << 31)),
        ("s32", operator.lt, -(1 << 31), str(-(1 << 31) - 1) + " or less"),
        ("s64", operator.gt, MOST["s64"], str(1 << 63) + " or more"),
        ("u8", operator.ge, 256, "256 or more"),
        ("s16", operator.le, -40_000, "-40000 or less"),
    ],
)
def test_what_no_cell_can_hold_is_said(kind, holds, other, text):
    report = hang(kind, 0, lambda value: holds(value, other), lambda *_: None)
    assert f"expects {text}, which no {kind} can be, and sees 0" in report
    assert "has wrapped" not in report


def test_a_counter_that_wraps_where_no_thread_waits_for_that_is_not_named():
    """As the cell of the barrier between blocks, whose top bit turns."""
    report = hang("s32", MOST["s32"] - 2, lambda value: value >= 0, by_stores)
    assert "It has wrapped" in report
    report = hang("s32", MOST["s32"] - 2, lambda value: value == 5, by_stores)
    assert "has wrapped" not in report
