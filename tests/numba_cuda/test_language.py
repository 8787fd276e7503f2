"""What `numba.cuda` offers to kernels, against NumPy."""

from collections import namedtuple

import numpy as np
import pytest
from numba.core.errors import TypingError


def test_indices_of_three_dimensions(cuda):
    @cuda.jit
    def kernel(out):
        x, y, z = cuda.grid(3)
        if x < out.shape[0] and y < out.shape[1] and z < out.shape[2]:
            out[x, y, z] = cuda.gridsize(3)[0] * 10000 + x * 100 + y * 10 + z

    out = np.zeros((5, 3, 4), np.int64)
    kernel[(3, 2, 4), (2, 2, 1)](out)
    assert np.array_equal(out, [[[60000 + x * 100 + y * 10 + z for z in range(4)] for y in range(3)] for x in range(5)])


def test_shared_memory_and_barrier(cuda, memory_model):
    @cuda.jit
    def transpose(a, out):
        tile = cuda.shared.array((8, 8), np.float32)
        x, y = cuda.grid(2)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        tile[ty, tx] = a[y, x]
        cuda.syncthreads()
        out[cuda.blockIdx.x * 8 + ty, cuda.blockIdx.y * 8 + tx] = tile[tx, ty]

    a = np.arange(256, dtype=np.float32).reshape(16, 16)
    out = np.zeros_like(a)
    transpose[(2, 2), (8, 8)](a, out)
    assert np.array_equal(out, a.T)


def test_dynamic_shared_memory_is_one_memory(cuda):
    @cuda.jit
    def kernel(out):
        ints = cuda.shared.array(0, np.int32)
        bytes_there = cuda.shared.array(0, np.uint8)
        ints[cuda.threadIdx.x] = 0x01020304
        cuda.syncthreads()
        out[cuda.threadIdx.x] = bytes_there[4 * cuda.threadIdx.x] + bytes_there.size

    out = np.zeros(4, np.int32)
    kernel[1, 4, 0, 16](out)
    assert list(out) == [20] * 4


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64])
def test_atomics(cuda, memory_model, dtype):
    @cuda.jit
    def kernel(a, old):
        i = cuda.grid(1)
        old[i] = cuda.atomic.add(a, 0, 2)
        cuda.atomic.sub(a, 1, 1)
        cuda.atomic.max(a, 2, i)
        cuda.atomic.min(a, 3, i)

    a, old = np.array([0, 100, 0, 100], dtype), np.zeros(64, dtype)
    kernel[2, 32](a, old)
    assert list(a) == [128, 36, 63, 0]
    assert sorted(old) == list(range(0, 128, 2))


def test_an_atomic_of_one_dimension_takes_any_number_as_its_index(cuda):
    """As the slot of a hash table, which is a float64 where the variable is of uint64 and of int64 elsewhere."""

    @cuda.jit
    def insert(keys, table):
        slot = (keys[cuda.threadIdx.x] * np.uint32(7)) & np.uint32(7)
        while cuda.atomic.cas(table, slot, 0, keys[cuda.threadIdx.x]) != 0:
            slot = (slot + 1) % table.size

    keys, table = np.array([1, 9, 17, 2, 10, 3], np.uint32), np.zeros(8, np.uint32)
    insert[1, 6](keys, table)
    assert sorted(table) == [0, 0, 1, 2, 3, 9, 10, 17]


def test_atomics_of_bits_and_counters(cuda):
    @cuda.jit
    def kernel(a):
        i = cuda.threadIdx.x
        cuda.atomic.or_(a, 0, 1 << i)
        cuda.atomic.and_(a, 1, ~(1 << i))
        cuda.atomic.xor(a, 2, 1 << i)
        cuda.atomic.inc(a, 3, 10)
        cuda.atomic.dec(a, 4, 10)
        cuda.atomic.exch(a, (5,), 7)
        cuda.atomic.cas(a, 6, 5, i)

    a = np.array([0, 0xFFFFFFFF, 0xFF, 0, 3, 0, 5], np.uint32)
    kernel[1, 16](a)
    assert list(a[:6]) == [0xFFFF, 0xFFFF0000, 0xFF00, 5, 9, 7]
    assert a[6] < 16


def test_votes_shuffles_and_matches(cuda, memory_model):
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[0, i] = cuda.shfl_down_sync(0xFFFFFFFF, i, 1)
        out[1, i] = cuda.shfl_xor_sync(0xFFFFFFFF, i, 5)
        out[2, i] = cuda.ballot_sync(0xFFFFFFFF, i % 2)
        out[3, i] = cuda.all_sync(0xFFFFFFFF, i < 32)
        out[4, i] = cuda.any_sync(0xFFFFFFFF, i == 40)
        out[5, i] = cuda.match_any_sync(0xFFFFFFFF, i // 16)
        out[6, i] = cuda.popc(cuda.activemask())
        cuda.syncwarp()

    out = np.zeros((7, 32), np.int64)
    kernel[1, 32](out)
    lanes = np.arange(32)
    assert np.array_equal(out[0], np.minimum(lanes + 1, 31))
    assert np.array_equal(out[1], lanes ^ 5)
    assert set(out[2]) == {0xAAAAAAAA - 2**32}
    assert set(out[3]) == {1}
    assert set(out[4]) == {0}
    assert np.array_equal(out[5], np.where(lanes < 16, 0xFFFF, 0xFFFF0000 - 2**32))
    assert out[6].min() >= 1


def test_counts_at_barriers(cuda, memory_model):
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[0, i] = cuda.syncthreads_count(i % 3 == 0)
        out[1, i] = cuda.syncthreads_and(i < 70)
        out[2, i] = cuda.syncthreads_or(i == 71)

    out = np.zeros((3, 70), np.int64)
    kernel[1, 70](out)
    assert [set(row) for row in out] == [{24}, {1}, {0}]


def test_grid_barrier(cuda, memory_model):
    @cuda.jit
    def kernel(a):
        grid = cuda.cg.this_grid()
        i = cuda.grid(1)
        for turn in range(3):
            before = a[turn, (i + 1) % a.shape[1]]
            a[turn + 1, i] = before + 1
            grid.sync()

    a = np.zeros((4, 48), np.int32)
    kernel[3, 16](a)
    assert set(a[3]) == {3}


def test_device_functions_closures_and_recursion(cuda):
    factor = 3

    @cuda.jit(device=True)
    def times(x, by=factor):
        return x * by

    @cuda.jit(device=True)
    def fibonacci(n):
        if n < 2:
            return n
        return fibonacci(n - 1) + fibonacci(n - 2)

    @cuda.jit
    def kernel(out):
        def local(x):
            return times(x) + offset

        offset = cuda.threadIdx.x
        out[cuda.threadIdx.x] = local(10) + fibonacci(10)

    out = np.zeros(4, np.int64)
    kernel[1, 4](out)
    assert list(out) == [85, 86, 87, 88]


def test_records_tuples_and_local_arrays(cuda, memory_model):
    point = namedtuple("point", "x y")
    dtype = np.dtype([("a", np.int32), ("b", np.float64, (2,))], align=True)

    @cuda.jit
    def kernel(records, out, p, sizes):
        i = cuda.grid(1)
        mine = cuda.local.array(2, np.float64)
        for k in range(2):
            mine[k] = records[i].b[k] * p.x
        records[i].a += sizes[1]
        records[i]["b"][0] = mine[0] + mine[1]
        out[i] = p.y

    records = np.zeros(3, dtype)
    records["b"] = [[1, 2], [3, 4], [5, 6]]
    out = np.zeros(3)
    kernel[1, 3](records, out, point(2, 0.5), (10, 20))
    assert list(records["a"]) == [20] * 3
    assert list(records["b"][:, 0]) == [6, 14, 22]
    assert list(out) == [0.5] * 3


def test_constant_arrays_are_those_of_the_first_launch(cuda):
    table = np.array([5, 6, 7])

    @cuda.jit
    def kernel(out):
        there = cuda.const.array_like(table)
        out[cuda.grid(1)] = there[cuda.grid(1)] + table.size

    out = np.zeros(3)
    kernel[1, 3](out)
    table[:] = 0
    kernel[1, 3](out)
    assert list(out) == [8, 9, 10]


def test_slices_views_and_loops_over_arrays(cuda):
    @cuda.jit
    def kernel(a, out):
        total = 0.0
        for x in a[1, ::2]:
            total += x
        row = a[0]
        row[1:3] = 7
        a.T[3, 2] = 9
        out[0] = total + len(a) + a.ndim
        for i, pair in enumerate(zip(a[2], a[0])):  # noqa: B905
            out[1] += i * pair[0]

    a = np.arange(12.0).reshape(3, 4)
    out = np.zeros(2)
    kernel[1, 1](a, out)
    assert list(a[0]) == [0, 7, 7, 3]
    assert a[2, 3] == 9
    assert list(out) == [4 + 6 + 3 + 2, 9 + 2 * 10 + 3 * 9]


def test_random_numbers_are_numbas(cuda):
    from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32

    @cuda.jit
    def kernel(states, out):
        i = cuda.grid(1)
        out[i] = xoroshiro128p_uniform_float32(states, i)

    out = np.zeros(64, np.float32)
    kernel[2, 32](create_xoroshiro128p_states(64, seed=42), out)
    assert np.allclose(out[:3], [0.48312977, 0.03927229, 0.94123656], rtol=1e-6)


def test_bits_and_selection(cuda):
    @cuda.jit
    def kernel(out, x):
        out[0] = cuda.popc(x)
        out[1] = cuda.clz(x)
        out[2] = cuda.ffs(x)
        out[3] = cuda.brev(x)
        out[4] = cuda.selp(x > 3, 10, 20)
        out[5] = cuda.fma(2.0, 3.0, 4.0)
        out[6] = cuda.laneid + cuda.warpsize

    out = np.zeros(7, np.int64)
    kernel[1, 1](out, np.uint32(0b1011000))
    assert list(out) == [3, 25, 4, 0b1101 << 25, 10, 10, 32]


def test_signatures_convert_arguments(cuda):
    @cuda.jit("void(float64[:], int32)")
    def kernel(out, x):
        out[0] = x / 2

    out = np.zeros(1)
    kernel[1, 1](out, np.int8(3))
    assert out[0] == 1.5


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        (0, 1, "griddim"),
        (1, 1025, "blockdim"),
        (1, (32, 33), "1056 threads"),
        ((1, 1, 1, 1), 1, "griddim"),
        (1.5, 1, "griddim"),
    ],
)
def test_launches_that_a_gpu_refuses(cuda, grid, block, words):
    @cuda.jit
    def kernel(out):
        out[0] = 1

    with pytest.raises((ValueError, TypeError), match=words):
        kernel[grid, block](np.zeros(1))


def test_what_is_none_or_a_number(cuda):
    @cuda.jit(device=True)
    def found(x):
        return x if x > 0 else None

    @cuda.jit(device=True)
    def place(x, most):
        if x == most:
            return most - 1
        if x < 0:
            return None
        return np.int32(x)

    @cuda.jit
    def kernel(out):
        x = cuda.threadIdx.x - 2
        out[x + 2, 0] = found(x) is None
        out[x + 2, 1] = place(x, 3) != None  # noqa: E711 - Numba takes both
        y = None
        if x == 1:
            y = x
        elif x == 2:
            y = 2.5
        if y is not None:
            y += 1
            out[x + 2, 2] = y * 2 + place(x, 3)
        z = 7
        if x == 3:
            z = place(x, 3)
        out[x + 2, 3] = z

    out = np.zeros((6, 4))
    kernel[1, 6](out)
    wanted = [[1, 0, 0, 7], [1, 0, 0, 7], [1, 1, 0, 7], [0, 1, 5, 7], [0, 1, 9, 7], [0, 1, 0, 2]]
    assert out.tolist() == wanted


def test_none_where_a_number_is_needed_is_an_error_and_an_optional_no_condition(cuda):
    @cuda.jit(device=True)
    def found(x):
        return x if x > 1 else None

    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = found(cuda.threadIdx.x + 1)

    with pytest.raises(TypeError, match=r"line \d+, tid=\[0, 0, 0\] ctaid=\[0, 0, 0\]: expected int64, got None"):
        kernel[1, 2](np.zeros(2))

    @cuda.jit
    def if_there(out):
        if found(out[0]):
            out[0] = 1

    @cuda.jit
    def at_place(out):
        out[found(cuda.threadIdx.x)] = 1

    for kernel, what in (if_there, "Optional.* is no condition"), (at_place, "an index of type Optional"):
        with pytest.raises(TypingError, match=what):
            kernel[1, 1](np.zeros(1))
