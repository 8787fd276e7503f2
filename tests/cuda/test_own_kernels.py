"""A user's kernels on a GPU: compiled when they are first launched, and again when they are defined again."""

import numpy as np
import pytest
from arrays import to_numpy, to_target
from target import spawn

from nbep.device.compile import CompileError
from nbep.device.jit import kernel
from nbep.device.primitives import st_weak_f32, st_weak_s32
from nbep.device.types import Out

pytestmark = pytest.mark.cuda


def define(number):
    @kernel(max_threads=32)
    def push(out: Out):  # nbep has a kernel of this name
        st_weak_s32(out, number)

    return push


@kernel()
def stores_a_double(out: Out):
    st_weak_f32(out, 1.0)


def run(comm, function):
    out = to_target(np.zeros(1, np.int32))
    stream = comm.runtime.create_stream("stream")
    comm.runtime.launch(stream, function, 1, 32, 0, out)
    stream.synchronize()
    return int(to_numpy(out)[0])


def test_a_kernel_that_is_defined_again_is_the_new_one():
    def main(comm):
        return [run(comm, define(number)) for number in (111, 222)]

    assert spawn(main, 2) == [[111, 222]] * 2


def test_a_kernel_that_does_not_compile_leaves_the_others_alone():
    def main(comm):
        with pytest.raises(CompileError, match="needs float32"):
            run(comm, stores_a_double)
        return run(comm, define(333))

    assert spawn(main, 1) == [333]
