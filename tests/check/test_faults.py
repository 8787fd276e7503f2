"""Steps of kernels are found in their source, have names, and can be broken and mended again."""

import ast

import numpy as np
import pytest

import nbep
from nbep.device import primitives
from nbep.device import primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.intranode import combine
from nbep.device.protocols import barrier, peers, teams
from nbep.device.types import InOut
from nbep.emulator.machine.source import marks
from nbep.lab.check import broken, edited, fault_of, faults_of
from nbep.lab.check.catalogue import UnknownName, own_faults, own_kernels, reached_from
from nbep.lab.check.faults import calls_of, function_tree, is_loop, is_wait, looking_once, weakened

TAIL = "intranode.combine.send_tokens: release of combine-tail"
DATA, FLAG = 0, 4


@device_function
def raise_flag(cells):
    ptx.st_release_sys_s32(cells + FLAG, 1)


@kernel(max_threads=1)
def look(seen: InOut, cell: InOut):
    ptx.st_weak_s32(seen, looking_once(barrier.wait_call)(cell, 0, 0))


@kernel(max_threads=1)
def message(cells: InOut):
    if ptx.block_idx() == 0:
        ptx.st_weak_s32(cells + DATA, 42)
        raise_flag(cells)
    else:
        while ptx.ld_acquire_sys_s32(cells + FLAG) == 0:
            ptx.wait_expired(1 << 62)
        ptx.st_weak_s32(cells + 8, ptx.ld_weak_s32(cells + DATA))


def send(memory_model="checked"):
    def main(comm):
        cells = np.zeros(3, np.int32)
        stream = comm.runtime.create_stream("stream")
        comm.runtime.launch(stream, message, 2, 1, 0, cells)
        stream.synchronize()
        return cells.tolist()

    return nbep.spawn(main, 1, "emulator", memory_model=memory_model)[0]


def test_names_say_the_place_and_the_step_and_are_unique():
    faults = own_faults()
    assert all(fault.name == name and ": " in name for name, fault in faults.items())
    assert {
        TAIL,
        "intranode.combine.send_tokens: scope of the release of combine-tail",
        "intranode.combine.send_tokens: wait for head",
        "intranode.combine.send_tokens: ring size in u32_mod",
        "intranode.combine: reset_board",
        "teams.wait_tail_past: acquire of dispatch-tail",
        "calls.meet_block: bar_red_and",
        "intranode.notify_dispatch: meet_block",
        "staging.open_stage: fence_mbarrier_init",
        "teams.publish_tail: tma_store_wait_all",
        "network.direct.quiet: tma_store_wait_all",
    } <= faults.keys()


def test_every_kind_of_step_is_there():
    kinds = {fault.kind for fault in own_faults().values()}
    expected = ["release", "acquire", "scope", "fence", "barrier", "copies", "network", "head", "reset"]
    assert kinds == {*expected, "ring size", "coherent", "wait", "extent", "turn"}


def test_every_ordering_primitive_of_the_kernels_has_a_fault():
    """A release or an acquire that the catalogue overlooks would never be broken."""
    functions = {f for k in own_kernels().values() for f in reached_from(k)}
    ordering = ("_acquire_", "_release_", "_acq_rel_")
    for function in functions:
        called = [name for name in function.__code__.co_names if any(word in name for word in ordering)]
        broken_there = {fault.step for fault in faults_of(function)}
        assert set(called) <= broken_there, function


def test_every_wait_of_the_kernels_and_every_store_of_zero_has_a_fault():
    """A wait, or a cell that becomes empty, that the catalogue overlooks would never be broken."""
    for function in {f for k in own_kernels().values() for f in reached_from(k)}:
        calls = calls_of(function_tree(function)) if not function.__closure__ else {}
        waits = {name for name in calls if is_wait(name) and not is_loop(name)}
        zeros = {
            name
            for name, nodes in calls.items()
            if name.startswith(("st_weak", "st_na", "st_relaxed", "st_shared"))
            and any(ast.unparse(node.args[1]) in ("0", "(0, 0, 0, 0)") for node in nodes)
        }
        assert waits | zeros <= {fault.step for fault in faults_of(function)}, function


# They look at several cells, or at how far others have come; what they load is a step. note_wait only takes the time.
OTHER_POLLS = {"find_batch", "find_room", "has_stalled", "must_stop", "note_wait"}
LOOP = {"wait_expired", "wait_until", "wait_or_report", "wait_for_peer"}


def test_who_polls_is_called_a_wait():
    """By its name the catalogue knows it."""
    functions = {f for k in own_kernels().values() for f in reached_from(k)}
    polls = {f.__name__ for f in functions if LOOP.intersection(f.__code__.co_names)}
    assert polls >= OTHER_POLLS
    assert {name for name in polls if not name.startswith("wait_")} <= OTHER_POLLS


def test_a_wait_that_looks_once_takes_what_it_sees():
    (wait,) = [fault for fault in faults_of(barrier) if fault.step == "wait_call"]
    assert wait.change == "wait_call: one look, which takes what it sees"
    cell = np.array([7 << peers.DIGEST_BITS], np.int32)

    def main(comm):
        stream = comm.runtime.create_stream("stream")
        comm.runtime.launch(stream, look, 1, 1, 0, seen := np.zeros(1, np.int32), cell)
        stream.synchronize()
        return int(seen[0])

    assert nbep.spawn(main, 1, "emulator") == [7 << peers.DIGEST_BITS]


def test_faults_of_a_kernel_are_those_of_all_that_it_calls():
    places = {fault.name.partition(":")[0] for fault in faults_of(combine.combine)}
    assert {"intranode.combine.coordinate", "sums.list_rows", "intranode.combine.wait_shared_tail_past"} <= places
    assert not any(place.startswith("intranode.dispatch") for place in places)


def test_a_kernel_of_a_user_has_faults_too():
    names = [fault.name for fault in faults_of(message)]
    assert names == [
        "message: acquire of FLAG",
        "message: scope of the acquire of FLAG",
        "raise_flag: release of FLAG",
        "raise_flag: scope of the release of FLAG",
    ]


def test_a_broken_step_is_broken_inside_the_block_alone():
    assert send() == [42, 1, 42]
    code = raise_flag.__code__
    with broken(faults_of(raise_flag)[0]):
        with pytest.raises(nbep.DataRace):
            send()
        assert raise_flag.__code__ is not code
    assert raise_flag.__code__ is code
    assert send() == [42, 1, 42]


def test_a_report_names_the_line_of_the_source():
    with broken(faults_of(raise_flag)[0]), pytest.raises(nbep.DataRace) as raised:
        send()
    line = raise_flag.__code__.co_firstlineno + 2
    assert f"{line} (raise_flag)" in str(raised.value)
    assert "  <- broken: " in str(raised.value)
    assert not marks, "a later run shows the source as it is"


def test_two_faults_of_one_function_are_both_there():
    plain = barrier.meet_by_adding.__code__
    with broken("barrier.meet_by_adding: syncthreads"):
        first = barrier.meet_by_adding.__code__
        with broken("barrier.meet_by_adding: release of barrier-signal"):
            names = barrier.meet_by_adding.__code__.co_names
            assert "syncthreads" not in names
            assert "atom_add_release_sys_s32" not in names
        assert barrier.meet_by_adding.__code__.co_code == first.co_code
    assert barrier.meet_by_adding.__code__ is plain


def test_an_error_inside_the_block_mends_the_function_too():
    plain = teams.wait_tail_past.__code__
    with pytest.raises(KeyError), broken("teams.wait_tail_past: acquire of dispatch-tail"):
        raise KeyError
    assert teams.wait_tail_past.__code__ is plain


def test_edited_changes_what_is_no_single_step():
    def never(tree):
        tree.body.insert(0, ast.Return())

    with edited(raise_flag, never), pytest.raises(nbep.DeadlockError):
        send()
    assert send() == [42, 1, 42]


def test_an_unknown_name_is_refused_with_names_that_are_alike():
    with pytest.raises(UnknownName, match="combine-tail"):
        fault_of("intranode.combine.send_tokens: release of the tail")
    with pytest.raises(UnknownName, match="no fault"), broken("nothing: like this"):
        pass


@pytest.mark.parametrize(
    ("name", "weaker", "arguments"),
    [
        ("ld_acquire_sys_s32", "relaxed", ("s32", "relaxed", "sys")),
        ("ld_acquire_sys_s32", "gpu", ("s32", "acquire", "gpu")),
        ("st_release_sys_s64", "gpu", ("s64", 7, "release", "gpu")),
        ("atom_add_acq_rel_gpu_s32", "cta", ("s32", 7, "acq_rel", "cta")),
        ("fence_acq_rel_sys", "gpu", ("acq_rel", "gpu")),
    ],
)
def test_a_weakened_primitive_differs_in_one_word(name, weaker, arguments, monkeypatch):
    calls = []

    class Thread:
        def note(self, *args):
            calls.append(args)

        load = store = atomic = fence = note

    made = weakened(name, weaker)
    monkeypatch.setitem(made.__globals__, "current_thread", Thread)
    made(*(0, 7)[: getattr(primitives, name).__code__.co_argcount])
    assert calls[0][-len(arguments) :] == arguments
