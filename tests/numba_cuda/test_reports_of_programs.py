"""What a newcomer reads first: the array and its index, both lines, both threads, and the call that is missing."""

import numpy as np
import pytest

from nbep.emulator.machine.errors import DataRace, OutOfBounds, Uninitialized

TABLE = np.arange(4)


def report(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value).splitlines()


@pytest.mark.usefixtures("checked")
def test_an_early_load_shows_the_line_of_the_load_too(cuda):
    @cuda.jit
    def kernel(a):
        tile = cuda.shared.array(32, np.float32)
        i = cuda.threadIdx.x
        tile[i] = a[i]
        a[i] = tile[31 - i]

    first, store, load = report(Uninitialized, lambda: kernel[1, 32](np.zeros(32, np.float32)))[:3]
    assert first.startswith("load of tile[")
    assert "tile[i] = a[i]    <- stored later by threadIdx" in store
    assert "a[i] = tile[31 - i]    <- loaded by threadIdx" in load


@pytest.mark.usefixtures("checked")
def test_dynamic_shared_memory_has_the_name_of_its_array(cuda):
    @cuda.jit
    def kernel(a):
        buf = cuda.shared.array(0, np.int32)
        order = cuda.shared.array(0, np.int32)[32:]
        i = cuda.threadIdx.x
        order[i] = 31 - i
        buf[i] = 0
        cuda.syncthreads()
        buf[i] = a[i]
        a[i] = buf[order[i]]

    first = report(DataRace, lambda: kernel[1, 32, 0, 256](np.zeros(32, np.int32)))[0]
    index = int(first.partition("buf[")[2].partition("]")[0])
    assert first.startswith(f"data race on buf[{index}] (byte {4 * index} of dynamic shared memory): cuda.sync")


def test_a_constant_array_has_its_name(cuda, memory_model):
    @cuda.jit
    def kernel(a):
        values = cuda.const.array_like(TABLE)
        a[0] = values[a.size]

    first, where = report(OutOfBounds, lambda: kernel[1, 1](np.zeros(5)))[:2]
    assert first == "load of TABLE[5]: out of bounds, the shape of `TABLE` is (4,)"
    assert "a[0] = values[a.size]    <- by threadIdx 0, blockIdx 0" in where


@pytest.mark.parametrize(("field", "element"), [("x", "a.x[4]"), ("pair", "a[4]")])
def test_a_record_that_is_not_there_is_named(cuda, memory_model, field, element):
    @cuda.jit
    def kernel(a, n):
        a[n][field] = a[n]["x"] if field == "x" else a[n]["pair"]

    records = np.zeros(4, [("x", "i4"), ("pair", "f4", 2)])
    first, where = report(OutOfBounds, lambda: kernel[1, 1](records, 4))[:2]
    assert first.startswith(f"load of {element}: out of bounds, the shape of `{element.partition('[')[0]}` is (4,)")
    assert "a[n]" in where


@pytest.mark.usefixtures("checked")
def test_a_swap_without_a_barrier_lacks_syncthreads_and_no_atomic(cuda):
    """As in the second half of a scan: each turn reads what other threads have written in the turn before."""

    @cuda.jit
    def kernel(a):
        part = cuda.shared.array(64, np.int32)
        i = cuda.threadIdx.x
        part[2 * i] = part[2 * i + 1] = 1
        cuda.syncthreads()
        turn, off = 1, 64
        while turn < 64:
            off >>= 1
            if i < turn:
                low, high = off * (2 * i + 1) - 1, off * (2 * i + 2) - 1
                part[low], part[high] = part[high], part[low] + part[high]
            turn *= 2
        a[i] = part[i]

    first = report(DataRace, lambda: kernel[1, 32](np.zeros(32, np.int32)))[0]
    assert "cuda.syncthreads() is missing" in first
