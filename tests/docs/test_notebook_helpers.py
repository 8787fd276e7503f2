"""The helpers that notebooks break kernels with."""

import pytest

from nbep.device import primitives
from nbep.device.kernels.intranode import dispatch
from nbep.device.protocols import barrier, waits
from nbep.lab.notebook import clean, edit, explain, first_failure, fold, holds, show


def test_an_edit_reaches_whoever_calls_the_function_and_ends_with_the_block(capsys):
    meet = barrier.barrier_block.__code__
    with edit(barrier.barrier_block, "ptx.atom_add_release_sys_s32(", "ptx.atom_add_relaxed_sys_s32("):
        assert "atom_add_release_sys_s32" not in barrier.barrier_block.__code__.co_names
        with edit(barrier.barrier_block, "own_signal, 1)", "own_signal, 2)"):
            assert "atom_add_release_sys_s32" not in barrier.barrier_block.__code__.co_names
            assert 2 in barrier.barrier_block.__code__.co_consts
    assert barrier.barrier_block.__code__ is meet
    printed = capsys.readouterr().out
    assert "-        ptx.atom_add_release_sys_s32(" in printed
    assert "+        ptx.atom_add_relaxed_sys_s32(" in printed


def test_an_edit_may_use_a_primitive_that_the_module_does_not_import():
    assert not hasattr(dispatch, "st_weak_s32")
    with edit(dispatch.wait_announced, "waiter = Waiter", "st_weak_s32(cell, 0)\n    waiter = Waiter"):
        assert dispatch.st_weak_s32 is primitives.st_weak_s32
    assert not hasattr(dispatch, "st_weak_s32")


def test_an_edited_function_keeps_its_place_in_the_source():
    before = dispatch.wait_announced.__code__
    with edit(dispatch.wait_announced, "-value - 1", "-value"):
        after = dispatch.wait_announced.__code__
        assert (after.co_filename, after.co_firstlineno) == (before.co_filename, before.co_firstlineno)


@pytest.mark.parametrize(
    ("old", "found"),
    [("no such text", "stands 0 times"), ("waiter", "\n  waiter = Waiter(DISPATCH_RECEIVER_OFFSETS, peer, channel)")],
)
def test_a_text_that_does_not_stand_there_once_is_refused(old, found):
    with pytest.raises(ValueError, match="must be once") as caught, edit(dispatch.wait_announced, old, "x"):
        pass
    assert found in str(caught.value)


def test_show_prints_outside_a_notebook(capsys):
    show(dispatch.wait_announced)
    assert "def wait_announced(cell, bounds, peer, channel):" in capsys.readouterr().out


def test_a_fold_prints_its_title_and_the_source_outside_a_notebook(capsys):
    fold("The wait", dispatch.wait_announced)
    assert capsys.readouterr().out.startswith("The wait\n\n@device_function\ndef wait_announced(")


def even_seeds_fail(seed):
    if seed == 3:
        raise ValueError("three")
    assert seed % 2


def test_the_first_failing_seed_is_found():
    failure = first_failure(even_seeds_fail, range(1, 10))
    assert (failure.seed, type(failure.error)) == (2, AssertionError)
    assert str(first_failure(even_seeds_fail, range(1, 10), ValueError)) == "seed 3, ValueError: three"


def test_a_report_is_printed_if_it_is_the_one_that_the_page_explains(capsys):
    failure = first_failure(even_seeds_fail, [3])
    explain(failure, "ValueError", cell="three", lines=0)
    assert capsys.readouterr().out == "\n... and 1 lines more\n"
    for kind, words in (("KeyError", {}), ("ValueError", {"cell": "tail"}), ("ValueError", {"line": "st_weak"})):
        with pytest.raises(AssertionError, match="three"):
            explain(failure, kind, **words)


def test_no_failure_where_one_is_asked_for_is_an_error():
    with pytest.raises(LookupError, match="no Exception in 2 runs"):
        first_failure(even_seeds_fail, [1, 5])


def test_a_mistake_in_the_attempt_is_not_taken_for_a_fault():
    with pytest.raises(NameError):
        first_failure(lambda seed: no_such_name, [1])  # noqa: F821


def test_a_failure_where_none_may_be_is_passed_on():
    assert holds(even_seeds_fail, [1, 5, 7]) == "no failure in 3 runs"
    with pytest.raises(AssertionError):
        holds(even_seeds_fail, [1, 2])


def test_reports_lose_paths_and_line_numbers():
    report = f"at {waits.__file__}:12 (f), called from /tmp/ipykernel_5/77.py:3 (g)"
    assert clean(report) == "at nbep/device/protocols/waits.py (f), called from <this notebook> (g)"
