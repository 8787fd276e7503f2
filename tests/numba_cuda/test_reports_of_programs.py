"""What a newcomer reads first: the array and its index, both lines, both threads, and the call that is missing."""

import numpy as np
import pytest

from nbep.emulator.machine.errors import DataRace, EmulatorError, OutOfBounds, Uninitialized
from nbep.lab.numba_cuda.code import exec_with_source

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


# Three programs as a newcomer writes them: what is wrong, where, and what to write stands in each report.
NEWCOMERS = {
    "a reduction without a barrier": (
        ["cache = cuda.shared.array(64, np.float32)", "cache[i] = a[i]", "s = 32", "while s > 0:", "    if i < s:",
         "        cache[i] += cache[i + s]", "    s //= 2", "if i == 0: out[0] = cache[0]"],
        ["no thread has written so far, but one does later: cuda.syncthreads() is missing", "5: cache[i] = a[i]  ",
         "9: cache[i] += cache[i + s]    <- loaded by threadIdx", "  write cuda.syncthreads() after line 5"],
    ),
    "a reduction with one barrier": (
        ["cache = cuda.shared.array(64, np.float32)", "cache[i] = a[i]", "cuda.syncthreads()", "s = 32", "while s > 0:",
         "    if i < s:", "        cache[i] += cache[i + s]", "    s //= 2", "if i == 0: out[0] = cache[0]"],
        ["cuda.syncthreads() is missing between these two accesses", "<- stored by thread", "<- loaded by thread",
         "  write cuda.syncthreads() after line 11, at the end of each iteration of the loop"],
    ),
    "a histogram of two lines": (
        ["b = i % 8", "count = out[b]", "out[b] = count + 1"],
        ["data race on out[", "several threads change it at once: this needs an atomic, such as cuda.atomic.add",
         "6: out[b] = count + 1    <- stored by", "  write cuda.atomic.add(out, b, 1) in place of lines 5 and 6"],
    ),
    "a flag of the grid, and a block that returns": (
        ["if i >= 12: return", "cuda.atomic.add(out, 0, 1)", "while cuda.atomic.add(out, 0, 0) < 16: pass"],
        ["endless loop", "out[0] holds 12", "; wanted: 16", "  blockIdx 3 has left by the `return` in line 4",
         ", before line 5: cuda.atomic.add(out, 0, 1); let them do that before they return, or do not wait for them"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWCOMERS)
@pytest.mark.usefixtures("checked")
def test_a_newcomer_reads_what_is_wrong_where_and_what_to_write(cuda, name):
    lines, words = NEWCOMERS[name]
    names = {"cuda": cuda, "np": np}
    body = "".join(f"    {line}\n" for line in lines)
    exec_with_source(f"@cuda.jit\ndef kernel(a, out):\n    i = cuda.grid(1)\n{body}", names)
    blocks, threads = (4, 4) if "grid" in name else (1, 64)
    with pytest.raises(EmulatorError) as caught:
        names["kernel"][blocks, threads](np.ones(64, np.float32), np.zeros(8, np.int32))
    assert all(text in str(caught.value) for text in words), caught.value
