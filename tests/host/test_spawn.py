"""nbep.spawn: one function, once per rank."""

import traceback

import numpy as np
import pytest
from processes import run_python
from target import TARGET, spawn

import nbep
import nbep.lab.trace


def test_results_come_back_by_rank_and_args_arrive():
    assert spawn(lambda comm, a, b: (comm.rank, a, b), 3, args=(1, "two")) == [(rank, 1, "two") for rank in range(3)]


def test_a_single_rank_runs():
    assert spawn(lambda comm: comm.allgather(comm.size), 1) == [[1]]


class OwnError(Exception):
    pass


def fail_on_rank_2(comm):
    if comm.rank == 2:
        raise OwnError("rank 2 gives up")
    comm.barrier()


def test_a_failing_rank_ends_the_spawn_with_its_own_traceback():
    with pytest.raises(OwnError, match="rank 2 gives up") as failure:
        spawn(fail_on_rank_2, 4)
    assert "rank 2" in "".join(failure.value.__notes__)
    assert [frame.name for frame in traceback.extract_tb(failure.tb)][-1] == "fail_on_rank_2"


@pytest.mark.emulator_only("a GPU's kernels end when their waits time out")
def test_a_failing_rank_ends_kernels_that_wait_for_it(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        arguments = inputs(buffer)
        if comm.rank == 1:
            raise OwnError("before dispatch")
        buffer.dispatch(**arguments)

    with pytest.raises(OwnError, match="before dispatch"):
        spawn(main, 2)


def test_a_spawn_after_a_failed_one_starts_afresh():
    with pytest.raises(OwnError):
        spawn(fail_on_rank_2, 3)
    assert spawn(lambda comm: comm.rank, 2) == [0, 1]


def test_without_a_gpu_cuda_is_refused_and_auto_is_the_emulator(monkeypatch):
    monkeypatch.setattr("nbep.host.target.cuda.driver.unusable_reason", lambda: "no driver")
    with pytest.raises(RuntimeError, match="target: got cuda; no GPU can be used here: no driver"):
        nbep.spawn(lambda comm: None, 2, target="cuda")
    assert nbep.spawn(lambda comm: comm.runtime.target, 2, target="auto") == ["emulator"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "fn: got int; must be callable"),
        ({"num_ranks": 0}, "num_ranks: got 0; must be an integer of at least 1"),
        ({"num_ranks": 2.0}, "num_ranks: got 2.0; must be an integer of at least 1"),
        ({"seed": "a"}, "seed: got 'a'; must be an integer"),
        ({"seed": 1.0}, "seed: got 1.0; must be an integer"),
        ({"target": "gpu"}, "target: got 'gpu'; must be one of auto, emulator, cuda"),
        ({"memory_model": "tso"}, "memory_model: got 'tso'; must be sc, delayed, checked"),
        ({"memory_model": ["sc"]}, r"memory_model: got \['sc'\]; must be sc, delayed, checked"),
        ({"args": 3}, "args: got int; must be a tuple or a list, what fn takes besides comm"),
        ({"args": "ab"}, "args: got str; must be a tuple or a list, what fn takes besides comm"),
        ({"on_failure": "stop"}, "on_failure: got str; must be callable, or None"),
        ({"on_deadlock": np.zeros(2)}, "on_deadlock: got array.*; must be raise or expire"),
        ({"target": np.zeros(2)}, "target: got array.*; must be one of auto"),
        ({"on_deadlock": "wait"}, "on_deadlock: got 'wait'; must be raise or expire"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, message):
    ran = []
    with pytest.raises(ValueError, match=message):
        nbep.spawn(**{"fn": ran.append, "num_ranks": 2, "target": TARGET, **arguments})
    assert ran == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tracer": "trace"}, "tracer: got str; must have some of on_load, "),
        ({"tracer": nbep.lab.trace.Trace}, r"tracer: got the class Trace; must be an object, as Trace\(\)"),
        ({"strategy": 3}, "strategy: got 3; must be uniform, "),
        ({"strategy": None}, "strategy: got None; must be uniform, "),
    ],
)
def test_what_only_the_emulator_takes_is_refused_before_anything_runs(arguments, message):
    ran = []
    with pytest.raises(ValueError, match=message):
        nbep.spawn(ran.append, 2, "emulator", **arguments)
    assert ran == []


def test_import_loads_neither_numba_nor_mpi():
    code = "import nbep, sys; print(sorted({'numba', 'mpi4py'} & set(sys.modules)))"
    assert run_python("-c", code).strip() == "[]"
