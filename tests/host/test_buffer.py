"""The life of a Buffer: construct, use, destroy."""

import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from arrays import to_numpy, to_target
from processes import run_python
from target import spawn

import nbep
from nbep.device.layout.intranode import TRAILER_BYTES
from nbep.device.layout.low_latency import MAX_RANKS
from nbep.device.layout.low_latency import trailer_bytes as rdma_trailer_bytes
from nbep.emulator import UseAfterFree
from nbep.host.calls import BARRIER, make_call

address_spaces = pytest.mark.emulator_only("it has an address space for each rank")

VERBS = {
    "get_comm_stream": lambda buffer: buffer.get_comm_stream(),
    "get_local_buffer_tensor": lambda buffer: buffer.get_local_buffer_tensor(np.uint8),
    "get_dispatch_layout": lambda buffer: buffer.get_dispatch_layout(np.zeros((1, 1), np.int64), 2),
    "dispatch": lambda buffer: buffer.dispatch(np.zeros((1, 8), ml_dtypes.bfloat16)),
    "combine": lambda buffer: buffer.combine(np.zeros((1, 8), ml_dtypes.bfloat16), None),
}


@address_spaces
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_rank_sees_every_peers_memory(num_ranks):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1024)
        own = buffer.get_local_buffer_tensor(np.int32)
        own[:] = comm.rank
        comm.barrier()
        memory = buffer._memory
        table = memory.symmetric.array(np.int64, memory.peers.buffer_ptrs - memory.symmetric.address, num_ranks)
        signals = memory.symmetric.array(
            np.int64, memory.peers.barrier_signal_ptrs - memory.symmetric.address, num_ranks
        )
        assert table[comm.rank] == memory.symmetric.address
        assert (signals - table == 1024).all()
        segments = [memory.runtime.space.segments[int(address) >> 32] for address in table]
        comm.barrier()
        buffer.destroy()
        return [segment.rank for segment in segments]

    assert spawn(main, num_ranks) == [list(range(num_ranks))] * num_ranks


def test_attributes_are_deepeps():
    def main(comm):
        buffer = nbep.Buffer(comm, 256, explicitly_destroy=True)
        assert (buffer.rank, buffer.group_size, buffer.group) == (comm.rank, 2, comm)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (256, 0, False)
        assert buffer.explicitly_destroy
        assert repr(buffer) == f"<Buffer of rank {comm.rank} of 2, 256 bytes>"
        buffer.destroy()

    spawn(main, 2)


def test_group_and_comm_name_the_same_thing():
    def main(comm):
        nbep.Buffer(None, 256, comm=comm).destroy()
        nbep.Buffer(comm, 256, comm=comm).destroy()

    spawn(main, 2)


@pytest.mark.parametrize("verb", VERBS)
def test_use_after_destroy_is_refused(verb):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        buffer.destroy()
        with pytest.raises(ValueError, match=f"buffer: got a destroyed one; {verb} must come before destroy"):
            VERBS[verb](buffer)

    spawn(main, 2)


def test_a_second_destroy_is_refused():
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        buffer.destroy()
        with pytest.raises(ValueError, match=r"^buffer: got one that is destroyed already; must be destroyed once$"):
            buffer.destroy()

    spawn(main, 2)


def test_destroy_waits_for_all_ranks():
    left = []

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        if comm.rank == 1:
            comm.runtime.current_stream.synchronize()
        assert left == []
        buffer.destroy()
        left.append(comm.rank)

    for seed in range(5):
        left.clear()
        spawn(main, 4, seed=seed)


@address_spaces
def test_destroy_frees_what_was_allocated():
    def main(comm):
        space = comm.runtime.space
        before = set(space.segments)
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        assert set(space.segments) > before
        buffer.destroy()
        assert set(space.segments) == before

    spawn(main, 2)


@pytest.mark.emulator_only("a GPU's ranks find no deadlocks")
def test_a_rank_that_does_not_destroy_is_named():
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        if comm.rank == 0:
            buffer.destroy()
        return buffer

    with pytest.raises(nbep.DeadlockError, match="destroy: rank 1 did not come"):
        spawn(main, 2)


@address_spaces
def test_memory_of_a_destroyed_buffer_is_out_of_reach():
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        memory = buffer._memory
        buffer.destroy()
        comm.barrier()
        memory.runtime.launch(
            memory.comm_stream,
            nbep.host.intranode.combine.cached_notify_combine,
            1,
            64,
            0,
            None,
            0,
            0,
            0,
            memory.peers,
            memory.bounds,
            make_call(BARRIER),
        )
        memory.comm_stream.synchronize()

    with pytest.raises(UseAfterFree, match="nvl_buffer"):
        spawn(main, 2)


@pytest.mark.emulator_only("threads cannot catch warnings apart")
@pytest.mark.parametrize("explicitly", [True, False])
def test_only_explicitly_destroyed_buffers_warn_when_they_go_away(explicitly):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256, explicitly_destroy=explicitly)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del buffer
        return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]

    for rank, messages in enumerate(spawn(main, 2)):
        assert messages == ([f"<Buffer of rank {rank} of 2, 256 bytes> goes away without destroy()"] * explicitly)


def test_the_warning_is_seen_without_asking_for_it():
    program = "import nbep; nbep.spawn(lambda comm: nbep.Buffer(comm, 256, explicitly_destroy=True), 2, 'emulator')"
    output = run_python("-c", program, PYTHONWARNINGS=None)
    assert "RuntimeWarning: <Buffer of rank 0 of 2, 256 bytes> goes away without destroy()" in output


LOW_LATENCY = {"num_rdma_bytes": 1024, "low_latency_mode": True}
GROUPS, MULTIPLE = "a group of 2, 4 or 8 ranks", "must be a multiple of 128"
# What all ranks pass that is wrong, of how many ranks, and the message.
WRONG = [
    *((num_ranks, {}, f"group: got {num_ranks} ranks; must be {GROUPS}") for num_ranks in (1, 3, 5, 7)),
    *((num_ranks, LOW_LATENCY, f"group: got {num_ranks} ranks; must be {GROUPS}") for num_ranks in (3, 6)),
    (2, {"num_nvl_bytes": 100}, f"num_nvl_bytes: got 100; {MULTIPLE}"),
    *((2, {"num_nvl_bytes": n}, f"num_nvl_bytes: got {n!r}; must be an integer") for n in (-128, 128.0, True, "many")),
    (2, {"low_latency_mode": True}, "num_rdma_bytes: got 0; must be positive with low_latency_mode; see get_low_laten"),
    (2, LOW_LATENCY | {"num_rdma_bytes": 100}, f"num_rdma_bytes: got 100; {MULTIPLE}"),
    (2, LOW_LATENCY | {"num_rdma_bytes": 1e3}, "num_rdma_bytes: got 1000.0; must be an integer of at least 0"),
    (2, {"num_rdma_bytes": 1}, f"num_rdma_bytes: got 1; {MULTIPLE}"),
    (2, {"enable_shrink": True}, "enable_shrink: got True; must be False without low_latency_mode"),
    (2, {"handle_type": "fd"}, "handle_type: got 'fd'; must be one of ipc, posix_fd, fabric, host"),
    (2, {"allow_mnnvl": 1}, "allow_mnnvl: got 1; must be True or False"),
]


@pytest.mark.parametrize(("num_ranks", "arguments", "message"), WRONG)
def test_a_wrong_argument_is_refused_on_all_ranks_also_if_one_passes_it(num_ranks, arguments, message, starts_nothing):
    def main(comm, wrong):
        with pytest.raises(ValueError, match=re.escape(message)) as failure:
            nbep.Buffer(comm, **({"num_nvl_bytes": 256} | (arguments if comm.rank in wrong else {})))
        return str(failure.value)

    with starts_nothing():
        spawn(main, num_ranks, args=(range(num_ranks),))
        if not message.startswith("group"):
            assert len(set(spawn(main, 2, args=((1,),)))) == 1


@pytest.mark.parametrize(
    ("name", "all_pass", "rank_1_passes"),
    [
        ("num_nvl_bytes", {"num_nvl_bytes": 128}, {"num_nvl_bytes": 256}),
        ("num_rdma_bytes", LOW_LATENCY, {"num_rdma_bytes": 2048}),
        ("enable_shrink", LOW_LATENCY, {"enable_shrink": True}),
    ],
)
def test_settings_that_differ_between_ranks_are_refused_on_every_rank(name, all_pass, rank_1_passes, starts_nothing):
    def main(comm):
        with pytest.raises(ValueError, match=rf"^{name}: got \[.*\] on ranks 0 to 1; must be the same on all ranks"):
            nbep.Buffer(comm, **{**all_pass, **(rank_1_passes if comm.rank == 1 else {})})

    with starts_nothing():
        spawn(main, 2)


@pytest.mark.emulator_only("a GPU takes what its memory holds")
def test_sizes_beyond_the_emulators_addresses_are_refused(starts_nothing):
    hint = nbep.Config(80, 6, 512).get_nvl_buffer_size_hint(28672, 8)
    most = ((1 << 32) - 1 - max(TRAILER_BYTES, rdma_trailer_bytes(MAX_RANKS))) // 128 * 128

    def main(comm):
        for size in (1 << 32, hint):
            message = f"got {size}; must be at most {most} on the emulator"
            with pytest.raises(ValueError, match=f"num_nvl_bytes: {message}"):
                nbep.Buffer(comm, size)
            with pytest.raises(ValueError, match=f"num_rdma_bytes: {message}"):
                nbep.Buffer(comm, 0, size, low_latency_mode=True)

    with starts_nothing():
        spawn(main, 2)
    spawn(lambda comm: nbep.Buffer(comm, most).destroy(), 2)
    spawn(lambda comm: nbep.Buffer(comm, 0, most, low_latency_mode=True).destroy(), 2)


def test_attributes_of_the_low_latency_mode_are_deepeps():
    def main(comm):
        buffer = nbep.Buffer(comm, 0, 1024, low_latency_mode=True, num_qps_per_rank=8, enable_shrink=True)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (0, 1024, True)
        buffer.destroy()

    spawn(main, 3)


def test_names_that_deepep_does_not_have_are_no_attributes(on_two_ranks):
    def main(buffer):
        with pytest.raises(AttributeError, match=r"^'Buffer' object has no attribute 'dispach'$"):
            buffer.dispach  # noqa: B018

    on_two_ranks(main)


@pytest.mark.parametrize("text", ["0", "-5", "soon", "nan", "inf", "1.1e12"])
def test_a_timeout_that_is_not_positive_or_too_large_is_refused(text, monkeypatch, starts_nothing):
    monkeypatch.setenv("NBEP_TIMEOUT_MS", text)

    def main(comm):
        with pytest.raises(ValueError, match=f"NBEP_TIMEOUT_MS: got '{text}'; must be a positive number"):
            nbep.Buffer(comm, num_nvl_bytes=256)

    with starts_nothing():
        spawn(main, 2)


@pytest.mark.emulator_only("the host writes into arrays")
def test_local_buffer_tensor_is_the_buffer_without_what_lies_behind_it(on_two_ranks):
    def main(buffer):
        whole = buffer.get_local_buffer_tensor(np.uint8)
        assert whole.shape == (1024,)
        assert buffer._memory.symmetric.num_bytes == 1024 + TRAILER_BYTES
        whole[:] = np.arange(1024) % 256
        words = buffer.get_local_buffer_tensor(np.dtype(np.uint32), (3, 2), offset=2)
        assert words.shape == (3, 2)
        assert words[0, 0] == int.from_bytes(bytes([8, 9, 10, 11]), "little")
        assert buffer.get_local_buffer_tensor(ml_dtypes.bfloat16).shape == (512,)
        assert buffer.get_local_buffer_tensor(np.uint8, offset=1024).shape == (0,)

    on_two_ranks(main, num_nvl_bytes=1024)


@pytest.mark.emulator_only("a GPU's memory is not NumPy's")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": (257,)}, r"size: got \(257,\) at offset 0; must be at most 256 elements"),
        ({"size": (2, 3), "offset": 251}, r"size: got \(2, 3\) at offset 251; must be at most 5 elements"),
        ({"offset": 257}, "offset: got 257; must be at most 256"),
        ({"offset": -1}, "offset: got -1; must be an integer of at least 0"),
        ({"size": 5}, "size: got 5; must be a shape, or None"),
        ({"size": (2, -1)}, r"size\[1\]: got -1; must be an integer of at least 0"),
        ({"size": "4"}, r"size\[0\]: got '4'; must be an integer of at least 0"),
    ],
)
def test_local_buffer_tensor_past_the_end_is_refused(arguments, message, on_two_ranks):
    def main(buffer):
        with pytest.raises(ValueError, match=message):
            buffer.get_local_buffer_tensor(np.int32, **arguments)

    on_two_ranks(main, num_nvl_bytes=1024)


def test_numpys_integers_are_integers(inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=np.int64(1 << 17))
        arguments = inputs(buffer)
        buffer.get_dispatch_layout(arguments["topk_idx"], np.int32(4))
        recv_x = buffer.dispatch(**arguments, num_worst_tokens=np.int64(6), expert_alignment=np.uint8(2))[0]
        part = buffer.get_local_buffer_tensor(recv_x.dtype, (np.int64(2), 3), offset=np.int32(1))
        buffer.destroy()
        return type(buffer.num_nvl_bytes), tuple(recv_x.shape), tuple(part.shape)

    assert spawn(main, 2) == [(int, (6, 128), (2, 3))] * 2


def test_a_buffer_of_no_bytes_still_counts_tokens(on_two_ranks):
    def main(buffer):
        num_tokens_per_rank, *_ = buffer.get_dispatch_layout(to_target(np.array([[0, 3], [3, -1]])), 4)
        return to_numpy(num_tokens_per_rank).tolist()

    assert on_two_ranks(main, num_nvl_bytes=0) == [[1, 2]] * 2


def test_sm90_paths_are_there():
    assert nbep.Buffer.is_sm90_compiled()
