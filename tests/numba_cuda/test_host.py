"""What the host gets from `numba.cuda`: arrays of the device, ufuncs, streams of other libraries, messages of Numba."""

import threading

import nbep.numba_cuda
import numpy as np
import pytest

from nbep.emulator.machine.errors import DeadlockError
from nbep.lab.numba_cuda import launch


def test_transpose_of_a_device_array_is_a_copy(cuda):
    a = np.arange(12.0).reshape(3, 4)
    there = cuda.to_device(a)
    turned = there[::2, ::2].T
    there[0, 0] = 9
    assert np.array_equal(turned.copy_to_host(), a[::2, ::2].T)
    assert turned.strides == (16, 8)
    with pytest.raises(NotImplementedError, match="non-2D"):
        cuda.device_array((2, 2, 2)).transpose()


def test_device_arrays_are_made_of_other_memory(cuda):
    there = cuda.to_device(np.arange(6.0))
    part = there[2:]
    made = cuda.cudadrv.devicearray.DeviceNDArray((2, 4), (0, 8), np.float64, gpu_data=part.gpu_data)
    assert np.array_equal(made.copy_to_host(), [[2, 3, 4, 5]] * 2)


def test_ufuncs_of_the_device(cuda, memory_model):
    @cuda.vectorize(["float32(float32, float32)"])
    def fused(a, b):
        return a * b + 1

    a = np.arange(1, 6, dtype=np.float32)
    assert np.array_equal(fused(a, np.float32(2)), 2 * a + 1)
    assert fused.reduce(a) == ((((1 * 3 + 1) * (2 * 4 + 1)) + 1) * 5) + 1

    @cuda.guvectorize(["(float64[:,:], float64[:,:], float64[:,:])"], "(m,n),(n,p)->(m,p)")
    def matmul(a, b, c):
        for i in range(a.shape[0]):
            for j in range(b.shape[1]):
                total = 0.0
                for k in range(a.shape[1]):
                    total += a[i, k] * b[k, j]
                c[i, j] = total

    left, right = np.arange(24.0).reshape(2, 3, 4), np.arange(16.0).reshape(2, 4, 2)
    assert np.allclose(matmul(left, right), left @ right)


def test_an_array_of_another_library_brings_its_stream(cuda):
    stream = cuda.stream()

    class Other:
        __cuda_array_interface__ = cuda.device_array(4, stream=stream).__cuda_array_interface__

    assert Other.__cuda_array_interface__["stream"] == int(stream)
    taken = cuda.as_cuda_array(Other())
    assert taken.stream.external
    assert int(taken.stream) == int(stream)
    assert cuda.external_stream(int(stream)).external
    with pytest.raises(NotImplementedError, match="other libraries"):
        cuda.external_stream(1)


def test_an_exception_says_where_and_by_whom(cuda):
    @cuda.jit(debug=True, opt=False)
    def kernel(a):
        if cuda.grid(1) == 5:
            raise ValueError("five")

    with pytest.raises(
        ValueError, match=r"In function 'kernel', file .*, line \d+, tid=\[1, 0, 0\] ctaid=\[1, 0, 0\]: five"
    ):
        kernel[2, 4](np.zeros(1))


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ("n", "shape=int64"),
        ("[4, 5]", "shape=list(int64)<iv=[4, 5]>"),
        ("(2, n)", "shape=Tuple(Literal[int](2), int64)"),
    ],
)
def test_a_shape_that_is_not_known_is_refused_in_words_of_numba(cuda, shape, given):
    from numba.core.errors import TypingError
    from numba.cuda.core import errors

    from nbep.lab.numba_cuda.code import exec_with_source

    names = {"cuda": cuda, "np": np}
    exec_with_source(f"@cuda.jit\ndef kernel(n):\n    s = cuda.shared.array({shape}, dtype=np.float32)\n", names)
    for error in (TypingError, errors.TypingError):
        with pytest.raises(error, match="No implementation of function") as raised:
            names["kernel"][1, 1](3)
        assert f">>> array({given}, dtype=class(" in str(raised.value)


def test_a_field_across_its_alignment_is_refused(cuda):
    @cuda.jit
    def kernel(records):
        records[0].a = records[0].b

    with pytest.raises(Exception, match="type float64 is not aligned"):
        kernel[1, 1](np.zeros(2, np.dtype([("a", "i4"), ("b", "f8")])))
    kernel[1, 1](np.zeros(2, np.dtype([("a", "i4"), ("b", "f8")], align=True)))


def test_a_variable_without_a_value_is_an_error_of_who_comes_there(cuda):
    @cuda.jit
    def kernel(out, n):
        if n > 0:
            c = 1
            out[0] = c
        else:
            c += 1
            out[0] = c

    out = np.zeros(1)
    kernel[1, 1](out, 1)
    assert out[0] == 1
    with pytest.raises(UnboundLocalError, match="'c'"):
        kernel[1, 1](out, 0)


def test_print_of_more_than_32_values_prints_their_formats(cuda, capsys):
    from numba.core.errors import NumbaWarning

    @cuda.jit
    def kernel(x):
        print(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28,
              29, 30, 31, 32, x)  # fmt: skip

    with pytest.warns(NumbaWarning, match="more than 32 items"):
        kernel[1, 1](1.5)
    cuda.synchronize()
    assert capsys.readouterr().out == f"{'%lld ' * 32}%f\n"


def test_reductions_of_numpy(cuda):
    values = np.array([3.0, np.nan, -1.5, 2.0])

    @cuda.jit
    def kernel(a, out):
        out[0] = np.sum(a)
        out[1] = np.nansum(a)
        out[2] = np.nanmin(a)
        out[3] = np.nanmax(a)
        out[4] = np.nanmean(a)
        out[5] = np.nanprod(a)
        out[6] = np.count_nonzero(a)

    out = np.zeros(7)
    kernel[1, 1](values, out)
    names = ("sum", "nansum", "nanmin", "nanmax", "nanmean", "nanprod", "count_nonzero")
    assert np.allclose(out, [getattr(np, name)(values) for name in names], equal_nan=True)


def test_fastmath_divides_by_zero_where_debug_raises(cuda):
    def divide(out, x, y):
        out[0] = x / y

    out = np.zeros(1, np.float32)
    zero = np.float32(0)
    with pytest.raises(ZeroDivisionError):
        cuda.jit(debug=True, opt=False)(divide)[1, 1](out, np.float32(1), zero)
    cuda.jit(debug=True, opt=False, fastmath=True)(divide)[1, 1](out, np.float32(1), zero)
    assert out[0] == np.inf


# Threads, bytes of dynamic shared memory -> blocks on an SM of an H100: at most 32, 64 warps, 228 KiB with 1 KiB each.
@pytest.mark.parametrize(
    ("threads", "dynamic", "blocks"),
    [(1, 0, 32), (64, 0, 32), (65, 0, 21), (1024, 0, 2), (32, 12 << 10, 17), (1, 48 << 10, 4), ((8, 32), 0, 8)],
)
def test_a_cooperative_launch_has_at_most_the_blocks_that_are_there_at_once(cuda, threads, dynamic, blocks):
    @cuda.jit
    def kernel(counts):
        cuda.shared.array(0, np.int32)
        cuda.cg.this_grid().sync()
        if cuda.threadIdx.x == cuda.threadIdx.y == 0:
            cuda.atomic.add(counts, 0, 1)

    counts = cuda.to_device(np.zeros(1, np.int32))
    kernel[2, 2](counts)
    compiled = next(iter(kernel.overloads.values()))
    assert compiled.cooperative
    most = 132 * blocks
    assert compiled.max_cooperative_grid_blocks(threads, dynamic) == most
    with pytest.raises(ValueError, match=f"{most + 1} blocks of a cooperative launch.* at most {most}"):
        kernel[most + 1, threads, 0, dynamic](counts)
    with nbep.numba_cuda.options(num_sms=3):
        assert compiled.max_cooperative_grid_blocks(threads, dynamic) == 3
        with pytest.raises(ValueError, match=r"4 blocks of a cooperative launch.* at most 3"):
            kernel[4, threads, 0, dynamic](counts)
    assert counts.copy_to_host()[0] == 2


def test_static_shared_memory_counts_for_a_cooperative_launch(cuda):
    @cuda.jit
    def kernel():
        cuda.shared.array(4096, np.float64)
        cuda.cg.this_grid().sync()

    assert kernel.compile("void()").max_cooperative_grid_blocks(1) == 132 * 6


@pytest.mark.parametrize(("dynamic", "most"), [(-1, 48 << 10), (1 << 20, 48 << 10), ((48 << 10) - 31, (48 << 10) - 32)])
def test_dynamic_shared_memory_that_no_block_has_is_refused(cuda, dynamic, most):
    def kernel(a):
        if most < 48 << 10:
            cuda.shared.array(8, np.int32)
        a[0] = 1

    a = cuda.to_device(np.zeros(1))
    with pytest.raises(ValueError, match=rf"{dynamic} bytes of dynamic shared memory.* must be 0 to {most}"):
        cuda.jit(kernel)[1, 1, 0, dynamic](a)
    cuda.jit(kernel)[1, 1, 0, most](a)
    assert a.copy_to_host()[0] == 1


def test_only_so_many_blocks_as_the_card_holds_are_there_at_once(cuda, monkeypatch):
    monkeypatch.setattr(launch, "NUM_SMS", 3)

    @cuda.jit
    def kernel(there):
        cuda.atomic.add(there, 0, 1)
        while cuda.atomic.add(there, 0, 0) < cuda.gridDim.x:
            pass

    def run(blocks):
        kernel[blocks, 1, 0, 48 << 10](np.zeros(1, np.int32))

    run(3 * 4)
    with pytest.raises(DeadlockError):
        run(3 * 4 + 1)


def test_the_first_other_stream_waits_for_what_the_default_one_has_to_do(cuda, checked):
    @cuda.jit
    def put(a, value):
        a[0] = value

    @cuda.jit
    def add(a):
        a[0] += 1

    there = cuda.to_device(np.zeros(1, np.int32))
    stream = cuda.stream()
    put[1, 1](there, 5)
    add[1, 1, stream](there)
    cuda.synchronize()
    assert there.copy_to_host()[0] == 6


def test_a_loop_that_counts_its_turns_in_a_local_array_gives_up_in_some_schedule(cuda):
    from every_schedule import run_all

    @cuda.jit
    def look(flag, turns):
        if cuda.blockIdx.x == 0:
            count = cuda.local.array(1, np.int32)
            count[0] = 0
            while cuda.atomic.add(flag, 0, 0) == 0:
                count[0] += 1
                if count[0] == 4:
                    break
            turns[0] = count[0]
        else:
            cuda.atomic.add(flag, 0, 1)

    def program(strategy):
        with nbep.numba_cuda.options(memory_model="checked", strategy=strategy):
            flag, turns = cuda.to_device(np.zeros(1, np.int32)), cuda.to_device(np.zeros(1, np.int32))
            look[2, 1](flag, turns)
            return int(turns.copy_to_host()[0])

    assert run_all(program)[1] == {0, 1, 2, 3, 4}


def test_fields_of_records_are_what_numpy_says(cuda, memory_model):
    """Each field that there may be, of an element and of a field: read, stored to, and seen by a kernel."""
    inner = np.dtype([("x", np.int32), ("y", np.int8), ("deep", [("z", np.complex64)])], align=True)
    kind = np.dtype([("one", np.float64), ("inner", inner), ("pair", np.float32, (2,))], align=True)
    here = np.zeros(3, kind)
    here["one"], here["inner"]["x"], here["pair"] = [1, 2, 3], 7, [[1, 2], [3, 4], [5, 6]]
    there = cuda.to_device(here)
    ways = ["['one']", "['inner']['x']", "['inner']['deep']['z']", "['pair'][1]", "['pair']", "['inner']['deep']"]
    values = [5, -3, 2j, 9, [8, 6], (4 + 1j,)]
    for number in range(3):
        for way, value in zip(ways, values, strict=True):
            for _ in range(2):
                read = eval(f"there[{number}]{way}")
                plain = eval(f"here[{number}]{way}")
                assert np.array_equal(read.copy_to_host() if hasattr(read, "copy_to_host") else read, plain)
                for array in ("there", "here"):
                    exec(f"{array}[{number}]{way} = {value!r}")
    assert np.array_equal(there.copy_to_host(), here)
    assert there[1].getitem("one") == 5
    there[1].setitem("one", 4)

    @cuda.jit
    def kernel(records, out):
        out[0] = records[1].one + records[1].inner.x

    out = np.zeros(1)
    kernel[1, 1](there, out)
    assert out[0] == 1
    new = cuda.device_array(1, kind)
    new[0]["one"] = 3
    with pytest.raises(nbep.emulator.EmulatorError, match="no thread has written"):
        kernel[1, 1](cuda.device_array(2, kind), out)
    assert new[0]["one"] == 3
    with pytest.raises(ValueError, match="nope"):
        there[0]["nope"]


def test_threads_of_the_host_take_turns_with_the_device(cuda, memory_model):
    @cuda.jit
    def kernel(a, turns):
        for _ in range(turns):
            a[cuda.grid(1)] += 1

    def work(stream, sums):
        there = cuda.to_device(np.zeros(64), stream=stream)
        for _ in range(5):
            kernel[2, 32, stream](there, 3)
        sums.append(there.copy_to_host(stream=stream).sum())

    for streams in ([0] * 4, [cuda.stream() for _ in range(4)]):
        sums = []
        threads = [threading.Thread(target=work, args=(stream, sums)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == [64 * 15] * 4


def test_a_thread_does_not_wait_for_kernels_that_another_one_has_under_way(cuda, memory_model):
    @cuda.jit
    def begin(begun, end):
        cuda.atomic.add(begun, 0, 1)
        while cuda.atomic.add(end, 0, 0) == 0:
            pass

    @cuda.jit
    def look(begun):
        while cuda.atomic.add(begun, 0, 0) == 0:
            pass

    @cuda.jit
    def put(cell):
        cuda.atomic.add(cell, 0, 1)

    def wait():
        try:
            other.synchronize()
        except RuntimeError as error:
            said.append(str(error))

    said, first, other = [], cuda.stream(), cuda.stream()
    begun, ends = (cuda.to_device(np.zeros(1, np.int32)) for _ in range(2))
    begin[1, 1, other](begun, ends)
    look[1, 1, first](begun)
    first.synchronize()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert "another thread of the host has started" in said[0]
    assert "cuda.synchronize() there" in said[0]
    put[1, 1, first](ends)
    cuda.synchronize()
    wait()
    assert len(said) == 1


def test_fields_of_records_are_read_and_written_by_the_host(cuda):
    dtype = np.dtype([("x", "i4"), ("y", "f8"), ("v", "f4", (3,))], align=True)

    @cuda.jit
    def kernel(records, record):
        records[cuda.grid(1)].x += 1
        record.y = records[0].y

    host = np.zeros(4, dtype)
    host["y"] = 1.5
    records, record = cuda.to_device(host), cuda.to_device(np.zeros(1, dtype)[0])
    records["x"][3] = 76
    records[1]["y"] = 9.25
    kernel[1, 1](records, record)
    assert (records[0]["x"], records[3]["x"], records["y"][1], record["y"]) == (1, 76, 9.25, 1.5)
    assert records["v"].copy_to_host().shape == (4, 3)
    assert record.copy_to_host()["y"] == 1.5
