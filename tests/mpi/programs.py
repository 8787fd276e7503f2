"""What the tests run under mpiexec, once per rank: `python -m mpi4py programs.py NAME`. A failure ends all ranks."""

import gc
import os
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from mpi4py import MPI

sys.path.append(str(Path(__file__).parents[1] / "support"))

import ml_dtypes
import numpy as np
import pytest
from cases import make_case
from intranode import Options, check, combine, dispatch, dispatch_arguments, dispatch_input, num_nvl_bytes, round_trip
from memory_programs import arrays_that_outlive_their_buffer, windows_without_room  # noqa: F401 - called by name

import nbep
from nbep.device.kernels.intranode.cached_notify import cached_notify_combine
from nbep.emulator import UseAfterFree
from nbep.host.calls import BARRIER, make_call
from nbep.host.ranks.await_ranks import duplicate
from nbep.host.target import process
from nbep.host.target.cuda.mailbox import Mailbox
from nbep.host.target.process import process_runtime


def check_all_ranks(comm, case, options, outcome):
    """Compare what all ranks got with the reference, on rank 0."""
    outcomes = comm.gather(outcome)
    if comm.rank == 0:
        check(case, options, outcomes, 0)


def round_trips(comm):
    """Layout, dispatch and combine of several kinds, each with a buffer of its own."""
    num_ranks = comm.size
    for case, options in (
        (make_case(1, num_ranks=num_ranks, num_tokens=[5, 0, 7, 1][:num_ranks]), Options()),
        (make_case(2, num_ranks=num_ranks, num_tokens=9, routing="one_rank"), Options(num_biases=2)),
        (make_case(3, num_ranks=num_ranks, num_tokens=4, hidden=256), Options(fp8="column", with_topk=False)),
        (make_case(4, num_ranks=num_ranks, num_tokens=3), Options(num_worst_tokens=3 * num_ranks)),
        (make_case(5, num_ranks=num_ranks, num_tokens=6), Options(expert_alignment=4)),
        (make_case(6, num_ranks=num_ranks, num_tokens=6, hidden=512), Options(fp8="row", zero_copy=True)),
    ):
        check_all_ranks(comm, case, options, round_trip(comm, case, options))


def one_buffer_many_calls(comm):
    """Back-to-back calls, cached dispatches and two handles at once on one buffer."""
    first, second = (make_case(seed, num_ranks=comm.size, num_tokens=6) for seed in (6, 7))
    options = Options()
    buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(first, options))
    a = dispatch(buffer, first, options, comm.rank)
    b = dispatch(buffer, second, options, comm.rank)
    combine(buffer, first, options, comm.rank, a)
    b.cached_x = buffer.dispatch(dispatch_input(second, options, comm.rank), handle=b.handle, config=options.config)[0]
    combine(buffer, second, options, comm.rank, b)
    buffer.destroy()
    check_all_ranks(comm, first, options, a)
    check_all_ranks(comm, second, options, b)


def part_of_the_ranks(comm):
    """Two groups of two ranks at the same time, then all four together."""
    part = comm.Split(comm.rank % 2)
    options = Options()
    case = make_case(8 + comm.rank % 2, num_ranks=2, num_tokens=5)
    check_all_ranks(part, case, options, round_trip(part, case, options))
    case = make_case(10, num_ranks=4, num_tokens=5)
    check_all_ranks(comm, case, options, round_trip(comm, case, options))


def part_of_the_ranks_first(comm):
    """Two of the four ranks have their runtimes when all four come together; then other parts, with nothing to make."""
    options = Options()
    for seed, ranks in enumerate(([0, 1], [0, 1, 2, 3], [1, 2], [3, 0])):
        part = comm.Split(0 if comm.rank in ranks else 1, comm.rank)
        if comm.rank in ranks:
            case = make_case(14 + seed, num_ranks=len(ranks), num_tokens=5)
            check_all_ranks(part, case, options, round_trip(part, case, options))


@contextmanager
def pretended_gpus(comm, has_gpu, num_gpus=8):
    """Runtimes of GPUs that do not exist; the one of a rank is the number of its device."""
    from nbep.host.target.cuda import driver, runtime

    class Pretended:
        target = "cuda"

        def __init__(self, ordinal, rank):
            self.ordinal = ordinal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "resolve_target", lambda wanted: "cuda" if has_gpu(comm.rank) else "emulator")
        patch.setattr(driver, "current_ordinal", lambda: None)
        patch.setattr(driver, "num_devices", lambda: num_gpus)
        patch.setattr(runtime, "SharedDevice", lambda ordinal: ordinal)
        patch.setattr(runtime, "CudaRuntime", Pretended)
        yield patch


def part_of_the_gpus_first(comm):
    """Ranks that have a GPU come together with ranks that have none yet."""
    part = comm.Split(0 if comm.rank < 2 else MPI.UNDEFINED, comm.rank)
    with pretended_gpus(comm, lambda rank: True) as patch:
        if comm.rank < 2:
            assert process_runtime(part).ordinal == comm.rank
        with pytest.MonkeyPatch.context() as fault:
            if comm.rank == 2:
                fault.setattr(process, "_own_ordinal", lambda *_: 1 // 0)
            with pytest.raises(RuntimeError, match=r"^rank 2: .*division"):
                process_runtime(comm)
        for _ in range(2):
            assert process_runtime(comm).ordinal == comm.rank
        patch.setenv("NBEP_TARGET", "cuda")  # it counts when a runtime is made
        assert process_runtime(comm).ordinal == comm.rank


def two_groups_on_one_host(comm):
    """No two ranks take the same GPU; if the launcher does not say who is who, each group counts for itself."""

    def gpu_under(group, num_gpus=8, **variables):
        """The GPU of this rank if its launcher sets no variables but these."""
        with pretended_gpus(comm, lambda rank: True, num_gpus) as patch:
            for name in process.LOCAL_RANKS:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, str(value))
            patch.setattr(process, "_runtime", None)
            return process_runtime(group).ordinal

    part = comm.Split(comm.rank // 2, comm.rank)
    with pretended_gpus(comm, lambda rank: True):
        assert process_runtime(part).ordinal == comm.rank
    assert gpu_under(part) == part.rank
    for inherited in (0, ""):  # by all from a batch script; or it says nothing
        assert gpu_under(comm, SLURM_LOCALID=inherited) == comm.rank
    # Every other process of a launch: their numbers would meet on half of the GPUs.
    assert gpu_under(comm, 4, MPI_LOCALRANKID=2 * comm.rank) == comm.rank
    # More ranks than GPUs
    assert gpu_under(comm, 2, MPI_LOCALRANKID=comm.rank) == comm.rank % 2


def part_of_the_ranks_without_gpus(comm):
    """What ranks have used before must go with what the others can use."""
    part = comm.Split(0 if comm.rank < 2 else MPI.UNDEFINED, comm.rank)
    with pretended_gpus(comm, lambda rank: rank < 2) as patch:
        if comm.rank < 2:
            process_runtime(part)
        with pytest.raises(RuntimeError, match="group: got ranks that have used GPUs, but 2 of 4 ranks would run on"):
            process_runtime(comm)
        if comm.rank == 3:
            patch.setenv("NBEP_TARGET", "cuda")
        with pytest.raises(ValueError, match=r"NBEP_TARGET: got \['auto', 'auto', 'auto', 'cuda'\]; must be the same"):
            process_runtime(comm)


def asynchronous(comm):
    """The host waits inside MPI while kernels run."""
    case, options = make_case(11, num_ranks=comm.size, num_tokens=5), Options(num_worst_tokens=5 * comm.size)
    buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
    _, arguments = dispatch_arguments(buffer, case, options, comm.rank)
    *_, handle, event = buffer.dispatch(**arguments, async_finish=True)
    comm.barrier()
    event.current_stream_wait()
    assert handle.rank_prefix_matrix[-1].sum() == sum(layout.is_token_in_rank.sum() for layout in case.layouts)
    buffer.destroy()


def peer_that_does_not_come(comm):
    """Run with a small NBEP_TIMEOUT_MS: rank 0 dispatches alone, raises, and the group can still be destroyed.

    The others come to destroy when rank 0 has raised: however slow it is, none of them waits too long for it there.
    """
    case, options = make_case(12, num_ranks=comm.size, num_tokens=2), Options()
    buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
    if comm.rank == 0:
        with pytest.raises(nbep.PeerTimeout) as failure:
            dispatch(buffer, case, options, 0)
        assert (failure.value.rank, failure.value.cell) == (0, "barrier_signal")
        assert failure.value.peer in range(1, comm.size)
    comm.barrier()
    buffer.destroy()


def communicator_that_is_never_done(comm):
    """MPI's Dup waits for ever for a rank that is killed in it. The process ends then, with status 1."""
    stuck = type("Stuck", (MPI.Intracomm,), {"Dup": lambda *_: threading.Event().wait()})
    with pytest.raises(nbep.PeerTimeout, match="did not come to make, or to destroy, a Buffer in 100 ms"):
        duplicate(stuck(comm), 100_000_000)
    print(f"rank {comm.rank} has waited in time", flush=True)
    comm.barrier()


def peer_that_does_not_destroy(comm):
    """Run with a small NBEP_TIMEOUT_MS: all but rank 0 destroy and raise; when rank 0 comes, they have given up."""
    buffer = nbep.Buffer(comm, num_nvl_bytes=256)
    comm.barrier()  # so that those that come are there in time
    if comm.rank == 0:
        for peer in range(1, comm.size):
            assert comm.recv(source=peer) == "given up"
    with pytest.raises(nbep.PeerTimeout, match=r"did not come to destroy in .* ms, or had given up before") as failure:
        buffer.destroy()
    peers = [0] if comm.rank else list(range(1, comm.size))
    assert (failure.value.rank, failure.value.peer) == (comm.rank, peers[0])
    assert f": rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))} did not come" in str(failure.value)
    if comm.rank:
        comm.send("given up", 0)


def rank_that_leaves_a_call_out(comm):
    """Run with a small NBEP_TIMEOUT_MS: rank 0 goes to destroy, the others dispatch once more. Rank 0 gets all reports.

    A time-out of destroy is twice as long as that of a kernel, so the others have reported by then.
    """
    case, options = make_case(12, num_ranks=comm.size, num_tokens=2), Options()
    buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
    dispatch(buffer, case, options, comm.rank)
    if comm.rank:
        with pytest.raises(nbep.PeerTimeout, match=f"rank {comm.rank}: the notify .* for rank 0"):
            dispatch(buffer, case, options, comm.rank)
        comm.recv(source=0)
    with pytest.raises(nbep.PeerTimeout, match="did not come to destroy") as failure:
        buffer.destroy()
    assert f"rank {comm.rank} has made {1 + (comm.rank > 0)} collective call" in failure.value.__notes__[0]
    if comm.rank == 0:
        table = failure.value.__notes__[1]
        assert "They wait for each other: " + ", ".join(f"0 and {r}" for r in range(1, comm.size)) in table, table
        assert "Collective calls so far: 2; rank 0 has made 1, the last one dispatch." in table, table
        for rank in range(1, comm.size):
            comm.send("go on", rank)


def rank_that_ends_while_another_destroys(comm):
    """Not under mpi4py's runner, which aborts: rank 0 raises, rank 1 waits for it in destroy, and both end."""
    case, options = make_case(12, num_ranks=comm.size, num_tokens=2), Options()
    buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
    if comm.rank == 0:
        raise RuntimeError("rank 0 has a bug")
    buffer.destroy()


def bad_arguments(comm):
    """What one rank gets wrong, and sizes that differ, are refused on every rank, and the group goes on."""
    with pytest.raises(ValueError, match="must be the same on all ranks"):
        nbep.Buffer(comm, num_nvl_bytes=128 * (1 + comm.rank))
    with pytest.raises(ValueError, match=r"^rank 1: num_nvl_bytes: got 100; must be a multiple"):
        nbep.Buffer(comm, num_nvl_bytes=100 if comm.rank == 1 else 256)
    if comm.rank == 1:
        os.environ["NBEP_TIMEOUT_MS"] = "soon"
    with pytest.raises(ValueError, match=r"^rank 1: NBEP_TIMEOUT_MS: got 'soon'; must be a positive number"):
        nbep.Buffer(comm, num_nvl_bytes=256)
    os.environ.pop("NBEP_TIMEOUT_MS", None)
    buffer = nbep.Buffer(comm, num_nvl_bytes=256)
    buffer.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        buffer.get_comm_stream()


def one_rank(comm):
    """Without mpiexec."""
    hint = "^rank 0: group: got 1 ranks; must be a group of 2, 4 or 8 ranks; start the script under mpiexec$"
    with pytest.raises(ValueError, match=hint):
        nbep.Buffer(comm, num_nvl_bytes=256)


def bad_targets(comm):
    """A target that one rank does not know, or that differs, is refused on every rank, and the group goes on."""
    os.environ["NBEP_TARGET"] = "gpu" if comm.rank == 1 else "emulator"
    with pytest.raises(ValueError, match=r"^rank 1: NBEP_TARGET: got 'gpu'; must be one of auto, emulator, cuda"):
        nbep.Buffer(comm, num_nvl_bytes=256)
    targets = ["emulator", "auto", *["emulator"] * (comm.size - 2)]
    os.environ["NBEP_TARGET"] = targets[comm.rank]
    with pytest.raises(ValueError, match=re.escape(f"NBEP_TARGET: got {targets}; must be the same on all ranks")):
        nbep.Buffer(comm, num_nvl_bytes=256)
    os.environ["NBEP_TARGET"] = "emulator"
    nbep.Buffer(comm, num_nvl_bytes=256).destroy()


def one_rank_has_no_memory(comm):
    """A rank that cannot allocate is named by all, and the group can try again."""
    runtime = process_runtime(comm)

    def no_memory(num_bytes, name, *_):
        raise MemoryError(f"no room for {name}")

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(runtime, "allocate", no_memory)
        with pytest.raises(RuntimeError, match=r"^rank 1: no room for claim"):
            nbep.Buffer(comm, num_nvl_bytes=256)
    nbep.Buffer(comm, num_nvl_bytes=256).destroy()


def file_descriptors(comm):
    """Every rank sends a file to every other, and reads what the others wrote."""
    mailbox = Mailbox()
    fd = os.memfd_create("file")
    os.pwrite(fd, f"rank {comm.rank}".encode(), 0)
    for peer, address in enumerate(comm.allgather(mailbox.address)):
        if peer != comm.rank:
            mailbox.send(fd, address, comm.rank, peer)
    os.close(fd)
    for peer in range(comm.size):
        if peer != comm.rank:
            fd = mailbox.receive(peer)
            assert os.pread(fd, 100, 0) == f"rank {peer}".encode()
            os.close(fd)
    mailbox.close()


def calls_that_differ(comm):
    """What the ranks must pass alike and do not, each of them reports with both values."""
    last = comm.rank == comm.size - 1
    case = make_case(1, num_ranks=comm.size, num_tokens=3)
    small, large = nbep.Config(2, 2, 4), nbep.Config(4, 2, 5)
    fp8 = np.zeros((3, case.hidden), np.uint8).view(ml_dtypes.float8_e4m3fn)
    half = np.zeros((3, case.hidden), np.float16)
    wide = np.zeros((3, 2 * case.hidden), ml_dtypes.bfloat16)
    experts = np.zeros(2 * case.num_experts, np.int32)
    no_choice = {"topk_idx": None, "topk_weights": None}
    choices = case.topk_idx[comm.rank], case.topk_weights[comm.rank]
    one_choice = {name: of_tokens[:, :1].copy() for name, of_tokens in zip(no_choice, choices, strict=True)}
    of_topk = case.topk_idx[comm.rank].shape[1]
    differing = [
        ({}, {"x": half}, "dtype of x", "bfloat16", "float16"),
        ({}, {"x": wide}, "hidden size of x", case.hidden, 2 * case.hidden),
        (
            {"x": (fp8, np.ones((3, 1), np.float32))},
            {"x": (fp8, np.ones((3, 2), np.int32))},
            "scales",
            "1 float32 a token",
            "2 int32 a token",
        ),
        ({}, no_choice, "topk_idx", f"{of_topk} choices a token", None),
        ({}, one_choice, "topk_idx", f"{of_topk} choices a token", "1 choices a token"),
        (
            no_choice,
            {"num_tokens_per_expert": experts},
            "size of num_tokens_per_expert",
            case.num_experts,
            2 * case.num_experts,
        ),
        ({}, {"config": nbep.Config(4, 2, 4)}, "config.num_sms", 2, 4),
        ({}, {"config": nbep.Config(2, 2, 5)}, "config.num_max_nvl_chunked_recv_tokens", 4, 5),
        ({}, {"zero_copy": True}, "zero_copy", False, True),
        ({"zero_copy": True}, {"config": nbep.Config(2, 1, 4)}, "config.num_max_nvl_chunked_send_tokens", 2, 1),
    ]
    sizes = {"num_nvl_bytes": num_nvl_bytes(case, Options(large)) * 2, "num_zero_copy_bytes": 1 << 17}

    def raises_naming(name, own, theirs, verb="dispatch"):
        own, theirs = (theirs, own) if last else (own, theirs)
        other = r"\d" if last else str(comm.size - 1)
        text = f"{own} on rank {comm.rank}, {theirs} on rank {other} in the same {verb}; must be the same on all ranks"
        return pytest.raises(ValueError, match=f"^{name}: got {text}$")

    for all_pass, last_passes, *words in differing:
        buffer = nbep.Buffer(comm, **sizes)
        _, arguments = dispatch_arguments(buffer, case, Options(small), comm.rank)
        arguments |= all_pass | (last_passes if last else {})
        with pytest.MonkeyPatch.context() as patch, raises_naming(*words):
            # counts of other experts, and other choices
            patch.setattr(nbep.host.normal_checks, "check_routing", lambda *_: None)
            buffer.dispatch(**arguments)
        buffer.destroy()
    for zero_copy in (False, True):
        buffer = nbep.Buffer(comm, **sizes)
        options = Options(small, zero_copy=zero_copy)
        outcome = dispatch(buffer, case, options, comm.rank)
        x = wide if last else case.x[comm.rank]
        with raises_naming("hidden size of x", case.hidden, 2 * case.hidden):
            buffer.dispatch(x, handle=outcome.handle, config=small, zero_copy=zero_copy)
        buffer.destroy()
    buffer = nbep.Buffer(comm, **sizes)
    outcome = dispatch(buffer, case, Options(small), comm.rank)
    with raises_naming("buffer", "dispatch", "combine", "call"):
        if last:
            buffer.combine(outcome.recv_x, outcome.handle, config=small)
        else:
            dispatch(buffer, case, Options(small), comm.rank)
    buffer.destroy()


def memory_is_given_back(comm):
    """A destroyed buffer leaves no segment behind, and its addresses are out of reach."""
    gc.collect()  # errors of calls before hold their arrays
    nbep.Buffer(comm, num_nvl_bytes=256).destroy()
    buffer = nbep.Buffer(comm, num_nvl_bytes=256)
    memory = buffer._memory
    space = memory.runtime.space
    buffer.destroy()
    assert space.segments == {}
    memory.runtime.launch(
        memory.comm_stream,
        cached_notify_combine,
        1,
        128,
        0,
        None,
        0,
        0,
        0,
        memory.peers,
        memory.bounds,
        make_call(BARRIER),
    )
    with pytest.raises(UseAfterFree, match="nvl_buffer"):
        memory.comm_stream.synchronize()


def the_calls_of_the_readme(comm):
    """The same main as nbep.spawn takes."""
    num_experts = 8
    case = make_case(13, num_ranks=comm.size, num_tokens=4, hidden=64, experts_per_rank=num_experts // comm.size)
    x, topk_idx, topk_weights = case.x[comm.rank], case.topk_idx[comm.rank], case.topk_weights[comm.rank]
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 20)
    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, event = buffer.get_dispatch_layout(
        topk_idx, num_experts
    )
    recv_x, _, recv_topk_weights, _, handle, event = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=num_tokens_per_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        config=nbep.Config(4, 4, 16),
    )
    combined_x, combined_topk_weights, event = buffer.combine(recv_x, handle, topk_weights=recv_topk_weights)
    buffer.destroy()
    assert event.event.done
    num_copies = is_token_in_rank.sum(axis=1, keepdims=True).astype(np.float32)
    np.testing.assert_array_equal(combined_x, (x.astype(np.float32) * num_copies).astype(x.dtype))
    np.testing.assert_array_equal(combined_topk_weights, np.where(topk_idx >= 0, topk_weights, 0))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name](MPI.COMM_WORLD)
        print(
            f"rank {MPI.COMM_WORLD.rank} is done with {name}\n", end="", flush=True
        )  # at once: other ranks print, too
    print(f"rank {MPI.COMM_WORLD.rank} is done\n", end="", flush=True)
