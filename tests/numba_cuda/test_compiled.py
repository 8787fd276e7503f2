"""Kernels as machine code: what they do, what they find, and the choices of the run are those of Python."""

import contextlib
import io
from pathlib import Path

import nbep.numba_cuda
import numpy as np
import pytest

from nbep.emulator.engine import EngineError, Stopped, state
from nbep.lab.numba_cuda import rehearsal, script, session

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples" / "numba").glob("*.py"))
FINDS = "early", "hang", "histogram", "reduce"  # something, with "checked"


def everything(engine, memory_model, seed, run):
    """What a run prints, what it fails with, its counters and its next choice; and what has stopped machine code."""
    stops = []

    def rehearse(*given):
        stops.append(whole(*given))
        return stops[-1]

    whole, printed, error = rehearsal.rehearse, io.StringIO(), None
    rehearsal.rehearse = rehearse
    try:
        with (
            contextlib.redirect_stdout(printed),
            nbep.numba_cuda.options(engine=engine, memory_model=memory_model, seed=seed),
        ):
            run()
    except Exception as found:
        error = type(found).__name__, str(found), getattr(found, "__notes__", [])
    finally:
        rehearsal.rehearse = whole
    world = session.latest_world()
    return (printed.getvalue(), error, world.counters, world.random.random()), stops


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("memory_model", ["sc", "checked"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_the_same_run(path, memory_model, seed):
    by_python, no_stops = everything("python", memory_model, seed, lambda: script.run(path))
    compiled, stops = everything("compiled", memory_model, seed, lambda: script.run(path))
    assert compiled == by_python
    assert stops
    assert not no_stops
    assert any(stops) == (by_python[1] is not None)
    if memory_model == "checked":
        assert any(stops) == (path.stem in FINDS)


def wrongs(cuda):
    """Kernels with a mistake each, for 16 threads."""

    @cuda.jit
    def outside(a):
        a[cuda.threadIdx.x + 1] = 1

    @cuda.jit
    def unwritten(a):
        part = cuda.local.array(4, np.float64)
        part[0] = 1
        a[0] = part[cuda.threadIdx.x]

    @cuda.jit
    def raises(a):
        if cuda.threadIdx.x == 3:
            raise ValueError("three")

    @cuda.jit
    def apart(a):
        if cuda.threadIdx.x < 8:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    @cuda.jit
    def lane(a):
        a[cuda.threadIdx.x] = cuda.shfl_sync(0xFF, a[cuda.threadIdx.x], 9)

    return {one.__name__: one for one in (outside, unwritten, raises, apart, lane)}


@pytest.mark.parametrize("name", ["outside", "unwritten", "raises", "apart", "lane"])
def test_a_mistake_is_explained_by_python(cuda, name):
    """The arrays of the launch are as before when Python runs it."""
    kernel, given = wrongs(cuda)[name], np.zeros(16)
    runs = [everything(engine, "sc", 0, lambda: kernel[1, 16](given)) for engine in ("python", "compiled")]
    (by_python, _), (compiled, stops) = runs
    assert compiled == by_python
    assert compiled[1] is not None
    assert stops[0] is not None


def test_what_python_does_not_find_is_an_error(cuda, monkeypatch):
    """One of the two is wrong then."""
    kernel = wrongs(cuda)["outside"]
    stopped = Stopped("an access out of bounds", must_fail=True)
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: stopped)
    with nbep.numba_cuda.options(engine="compiled"), pytest.raises(EngineError, match="the same seed fails nowhere"):
        kernel[1, 8](np.zeros(16))


def test_what_is_not_compiled_is_interpreted_or_refused(cuda):
    @cuda.jit
    def counts(a):
        a[0] = cuda.popc(cuda.activemask())

    @cuda.jit
    def late(a):
        for i in range(a.size):
            last = i
        a[0] = last

    for kernel, reason in ((counts, "has `cuda.activemask`"), (late, "uninitialized variable last")):
        with nbep.numba_cuda.options(engine="auto"):
            kernel[1, 2](np.zeros(2))
        with (
            nbep.numba_cuda.options(engine="compiled"),
            pytest.raises(ValueError, match=f"`{kernel.__name__}`.*{reason}"),
        ):
            kernel[1, 2](np.zeros(2))
    with (
        pytest.raises(ValueError, match="memory_model 'delayed' is interpreted"),
        nbep.numba_cuda.options(engine="compiled", memory_model="delayed"),
    ):
        counts[1, 2](np.zeros(2))


def test_more_blocks_than_stacks_and_clocks(cuda):
    """Blocks take the stacks of those that have left, and under `checked` their clocks."""

    @cuda.jit
    def fill(out, total):
        i = cuda.grid(1)
        out[i] = i
        cuda.atomic.add(total, 0, 1)

    count = (state.MOST_CLOCKS + 64) * 32
    for memory_model in ("sc", "checked"):
        out, total = np.zeros(count, np.int32), np.zeros(1, np.int32)
        _, stops = everything("compiled", memory_model, 0, lambda: fill[count // 128, 128](out, total))  # noqa: B023
        assert stops == [None]
        assert total[0] == count
        assert (out == np.arange(count)).all()
