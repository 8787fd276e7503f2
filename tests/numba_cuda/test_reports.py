"""What is wrong with a kernel is reported in Numba's words, in the first lines."""

import nbep.numba_cuda
import numpy as np
import pytest

from nbep.emulator.machine.errors import (
    DataRace,
    DeadlockError,
    Divergence,
    OutOfBounds,
    ReadOnly,
    Uninitialized,
)


def found(kind, call, *words):
    with pytest.raises(kind) as caught:
        call()
    lines = str(caught.value).splitlines()
    for place, word in words:
        assert word in lines[place], f"{word!r} is not in {lines[place]!r} of\n{caught.value}"
    return lines


@pytest.mark.usefixtures("checked")
def test_missing_barrier_names_the_element_both_lines_and_both_threads(cuda):
    @cuda.jit
    def kernel(a, out):
        tile = cuda.shared.array((4, 8), np.float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        tile[y, x] = 0
        cuda.syncthreads()
        tile[y, x] = a[y, x]
        out[y, x] = tile[3 - y, x]

    lines = found(
        DataRace, lambda: kernel[1, (8, 4)](np.ones((4, 8), np.float32), np.zeros((4, 8))),
        (0, "data race on tile["), (0, "cuda.syncthreads() is missing"), (1, "tile"), (1, "threadIdx ("), (2, "tile"),
        (2, "blockIdx 0"),
    )  # fmt: skip
    assert any("tile[y, x] = a[y, x]    <- stored by" in line for line in lines[1:3])
    assert any("out[y, x] = tile[3 - y, x]    <- loaded by" in line for line in lines[1:3])


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("last", [32, 16, 2])
def test_a_tree_reduction_lacks_syncthreads_also_inside_of_a_warp(cuda, last):
    """Steps of fewer than `last` threads go without a barrier; with 32 that is the last warp alone."""

    @cuda.jit
    def kernel(a, out):
        part = cuda.shared.array(64, np.float32)
        i = cuda.threadIdx.x
        part[i] = a[i]
        cuda.syncthreads()
        step = 32
        while step > 0:
            if i < step:
                part[i] += part[i + step]
            if step > last:
                cuda.syncthreads()
            step //= 2
        if i == 0:
            out[0] = part[0]

    place = slice(1, 3)
    lines = found(
        DataRace, lambda: kernel[1, 64](np.ones(64, np.float32), np.zeros(1)),
        (0, "data race on part["), (0, "cuda.syncthreads() is missing"),
    )  # fmt: skip
    assert "syncwarp" not in "\n".join(lines)
    assert all("part[i] += part[i + step]" in line or "out[0] = part[0]" in line for line in lines[place])
    assert all("threadIdx" in line for line in lines[place])


@pytest.mark.parametrize("op", ["add", "max", "min", "or_", "exch", "cas"])
def test_a_thread_that_polls_by_an_atomic_waits_for_its_element(cuda, op):
    from every_schedule import run_all

    from nbep.lab.numba_cuda.code import exec_with_source

    change = {"exch": "exch(a, 0, 0)", "cas": "cas(a, 0, 1, 1)"}.get(op, f"{op}(a, 0, 0)")
    names = {"cuda": cuda}
    loop = f"while cuda.atomic.{change} == 0:\n        cuda.nanosleep(100)\n"
    exec_with_source(f"@cuda.jit\ndef kernel(a):\n    {loop}", names)
    kernel = names["kernel"]

    def program(strategy):
        with nbep.numba_cuda.options(memory_model="checked", strategy=strategy):
            kernel[2, 2](np.zeros(1, np.int32))

    lines = found(DeadlockError, lambda: run_all(program), (1, "2 of 2 threads"))
    assert "grid.sync" not in "\n".join(lines)


@pytest.mark.usefixtures("checked")
def test_kernels_on_two_streams(cuda):
    @cuda.jit
    def kernel(a):
        a[cuda.grid(1)] += 1

    def launch(*streams):
        a = cuda.to_device(np.zeros(32))
        for stream in streams:
            kernel[1, 32, stream](a)
        cuda.synchronize()
        return a.copy_to_host()

    found(DataRace, lambda: launch(cuda.stream(), cuda.stream()), (0, "two kernels on different streams"))
    assert set(launch(cuda.stream(), 0)) == {2}  # the default stream waits for all others
    one = cuda.stream()
    assert set(launch(one, one)) == {2}


@pytest.mark.usefixtures("checked")
def test_copy_from_another_stream_than_the_kernels(cuda):
    @cuda.jit
    def kernel(a):
        a[cuda.grid(1)] = 1

    def copy():
        a, one, other = cuda.to_device(np.zeros(32)), cuda.stream(), cuda.stream()
        kernel[1, 32, one](a)
        return a.copy_to_host(stream=other)

    with pytest.raises(DataRace, match="the host"):  # noqa: PT012
        copy()
        cuda.synchronize()


@pytest.mark.usefixtures("checked")
def test_slices_of_an_array_are_one_memory(cuda):
    @cuda.jit
    def kernel(a, b):
        if cuda.blockIdx.x == 0:
            a[64] = 1
        else:
            b[0] = 2

    def launch(a, b):
        kernel[2, 1](a, b)
        cuda.synchronize()

    whole = cuda.to_device(np.zeros(128, np.int32))
    found(DataRace, lambda: launch(whole, whole[64:]), (0, "data race on "))
    whole = cuda.to_device(np.zeros(128, np.int32))
    found(DataRace, lambda: launch(whole[:65], whole[64:]), (0, "data race on "))


def test_pinned_array_that_is_read_while_a_copy_is_under_way(cuda):
    device, pinned, stream = cuda.to_device(np.ones(4)), cuda.pinned_array(4), cuda.stream()
    device.copy_to_host(pinned, stream=stream)
    with pytest.raises(DataRace, match="synchronize"):
        pinned.sum()
    stream.synchronize()
    assert pinned.sum() == 4


def test_index_out_of_bounds_inside_of_the_memory(cuda):
    @cuda.jit
    def kernel(a):
        a[0, cuda.threadIdx.x] = 1

    found(
        OutOfBounds,
        lambda: kernel[1, 9](np.zeros((4, 8))),
        (0, "a[0, 8]"),
        (0, "(4, 8)"),
        (1, "threadIdx 8, blockIdx 0"),
    )


@pytest.mark.parametrize("where", ["shared", "local", "device"])
def test_element_that_no_thread_writes(cuda, memory_model, where):
    @cuda.jit
    def of_shared(a):
        there = cuda.shared.array(4, np.float64)
        a[0] = there[1]

    @cuda.jit
    def of_local(a):
        there = cuda.local.array(4, np.float64)
        a[0] = there[1]

    @cuda.jit
    def of_device(a):
        a[0] = a[1]

    kernel = {"shared": of_shared, "local": of_local, "device": of_device}[where]
    name = "a[1]" if where == "device" else "there[1]"

    def launch():
        kernel[1, 1](cuda.device_array(4))
        cuda.synchronize()

    found(Uninitialized, launch, (0, f"load of {name}, which no thread has written"))


def test_threads_that_have_left_do_not_count(cuda, memory_model):
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        if i >= 40:
            return
        cuda.syncthreads()
        out[i] = cuda.ballot_sync(0xFFFFFFFF, 1) + cuda.syncthreads_count(1)
        cuda.syncwarp()

    out = np.zeros(64, np.int64)
    kernel[1, 64](out)
    assert list(out) == [39] * 32 + [255 + 40] * 8 + [0] * 24


def test_shuffle_from_a_lane_that_has_left_decides_nothing(cuda):
    @cuda.jit
    def kernel(out, keep):
        i = cuda.threadIdx.x
        if i < 20:
            value = cuda.shfl_down_sync(0xFFFFFFFF, i, 8) * 2 + 1
            if i < keep:
                out[i] = value

    out = np.zeros(32)
    kernel[1, 32](out, 12)
    assert list(out[:12]) == [2 * (i + 8) + 1 for i in range(12)]
    found(Divergence, lambda: kernel[1, 32](np.zeros(32), 13), (0, "lane which has left"))


def test_constant_arrays_cannot_be_stored_to(cuda):
    a = np.zeros(3)
    a.flags.writeable = False

    @cuda.jit
    def kernel(a):
        b = a
        b[0] = 1

    with pytest.raises((ReadOnly, TypeError, nbep.numba_cuda.KernelTypeError), match="constant"):
        kernel[1, 1](a)


def test_exception_of_a_kernel_comes_to_the_host(cuda):
    @cuda.jit
    def kernel(out):
        if cuda.threadIdx.x == 2:
            raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        kernel[1, 4](np.zeros(1))


def test_after_an_error_the_next_launch_works_and_arrays_stay(cuda):
    @cuda.jit
    def kernel(a, i):
        a[i] = 5

    a = cuda.to_device(np.zeros(4))
    kernel[1, 1](a, 9)
    with pytest.raises(OutOfBounds):
        cuda.synchronize()
    kernel[1, 1](a, 1)
    assert list(a.copy_to_host()) == [0, 5, 0, 0]


def test_seeds_choose_the_order_and_replay_it(cuda):
    @cuda.jit
    def kernel(out, at):
        out[cuda.atomic.add(at, 0, 1)] = cuda.grid(1)

    def order(seed):
        out = np.zeros(16, np.int64)
        with nbep.numba_cuda.options(seed=seed):
            kernel[2, 8](out, np.zeros(1, np.int64))
        return tuple(out)

    assert order(3) == order(3)
    assert len({order(seed) for seed in range(8)}) > 1


def test_options_must_be_known():
    with pytest.raises(TypeError, match="sed"), nbep.numba_cuda.options(sed=1):
        pass
