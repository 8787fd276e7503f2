"""Buffers in the host's memory: results are those of every other type, and no kernel needs atomics between GPUs.

The GPU's side of it, memory that is mapped and registered, is in test_gpu_memory.py.
"""

from dataclasses import replace

import numpy as np
import pytest
from calls import hold_back
from cases import make_case
from intranode import Options, cached_round_trip, dispatch, make_buffer, round_trip
from intranode import run as run_intranode
from low_latency import HOOK, Trip, make_low_latency_case, num_max_tokens
from low_latency import Options as LowLatencyOptions
from low_latency import make_buffer as make_low_latency_buffer
from low_latency import run as run_low_latency
from parts import both_parts, dear
from target import MEMORY_MODELS, spawn

import nbep
from nbep.device.by_type import HostNetwork
from nbep.device.cards import SM80
from nbep.device.jit import kernel, over
from nbep.device.network.seam import Network, amo_add
from nbep.device.primitives import atom_add_relaxed_sys_s32, st_weak_s32
from nbep.device.protocols.barriers import barrier_block, meet_peer
from nbep.device.protocols.peers import ONE, Bounds, HostPeers, Peers, buffer_of
from nbep.device.types import Out
from nbep.emulator import DataRace, EmulatorError
from nbep.lab.check.faults import broken

OPTIONS = Options(handle_type="host")
emulator_only = pytest.mark.emulator_only("only the emulator looks at each access")


def low_latency_trips(comm, case, options):
    """A call of each kind, a cleaned buffer, and another one."""
    buffer = make_low_latency_buffer(comm, [(case, options)], handle_type="host")
    first = Trip(buffer, case, options).whole()
    Trip(buffer, case, replace(options, dispatch_as=HOOK)).send_dispatch()
    buffer.clean_low_latency_buffer(num_max_tokens(case, options), case.hidden, case.num_experts)
    second = Trip(buffer, case, options).whole()
    buffer.destroy()
    assert np.array_equal(first.combined_x, second.combined_x)
    return second


CALLS = {
    "bf16": (round_trip, OPTIONS),
    "fp8, cached": (cached_round_trip, replace(OPTIONS, fp8="row")),
    "num_worst_tokens": (round_trip, replace(OPTIONS, num_worst_tokens=40, num_biases=2)),
    "without top-k": (cached_round_trip, replace(OPTIONS, with_topk=False)),
}
LOW_LATENCY_CALLS = {
    "bf16": LowLatencyOptions(),
    "fp8, once": LowLatencyOptions(deduplicate=True, use_fp8=True),
    "logfmt, hooks": LowLatencyOptions(use_logfmt=True, dispatch_as=HOOK, combine_as=HOOK),
    "once, no TMA": LowLatencyOptions(deduplicate=True, compute_capability=SM80),
}


@emulator_only
@pytest.mark.parametrize("calls", both_parts(["bf16", "fp8, cached"], ["num_worst_tokens", "without top-k"]))
def test_rows_get_to_their_experts_and_back(calls):
    fn, options = CALLS[calls]
    run_intranode(make_case(1, num_ranks=2, num_tokens=7, hidden=128), options, fn=fn, memory_model="checked")


@dear
@emulator_only
@pytest.mark.parametrize(
    ("calls", "memory_model"),
    both_parts(
        [("bf16", "checked"), ("fp8, once", "delayed")], [("logfmt, hooks", "checked"), ("once, no TMA", "checked")]
    ),
)
def test_low_latency_rows_get_to_their_experts_and_back(calls, memory_model):
    case = make_low_latency_case(1, num_ranks=3, num_tokens=2, hidden=128)
    run_low_latency(case, LOW_LATENCY_CALLS[calls], fn=low_latency_trips, memory_model=memory_model)


@kernel(max_threads=32)
def add_to_peer(out: Out, peers: Peers):
    """One thread adds to a cell of the next rank."""
    atom_add_relaxed_sys_s32(buffer_of(peers, 1 - peers.rank), 1)


@kernel(max_threads=32)
def add_over_network(network: Network):
    amo_add(network, 0, 1, 1 - network.rank, 0, True)


@kernel(max_threads=32)
def come_together(out: Out, peers: Peers, bounds: Bounds):
    barrier_block(peers, bounds)
    st_weak_s32(out, 1)


def launch_own(comm, function, *arguments, parameter="peers", start=None):
    """Launch a kernel on memory of the host; what came of it."""
    memory = nbep.SharedMemory.create(comm, 256, handle_type="host", timeout_ms=5000)
    runtime = memory.runtime
    out = runtime.allocate_host_visible(128, "out")
    if start is not None:
        memory.symmetric.write(256, np.full(comm.size, start, np.int32))
        comm.barrier()
    given = [{"out": out.address}.get(name, getattr(memory, name, None)) for name in arguments]
    for _ in range(3):
        runtime.launch(memory.comm_stream, function, 1, 32, 0, *given)
    memory.wait()
    numbers = memory.symmetric.read(256, comm.size, np.int32).tolist()
    memory.close()
    return numbers


@emulator_only
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
def test_an_atomic_of_scope_sys_on_memory_of_the_host_is_an_error(memory_model):
    adds = over(add_to_peer, HostPeers, "peers")
    with pytest.raises(EmulatorError, match=r"atomic add of scope sys on `nvl_buffer` of rank .: .*memory of the host"):
        spawn(launch_own, 2, (adds, "out", "peers"), memory_model=memory_model)


@emulator_only
def test_the_barrier_of_other_memory_is_an_error_there(monkeypatch):
    monkeypatch.setitem(meet_peer.versions, HostPeers, meet_peer.versions[Peers])
    with pytest.raises(EmulatorError, match=r"of scope sys on `nvl_buffer`.*barrier_signal.*memory of the host"):
        run_intranode(make_case(1, num_ranks=2, num_tokens=2), OPTIONS, fn=cached_round_trip)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (come_together, ("out", "peers", "bounds"), r"peers: got HostPeers; must be Peers, or the kernel over\(come_t"),
        (add_over_network, ("network",), r"network: got HostNetwork; must be Network, or the kernel over\(add_over_n"),
    ],
)
def test_a_kernel_for_memory_of_a_gpu_is_refused(function, arguments, words):
    def main(comm):
        with pytest.raises(ValueError, match=words):
            launch_own(comm, function, *arguments)

    spawn(main, 2)


def test_own_kernels_meet_and_add_there():
    meets, adds = over(come_together, HostPeers, "peers"), over(add_over_network, HostNetwork)
    assert spawn(launch_own, 2, (meets, "out", "peers", "bounds")) == [[3 * ONE] * 2] * 2
    spawn(launch_own, 2, (adds, "network"))


def test_the_sum_of_a_barrier_may_wrap_around():
    meets = over(come_together, HostPeers, "peers")
    last = (1 << 31) - 2 * ONE
    numbers = spawn(lambda comm: launch_own(comm, meets, "out", "peers", "bounds", start=last), 2)
    assert numbers == [[last + 3 * ONE - (1 << 32)] * 2] * 2


@dear
@emulator_only
@pytest.mark.parametrize("step", ["meet_by_storing: release of host-barrier", "wait_sum: acquire of host-barrier"])
def test_an_order_that_is_missing_in_the_barrier_is_found(step):
    with broken(f"host_barrier.{step}"), pytest.raises((DataRace, AssertionError)):
        run_intranode(make_case(1, num_ranks=2, num_tokens=5), OPTIONS, memory_model="checked")


@emulator_only
def test_a_count_that_is_stored_relaxed_is_found():
    case = make_low_latency_case(1, num_ranks=2, num_tokens=3, hidden=128)
    with broken("network.host.amo_add: release of network-amo"), pytest.raises((DataRace, AssertionError)):
        run_low_latency(case, fn=low_latency_trips, memory_model="checked")


@emulator_only
def test_a_peer_that_does_not_come_to_the_barrier_is_named():
    case = make_case(1, num_ranks=2, num_tokens=3)
    failed: list[int] = []

    def main(comm):
        buffer = make_buffer(comm, case, OPTIONS)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                hold_back(patch, "notify_dispatch", failed)
            words = r"for rank 1: .*barrier_signal, expected 0, saw 1" if comm.rank == 0 else "for rank 0"
            with pytest.raises(nbep.PeerTimeout, match=words) as error:
                dispatch(buffer, case, OPTIONS, comm.rank)
            failed.append(error.value.rank)
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire")


RDMA = {"num_rdma_bytes": 1 << 20, "low_latency_mode": True}


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "message"),
    [
        (2, {"num_zero_copy_bytes": 128}, 'num_zero_copy_bytes: got 128; must be 0 with handle_type="host"'),
        (2, {**RDMA, "enable_shrink": True}, 'enable_shrink: got True; must be False with handle_type="host": who'),
        (2, {**RDMA, "transport": "ibgda"}, 'transport: got ibgda; must be direct with handle_type="host"'),
        (4, {"num_rdma_bytes": 1 << 20, "num_nvl_peers": 2}, "handle_type: got host; must be another one between 2 n"),
    ],
)
def test_what_needs_atomics_between_gpus_is_refused(num_ranks, arguments, message, starts_nothing):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            nbep.Buffer(comm, num_nvl_bytes=1 << 20, handle_type="host", **arguments)

    with starts_nothing():
        spawn(main, num_ranks)


@pytest.mark.thorough
def test_low_latency_calls_reach_more_ranks_than_a_node_has():
    case = make_low_latency_case(1, num_ranks=12, num_tokens=1, hidden=128, experts_per_rank=1)
    run_low_latency(case, fn=low_latency_trips)
