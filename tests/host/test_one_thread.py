"""Who may use a buffer: the process that made it, the thread of its ranks, one thread at a time."""

import os
import threading

import numpy as np
import pytest
from target import spawn

import nbep
from nbep.host.shared_memory import SharedMemory

pytestmark = pytest.mark.emulator_only("its hosts are greenlets of one thread")


def raised_in_a_thread(call) -> str:
    """What a call raises in another thread."""
    said = []

    def run():
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return "".join(said)


def make_low_latency_buffer(comm):
    size = nbep.Buffer.get_low_latency_rdma_size_hint(2, 128, 2, 2)
    return nbep.Buffer(comm, num_rdma_bytes=size, low_latency_mode=True)


def test_a_thread_that_is_not_the_ranks_is_refused_wherever_it_comes_in():
    def main(comm):
        buffer = make_low_latency_buffer(comm)
        x, topk_idx = np.zeros((2, 128), nbep.reference.BF16), np.zeros((2, 1), np.int64)
        hook = buffer.low_latency_dispatch(x, topk_idx, 2, 2, return_recv_hook=True)[4]
        weights, handle = np.ones((2, 1), np.float32), object()
        for name, call in {
            "hook": hook,
            "get_dispatch_layout": lambda: buffer.get_dispatch_layout(topk_idx, 2),
            "dispatch": lambda: buffer.dispatch(x, handle=handle),
            "combine": lambda: buffer.combine(x, handle),
            "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, topk_idx, 2, 2),
            "low_latency_combine": lambda: buffer.low_latency_combine(x, topk_idx, weights, handle),
            "clean_low_latency_buffer": lambda: buffer.clean_low_latency_buffer(2, 128, 2),
            "Buffer": lambda: make_low_latency_buffer(comm),
            "comm.barrier": comm.barrier,
            "destroy": buffer.destroy,
        }.items():
            assert raised_in_a_thread(call).startswith(f"{name}: called in another thread"), name
            assert "start a process for each rank, with mpiexec or torchrun" in raised_in_a_thread(call)
        refused = raised_in_a_thread(lambda: SharedMemory.create(comm, 128))
        assert refused.startswith("SharedMemory: called in another thread")
        hook()
        buffer.destroy()

    spawn(main, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_made_by_fork_is_refused_by_every_verb():
    def main(comm):
        buffer = make_low_latency_buffer(comm)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for call in (
                lambda: buffer.low_latency_dispatch(None, None, 2, 2),
                lambda: buffer.clean_low_latency_buffer(2, 128, 2),
                lambda: buffer.get_dispatch_layout(None, 2),
                buffer.destroy,
                comm.barrier,
            ):
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error).partition(",")[0])
            os.write(write, "\n".join(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(read, 1 << 16).decode().splitlines()
        os.close(read)
        os.close(write)
        buffer.destroy()
        return said

    names = "low_latency_dispatch", "clean_low_latency_buffer", "get_dispatch_layout", "destroy", "comm.barrier"
    for said in spawn(main, 2):
        assert said == [f"{name}: called in a child made by fork" for name in names]


def test_a_second_thread_in_a_call_of_one_buffer_is_refused():
    def main(comm):
        buffer = make_low_latency_buffer(comm)
        with buffer._turn:  # as another thread's call holds it
            said = raised_in_a_thread(lambda: buffer.clean_low_latency_buffer(2, 128, 2))
        buffer.clean_low_latency_buffer(2, 128, 2)
        buffer.destroy()
        return said

    for said in spawn(main, 2):
        assert said.startswith("clean_low_latency_buffer: called while another thread is in a call of this buffer")
