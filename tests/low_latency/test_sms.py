"""The SMs that a low-latency call takes, beside a kernel of another library that waits for its peers, too."""

import pytest
from low_latency import ASYNC, HOOK, Options, Trip, check, make_buffer, make_low_latency_case
from target import spawn

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_acquire_sys_s32, st_release_sys_s32, wait_expired
from nbep.device.protocols.peers import Peers, buffer_of

CASE = make_low_latency_case(1, num_ranks=2, num_tokens=3)
NEVER = 1 << 62


@kernel(max_threads=1)
def all_reduce(peers: Peers):
    """A kernel of another library: one block on each rank, which waits for the other one's."""
    for peer in range(peers.num_ranks):
        st_release_sys_s32(buffer_of(peers, peer) + 4 * peers.rank, 1)
    for peer in range(peers.num_ranks):
        while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + 4 * peer) == 0:
            wait_expired(NEVER)


def in_other_orders(comm, num_sms):
    """Rank 0 starts the other library's kernel before its dispatch, rank 1 behind it."""
    options = Options(dispatch_as=ASYNC, combine_as=ASYNC)
    buffer = make_buffer(comm, [(CASE, options)], low_latency_num_sms=num_sms)
    other = nbep.SharedMemory.create(comm, 128)
    stream, trip = other.runtime.create_stream("nccl"), Trip(buffer, CASE, options)
    comm.barrier()

    def reduce():
        other.runtime.launch(stream, all_reduce, 1, 1, 0, other.peers)

    for start in (reduce, trip.send_dispatch) if comm.rank == 0 else (trip.send_dispatch, reduce):
        start()
        sms = other.runtime.world.ranks[comm.rank].sms  # what is started first has its SMs
        other.runtime.world.host_wait(lambda sms=sms: sms.held > 0, "an SM")
    trip.receive_dispatch()
    stream.synchronize()
    trip.send_combine()
    trip.receive_combine()
    other.close()
    buffer.destroy()
    return trip.outcome


@pytest.mark.emulator_only("it counts SMs")
def test_with_an_sm_left_for_it_a_kernel_of_another_library_may_start_in_any_order():
    for seed in range(3):
        check(CASE, Options(), spawn(in_other_orders, 2, (1,), seed, num_sms=2), f"seed {seed}")


@pytest.mark.emulator_only("it counts SMs")
def test_with_all_sms_the_two_close_a_circle():
    with pytest.raises(nbep.DeadlockError, match="cannot start: "):
        spawn(in_other_orders, 2, (0,), num_sms=2)


@pytest.mark.parametrize("num_sms", [1, 2, 1 << 20])
def test_no_more_blocks_than_it_was_given(num_sms):
    def main(comm):
        options = Options(dispatch_as=HOOK)
        buffer = make_buffer(comm, [(CASE, options)], low_latency_num_sms=num_sms)
        mode = buffer._memory.low_latency
        most = mode.runtime.resident_blocks([], 0) if hasattr(mode.runtime, "world") else mode.num_blocks
        assert mode.num_blocks == min(num_sms, most)
        outcome = Trip(buffer, CASE, options).whole()
        buffer.destroy()
        return outcome

    check(CASE, Options(), spawn(main, 2), f"{num_sms} SMs")


@pytest.mark.parametrize(
    ("given", "low_latency_mode", "words"),
    [
        ((-1, -1), True, "low_latency_num_sms: got -1; must be an integer of at least 0"),
        ((1, 2), True, "low_latency_num_sms: got (?s:.*)must be the same on all ranks"),
        ((3, 3), False, "low_latency_num_sms: got 3; must be 0 without low_latency_mode"),
    ],
)
def test_what_is_wrong_is_refused(given, low_latency_mode, words):
    def main(comm):
        with pytest.raises(ValueError, match=words):
            nbep.Buffer(comm, 1 << 17, 1 << 18, low_latency_mode, low_latency_num_sms=given[comm.rank])

    spawn(main, 2)
