"""Symmetric memory for kernels of one's own, and docs/examples/ring.py, which has such a kernel."""

import importlib.util
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from arrays import LIBRARY
from target import MEMORY_MODELS, spawn

import nbep
from nbep.device.compile import compile_kernel
from nbep.device.jit import kernel
from nbep.device.primitives import ld_weak_s32, st_weak_s32, thread_idx
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.protocols.waits import SITES
from nbep.device.types import Out
from nbep.lab.trace import Trace

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "ring.py"
spec = importlib.util.spec_from_file_location("ring_example", EXAMPLE)
ring = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ring)

needs_torch = pytest.mark.skipif(LIBRARY not in ("numpy", "torch"), reason="the example takes torch's arrays on a GPU")
ROWS = np.arange(320).reshape(10, 32).tolist()


@needs_torch
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seed", range(5))
def test_the_ring_of_the_example_moves_all_rows(seed, memory_model):
    assert spawn(ring.main, 2, seed=seed, memory_model=memory_model)[1] == ROWS


@pytest.mark.thorough
@pytest.mark.compile
def test_the_ring_of_the_example_compiles_without_spills():
    report = compile_kernel(ring.ring).report
    assert (report.spill_stores, report.stack_frame) == (0, 0)


def leave_out_rank_1(comm):
    if comm.rank == 0:
        return ring.main(comm)
    memory = nbep.SharedMemory.create(comm, ring.NUM_BYTES, timeout_ms=5000)
    comm.barrier()
    return memory.wait()


@needs_torch
@pytest.mark.parametrize(
    ("known", "words"),
    [
        (True, "the ring sender .* more than 5000 ms for rank 1: a free slot. It polled head, expected 1, saw 0"),
        (False, f"rank 1: it. It polled a cell of site {ring.RING_HEAD}, expected 1, saw 0"),
    ],
)
def test_a_wait_that_timed_out_is_reported_in_the_words_of_its_site(known, words, monkeypatch):
    if not known:
        monkeypatch.delitem(SITES, ring.RING_HEAD)
    with pytest.raises(nbep.PeerTimeout, match=words):
        spawn(leave_out_rank_1, 2, on_deadlock="expire")


@pytest.mark.emulator_only("only the emulator has traces")
def test_cells_have_the_names_that_they_were_given():
    trace = Trace()
    spawn(ring.main, 2, args=(2,), tracer=trace)
    stores = trace.events("store", rank=0, cell="slots")
    assert {event.cell.text for event in stores} == {"slots", *(f"slots + {4 * i}" for i in range(1, 64))}
    assert {event.value for event in trace.events("store", cell="tail")} == {1, 2}
    with pytest.raises(ValueError, match=r"got 'nvl_buffer'; the trace has events at .*tail.*slots"):
        trace.plot_cells("nvl_buffer")


@kernel(max_threads=64)
def read_peer(out: Out, peers: Peers):
    """Take 64 words of the other rank's memory."""
    i = thread_idx()
    st_weak_s32(out + 4 * i, ld_weak_s32(buffer_of(peers, 1 - peers.rank) + 4 * i))


def test_memory_is_zeros_on_all_ranks_when_it_is_handed_out():
    def main(comm):
        memory = nbep.SharedMemory.create(comm, 256)
        out = memory.runtime.allocate_host_visible(256, "out")
        out.array(np.int32)[:] = -1
        memory.runtime.launch(memory.comm_stream, read_peer, 1, 64, 0, out.address, memory.peers)
        memory.wait()
        words = out.array(np.int32).tolist()
        memory.close()
        return words

    assert spawn(main, 2) == [[0] * 64] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_bytes": 100}, "rank 1: num_bytes: got 100; must be a multiple of 128"),
        ({"num_bytes": 0}, "rank 1: num_bytes: got 0; must be an integer of at least 1"),
        ({"num_bytes": 128.0}, r"rank 1: num_bytes: got 128\.0; must be an integer"),
        ({"num_bytes": 256}, r"num_bytes: got \[128, 256\] on ranks 0 to 1; must be the same on all"),
        ({"handle_type": "host"}, r"handle_type: got \['ipc', 'host'\] on ranks 0 to 1; must be the same on all"),
        ({"timeout_ms": 0}, "rank 1: timeout_ms: got 0; must be a positive number of milliseconds"),
        ({"cells": {"tail": "0"}}, r"rank 1: cells\['tail'\]: got '0'; must be an integer"),
        ({"handle_type": "other"}, "rank 1: handle_type: got 'other'; must be one of ipc, posix_fd, fabric, host"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_refused_on_all(options, message):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            nbep.SharedMemory.create(comm, **{"num_bytes": 128} | (options if comm.rank == 1 else {}))

    spawn(main, 2)


@pytest.mark.emulator_only("a GPU's memory has no lazy pages")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_much_memory_costs_nothing_until_it_is_used():
    """Pages that are touched would take seconds, and 3 GB."""

    def main(comm):
        memory = nbep.SharedMemory.create(comm, np.int64(1 << 30))
        assert memory.symmetric.array(np.int32, 1 << 29, 4).tolist() == [0] * 4
        used = resident_bytes()
        memory.close()
        return used

    before = resident_bytes()
    assert max(spawn(main, 2)) < before + (1 << 28)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_more_ranks_than_a_node_has_are_refused():
    def main(comm):
        with pytest.raises(ValueError, match="comm: got 9 ranks; must be at most 8 ranks"):
            nbep.SharedMemory.create(comm, 128)

    spawn(main, 9)
