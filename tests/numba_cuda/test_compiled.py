"""Kernels as machine code: what they do, what they find, and the choices of the run are those of Python."""

import contextlib
import io
import itertools
import math
from pathlib import Path

import nbep.numba_cuda
import numpy as np
import pytest
from parts import both_parts

from nbep.device import engine
from nbep.emulator.engine import EngineError, Stopped, state
from nbep.lab.numba_cuda import rehearsal, script, session

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples" / "numba").glob("*.py"))
FINDS = "early", "hang", "histogram", "reduce"  # something, with "checked"


def everything(name, memory_model, seed, run):
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
            nbep.numba_cuda.options(engine=name, memory_model=memory_model, seed=seed),
        ):
            run()
    except Exception as found:
        error = type(found).__name__, str(found), getattr(found, "__notes__", [])
    finally:
        rehearsal.rehearse = whole
    world = session.latest_world()
    return (printed.getvalue(), error, world.counters, world.random.random()), stops


@pytest.mark.parametrize("seed", both_parts([0], [5]))
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


def random_numbers(cuda):
    from numba.cuda import random

    @cuda.jit
    def draw(states, out):
        i = cuda.grid(1)
        for _ in range(3):
            out[i] += random.xoroshiro128p_uniform_float32(states, i) * random.xoroshiro128p_normal_float64(states, i)

    states = random.create_xoroshiro128p_states(64, seed=1)
    return draw[2, 32], states.copy_to_host(), np.zeros(64)


def records(cuda):
    """Neighbouring fields of a record are stored by two threads: no race."""
    pair = np.dtype([("x", "f4"), ("list", "i2", (2,)), ("in", [("n", "i8"), ("b", "u1")])], align=True)

    @cuda.jit
    def fields(a, one, out):
        i = cuda.threadIdx.x
        own, tile = cuda.local.array(2, pair), cuda.shared.array(32, pair)
        own[1].list[0] = 5
        a[i].list[1] += own[1]["list"][0]
        a.x[31 - i] = a[i]["in"].n * one.x
        cuda.syncthreads()
        tile[i] = a[i]
        cuda.syncthreads()
        a[i] = tile[31 - i]
        out[i] = a["in"]["n"][i] + a[i].x

    a = np.zeros(32, pair)
    a["in"]["n"] = range(32)
    a["x"][1] = 0.5
    return fields[1, 32], a, a[1], np.zeros(32)


def grids(cuda):
    @cuda.jit
    def rows(a):
        column, grid = cuda.grid(1), cuda.cg.this_grid()
        for row in range(1, a.shape[0]):
            a[row, column] = a[row - 1, a.shape[1] - column - 1] + 1
            grid.sync()

    return rows[3, 40], np.zeros((5, 120))


def dynamic(cuda):
    @cuda.jit
    def turn(a):
        tile, i = cuda.shared.array(0, np.int32), cuda.threadIdx.x
        tile[i] = a[i]
        cuda.syncthreads()
        a[i] = tile[tile.shape[0] - 1 - i] + tile.strides[0]

    return turn[1, 8, 0, 32], np.arange(8, dtype=np.int32)


def constants(cuda):
    weights, four = np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(4)

    @cuda.jit(device=True)
    def scaled(x, by):
        return x * by

    @cuda.jit
    def total(out):
        i = cuda.threadIdx.x
        for n in cuda.const.array_like(weights).shape:
            out[()] += n
        roots = cuda.local.array(3, np.float32)
        np.sqrt(weights[1], roots)
        out[()] += math.nextafter(roots[0], roots[1]) + math.pow(1.1, i + 9)
        cuda.atomic.add(out, (), roots[2] + scaled(i / 3, weights[i % 2, i % 3]) / 2 + four[()])

    return total[1, 1], np.array(0.0)


@pytest.mark.parametrize("memory_model", ["sc", "checked"])
@pytest.mark.parametrize("made", [random_numbers, records, grids, dynamic, constants])
def test_a_kernel_is_the_same_run(cuda, made, memory_model):
    launch, *given = made(cuda)
    results = []
    for name in ("python", "compiled"):
        arrays = [one.copy() for one in given]
        run, stops = everything(name, memory_model, 5, lambda: launch(*arrays))  # noqa: B023
        assert run[1] is None
        assert stops == [None] * (name == "compiled")
        results.append((run, [str(one.tolist()) for one in arrays]))
    assert results[0] == results[1]


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

    @cuda.jit
    def grid(a):
        if cuda.threadIdx.x == 3:
            cuda.cg.this_grid().sync()
        else:
            cuda.cg.this_grid().sync()

    @cuda.jit
    def field(a):
        pairs = cuda.shared.array(16, PAIR)
        pairs[0].y = a[cuda.threadIdx.x]

    return {one.__name__: one for one in (outside, unwritten, raises, apart, lane, grid, field)}


PAIR = np.dtype([("x", "i8"), ("y", "i8")])


@pytest.mark.parametrize("name", ["outside", "unwritten", "raises", "apart", "lane", "grid", "field"])
def test_a_mistake_is_explained_by_python(cuda, name):
    """The arrays of the launch are as before when Python runs it."""
    kernel, model = wrongs(cuda)[name], "checked" if name == "field" else "sc"
    runs, left = [], []
    for tier in ("python", "compiled"):
        given = cuda.device_array(16) if name == "outside" else np.zeros(16)
        runs.append(everything(tier, model, 0, lambda: kernel[1, 16](given)))  # noqa: B023
        left.append(np.array(given).tobytes())
    (by_python, _), (compiled, stops) = runs
    assert compiled == by_python
    assert left[0] == left[1]
    assert compiled[1] is not None
    assert stops[0] is not None


def test_what_python_does_not_find_is_an_error(cuda, monkeypatch):
    """One of the two is wrong then."""
    kernel = wrongs(cuda)["outside"]
    stopped = Stopped("an access out of bounds", must_fail=True)
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: stopped)
    with nbep.numba_cuda.options(engine="compiled"), pytest.raises(EngineError, match="the same seed fails nowhere"):
        kernel[1, 8](np.zeros(16))


def test_an_array_of_the_device_that_is_a_global_is_the_same_run(cuda):
    def run():
        there = cuda.to_device(np.arange(6.0).reshape(2, 3))

        @cuda.jit
        def turn(a):
            i = cuda.threadIdx.x
            a[i] = there[1, i] + there.shape[0]
            there[0, i] = a[i]

        a = np.zeros(3)
        for _ in range(2):
            turn[1, 3](a)
        print(a, there.copy_to_host())

    by_python, _ = everything("python", "checked", 0, run)
    compiled, stops = everything("compiled", "checked", 0, run)
    assert compiled == by_python
    assert stops == [None, None]


def test_what_is_not_compiled_is_interpreted_or_refused(cuda):
    @cuda.jit
    def counts(a):
        a[0] = cuda.popc(cuda.activemask())

    @cuda.jit
    def late(a):
        for i in range(a.size):
            last = i
        a[0] = last

    @cuda.jit("int32(float64)", device=True)
    def whole(x):
        return x

    @cuda.jit
    def declared(a):
        a[0] = whole(a[1])

    for kernel, reason in (
        (counts, "has `cuda.activemask`"),
        (late, "variable last may have no value"),
        (declared, "has `whole`"),
    ):
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


@pytest.mark.parametrize(
    ("before", "is_kept", "threads", "engines"),
    [
        (0, False, 6400, "PP"),
        (0, True, 6400, "CC"),
        (0, True, 64, "PP"),  # the engine is not worth loading
        (2000, True, 1536, "PC"),
        (9999, True, 64, "P" * 40),  # a launch that is known to have few calls
        (9_999_999, False, 6400, "CC"),
        (9_999_999, False, 64, "PP"),
        (0, False, 40_000, "CC"),  # another run than Python's, whatever is kept
    ],
)
def test_auto_compiles_what_is_worth_it(cuda, monkeypatch, before, is_kept, threads, engines):
    """A kernel keeps the globals of its first launch, whoever runs the next one."""
    step = 2

    @cuda.jit
    def add(a):
        i = cuda.grid(1)
        if i < a.size:
            a[i] += step

    def run():
        nonlocal step
        for _ in engines:
            waits.append(len(stops))
            add[threads // 64, 64](a)
            step += 1

    a, waits, stops = np.zeros(threads), [], []
    whole = rehearsal.rehearse
    monkeypatch.setattr(rehearsal, "rehearse", lambda *given: stops.append(whole(*given)))
    monkeypatch.setattr(session, "_by_python", before)
    for module in (session, engine):
        monkeypatch.setattr(module, "is_kept", lambda *_: is_kept)
    with nbep.numba_cuda.options(engine="auto"):
        run()
    waits.append(len(stops))
    assert "".join("PC"[after - one] for one, after in itertools.pairwise(waits)) == engines
    assert (a == 2 * len(engines)).all()


def test_more_blocks_than_stacks_and_clocks(cuda):
    """Blocks take the stacks of those that have left, and under `checked` their clocks."""

    @cuda.jit
    def fill(out, total):
        i = cuda.grid(1)
        out[i] = i
        cuda.atomic.add(total, 0, 1)

    count = (state.MOST_CLOCKS + 64) * 32
    for memory_model in ("sc", "checked"):
        out, total = cuda.device_array(count, np.int32), np.zeros(1, np.int32)
        _, stops = everything("compiled", memory_model, 0, lambda: fill[count // 128, 128](out, total))  # noqa: B023
        assert stops == [None]
        out = out.copy_to_host()
        assert total[0] == count
        assert (out == np.arange(count)).all()
