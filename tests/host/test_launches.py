"""Launches that a GPU cannot run are refused on every target, with the name of the parameter."""

from typing import NamedTuple

import numpy as np
import pytest
from arrays import to_numpy, to_target
from target import spawn

from nbep.device.jit import kernel
from nbep.device.primitives import ld_nc_s32, s32, st_weak_f32, st_weak_s32, st_weak_s64, thread_idx
from nbep.device.types import F32, I32, I64, In, Out, Sym


class Sizes(NamedTuple):
    num_words: I32
    offset: I64


@kernel(max_threads=64)
def add_offset(out: Out, x: In, sizes: Sizes, scale: F32):
    i = thread_idx()
    if i < sizes.num_words:
        st_weak_s32(out + 4 * i, ld_nc_s32(x + 4 * i) + s32(sizes.offset))
    elif i == sizes.num_words:
        st_weak_f32(out + 4 * i, scale)


def launch(comm, grid=1, block=32, smem_bytes=0, function=add_offset, args=None, **changes):
    words = to_target(np.arange(4, dtype=np.int32))
    given = {"out": to_target(np.zeros(5, np.int32)), "x": words, "sizes": Sizes(4, 10), "scale": 0.1} | changes
    given = {name: value(words) if callable(value) else value for name, value in given.items()}
    stream = comm.runtime.create_stream("stream")
    comm.runtime.launch(stream, function, grid, block, smem_bytes, *(given.values() if args is None else args))
    stream.synchronize()
    return to_numpy(given["out"])


def launch_with(**options):
    return spawn(lambda comm: launch(comm, **options), 1)[0]


def test_integers_of_numpy_and_a_float_reach_the_kernel():
    out = launch_with(sizes=Sizes(np.int64(4), np.int32(-3)))
    assert out[:4].tolist() == [-3, -2, -1, 0]
    assert out[4:].view(np.float32)[0] == np.float32(0.1)


@kernel()
def note_address(out: Out, address: Sym):
    st_weak_s64(out, address)


def test_an_address_may_be_an_integer_of_numpy():
    def main(comm):
        out = to_target(np.zeros(1, np.int64))
        stream = comm.runtime.create_stream("stream")
        comm.runtime.launch(stream, note_address, np.int64(1), 1, 0, out, np.uint64(1 << 40))
        stream.synchronize()
        return to_numpy(out).tolist()

    assert spawn(main, 1) == [[1 << 40]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": lambda words: words[::2]}, r"add_offset, x: got a strided array \[2\]; must be row-major without gaps"),
        ({"x": [1, 2]}, "add_offset, x: got list; must be an? .*array"),
        ({"out": 1.5}, "add_offset, out: got float; must be an? .*array"),
        ({"sizes": Sizes(4.0, 1)}, r"sizes\.num_words: got float 4\.0; must be an integer of 32 bits"),
        ({"sizes": Sizes(4, 1.5)}, r"sizes\.offset: got float 1\.5; must be an integer of 64 bits"),
        ({"sizes": Sizes(1 << 31, 1)}, r"sizes\.num_words: got 2147483648; must be an integer of 32 bits"),
        ({"scale": "big"}, "scale: got str; must be a number"),
        ({"grid": 1.0}, r"add_offset, grid: got 1\.0; must be an integer"),
        ({"grid": 0}, "add_offset, grid: got 0; must be 1 to 2147483647 blocks"),
        ({"block": 65}, "add_offset, block: got 65; must be 1 to 64 threads, its max_threads"),
        ({"smem_bytes": (227 << 10) + 1}, "smem_bytes: got 232449; must be 0 to 232448"),
    ],
)
def test_what_a_parameter_cannot_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        launch_with(**options)


@pytest.mark.parametrize(
    ("args", "got"),
    [((), "0 arguments"), ((1, 2, 3, 4, 5), "5"), ((0, 0, (1, 2, 3), 1.0), "4 arguments with 6 values")],
)
def test_a_wrong_number_of_arguments_is_refused(args, got):
    with pytest.raises(TypeError, match=rf"add_offset takes 4 arguments with 5 values; got {got}.*sizes\.num_words"):
        launch_with(args=args)


def test_a_function_that_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match=r"launch is no kernel: decorate it with @kernel\(\)"):
        launch_with(function=launch)


def test_a_slice_of_rows_is_taken():
    out = launch_with(x=lambda words: words[1:], sizes=Sizes(3, 0))
    assert out[:3].tolist() == [1, 2, 3]


@pytest.mark.emulator_only("NumPy's arrays say that they are read-only")
def test_a_read_only_array_is_refused_where_the_kernel_writes():
    def read_only(values):
        return np.frombuffer(values.tobytes(), values.dtype)

    with pytest.raises(ValueError, match=r"^add_offset, out: got a read-only array; must be writeable: the kernel"):
        launch_with(out=read_only(np.zeros(5, np.int32)))
    assert launch_with(x=read_only(np.arange(4, dtype=np.int32))).tolist()[:4] == [10, 11, 12, 13]
