"""Several threads of one process."""

import ctypes
import struct
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from target import spawn

import nbep

NUM_LAUNCHES = 400


@pytest.fixture
def recorded(monkeypatch):
    """What a driver reads that takes its time: (stream, first parameter) of each launch."""
    if sys.platform != "linux":
        pytest.skip("CUDA is Linux's")
    from nbep.host.target.cuda import launcher

    found = []
    success = launcher.cu.CUresult.CUDA_SUCCESS

    def launch_kernel(config, function, parameters, extra):
        time.sleep(0)  # others run meanwhile
        cell = ctypes.c_void_p.from_address(parameters).value
        found.append((int(config.hStream), *struct.unpack("<q", ctypes.string_at(cell, 8))))
        return (success,)

    monkeypatch.setattr(launcher.cu, "cuModuleGetFunction", lambda module, name: (success, name))
    monkeypatch.setattr(launcher.cu, "cuLaunchKernelEx", launch_kernel)
    return found


def in_two_threads(launch) -> None:
    """launch(stream, value), again and again, in each with numbers of its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def launch_all(number):
        for i in range(NUM_LAUNCHES):
            launch(number, (number << 32) + i)

    try:
        threads = [threading.Thread(target=launch_all, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)


def check(recorded) -> None:
    wanted = {(number, (number << 32) + i) for number in (1, 2) for i in range(NUM_LAUNCHES)}
    assert len(recorded) == len(wanted)
    assert set(recorded) == wanted


def load_push():
    from nbep.device.compile import load_kernels
    from nbep.host.target.cuda.launcher import Card, LoadedKernel

    return LoadedKernel(load_kernels()["per_token_cast_back"], None, Card((9, 0), 132, 1))


def test_threads_that_launch_one_kernel_keep_their_parameters(recorded):
    loaded = load_push()
    others = [0] * (len(loaded.spec.params) - 1)
    in_two_threads(lambda stream, value: loaded.launch(stream, 1, 32, 0, [value, *others]))
    check(recorded)


def test_threads_that_make_one_prepared_launch_keep_their_parameters(recorded):
    from nbep.host.target.cuda.runtime import CudaPreparedLaunch
    from nbep.host.target.cuda.streams import CudaStream

    loaded = load_push()
    prepared = CudaPreparedLaunch(loaded, (1, 32, 0), [0] * (len(loaded.spec.params) - 1), {})
    streams = {number: CudaStream(number, "stream", 0) for number in (1, 2)}
    in_two_threads(lambda stream, value: prepared.launch(streams[stream], (value,)))
    check(recorded)


def test_threads_that_let_a_stream_wait_wait_for_their_own(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("CUDA is Linux's")
    from nbep.host.target.cuda import streams

    current = threading.local()
    waits = []

    class Event:
        def __init__(self, stream):
            self.record(stream)

        def record(self, stream):
            self.stream = stream
            time.sleep(0)

    monkeypatch.setattr(streams, "CudaEvent", Event)
    monkeypatch.setattr(streams, "current_stream_handle", lambda: current.handle)
    comm = streams.CudaStream(9, "comm", 0)
    monkeypatch.setattr(comm, "wait", lambda event: waits.append((current.handle, event.stream)))

    def wait(stream, value):
        current.handle = stream
        comm.wait_current_stream()

    in_two_threads(wait)
    assert len(waits) == 2 * NUM_LAUNCHES
    assert all(own == waited for own, waited in waits)


@pytest.mark.emulator_only("ranks of a GPU are threads")
def test_an_emulated_rank_in_another_thread_says_so():
    def main(comm):
        buffer = nbep.Buffer(comm, 256)
        errors = []

        def use():
            try:
                buffer.get_comm_stream()
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        buffer.destroy()
        return errors

    message = (
        "get_comm_stream: called in another thread; emulated ranks run in the thread that called spawn: to call from "
        "several threads, start a process for each rank, with mpiexec or torchrun"
    )
    assert spawn(main, 2) == [[message]] * 2


@pytest.mark.emulator_only("a GPU's buffer can be used as long as its process lives")
def test_an_emulated_rank_after_its_run_says_so():
    buffer = spawn(lambda comm: nbep.Buffer(comm, 256), 2)[0]
    with pytest.raises(RuntimeError, match="get_comm_stream: called after the end of the spawn"):
        buffer.get_comm_stream()


@pytest.mark.emulator_only("virtual ranks of a GPU are threads: they may use another one's buffer while it does not")
@pytest.mark.parametrize("whose", ["its own", "the other's", "the last one's"])
def test_ranks_that_share_a_buffer_in_a_global_of_their_module_hear_why_it_is_refused(whose):
    """As DeepEP's README keeps it. The group has methods, as torch's."""
    made = {}

    def main(group):
        assert (group.rank(), group.size()) == (group.rank, group.size)
        made[group.rank] = made["last"] = nbep.Buffer(group, 1 << 16)
        group.barrier()
        rank = group.rank()
        buffer = made[{"its own": rank, "the other's": 1 - rank, "the last one's": "last"}[whose]]
        return buffer.dispatch(*few_tokens(buffer))[3]

    def few_tokens(buffer):
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(np.array([[0], [1]]), 2)
        return np.zeros((2, 64), ml_dtypes.bfloat16), None, per_rank, None, is_in_rank, per_expert

    if whose == "its own":
        assert spawn(main, 2) == [[2], [2]]
        return
    with pytest.raises(RuntimeError, match="share the globals of a module: keep the buffer in a variable"):
        spawn(main, 2)
