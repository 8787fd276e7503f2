"""What only calls without rings have: arrays that are the caller's for two dispatches, and SMs that are split."""

import gc
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from arrays import to_numpy, to_target
from calls import SlowRank, hold_back
from cases import make_case
from intranode import Expected, Options, check, combine, dispatch, dispatch_arguments, make_buffer, run
from parts import both_parts, dear
from target import GPU_HAS_ITS_OWN, MEMORY_MODELS, spawn
from trips import cached_dispatch

import nbep
from nbep import reference

KERNELS = "nbep.device.kernels.intranode"
DIRECT = Options(zero_copy=True)
CASE = make_case(3, num_tokens=(7, 4), num_topk=3)


def on_each_rank(fn, options: Options = DIRECT, case=CASE, **buffer_arguments: Any) -> list:
    """fn(buffer, x, dispatch's arguments) on every rank."""

    def main(comm):
        arguments = options.buffer_arguments(case) | buffer_arguments
        buffer = nbep.Buffer(comm, **arguments)
        _, given = dispatch_arguments(buffer, case, options, comm.rank)
        result = fn(buffer, given)
        buffer.destroy()
        return result

    return spawn(main, case.num_ranks)


# How long the arrays are the caller's


def test_what_came_stays_until_the_second_dispatch_from_here():
    def main(buffer, arguments):
        recv_x, recv_topk_idx, weights, _, handle, _ = buffer.dispatch(**arguments)
        before = to_numpy((recv_x, recv_topk_idx, weights, handle.recv_src_idx))
        copies = [array.copy() for array in before]
        other = to_target(to_numpy(arguments["x"]) * 2)
        buffer.dispatch(other, handle=handle, config=DIRECT.config, zero_copy=True)
        buffer.combine(recv_x, handle, config=DIRECT.config, zero_copy=True)
        after = to_numpy((recv_x, recv_topk_idx, weights, handle.recv_src_idx))
        return [a.tobytes() == b.tobytes() for a, b in zip(copies, after, strict=True)]

    assert on_each_rank(main) == [[True] * 4] * 2


@pytest.mark.parametrize("ends", ["dropped", "destroyed"])
def test_what_came_stays_while_somebody_holds_it_whatever_becomes_of_the_buffer(ends):
    def main(comm):
        arguments = DIRECT.buffer_arguments(CASE)
        buffer = nbep.Buffer(comm, **arguments)
        recv_x, *_, handle, _ = buffer.dispatch(**dispatch_arguments(buffer, CASE, DIRECT, comm.rank)[1])
        arrays = [recv_x, handle.recv_src_idx, buffer.get_local_buffer_tensor(recv_x.dtype)]
        before = [to_numpy(array).tobytes() for array in arrays]
        if ends == "destroyed":
            buffer.destroy()
        del buffer
        gc.collect()
        for _ in range(2):  # they take other memory
            other = nbep.Buffer(comm, **arguments)
            other.get_local_buffer_tensor(recv_x.dtype)[:] = 0
            other.destroy()
        is_same = [to_numpy(array).tobytes() for array in arrays] == before
        del recv_x, handle, arrays, other
        gc.collect()
        nbep.Buffer(comm, **arguments).destroy()
        return is_same, comm.runtime.dropped

    assert spawn(main, 2) == [(True, {})] * 2


USES = {
    "read": lambda buffer, x, handle: x[0, 0],
    "row of a view": lambda buffer, x, handle: x.reshape(-1)[3],
    "written": lambda buffer, x, handle: x.__setitem__(0, 1),
    "calculated with": lambda buffer, x, handle: x + x,
    "summed": lambda buffer, x, handle: x.sum(),
    "given to NumPy": lambda buffer, x, handle: np.concatenate([x, x]),
    "copied": lambda buffer, x, handle: x.copy(),
    "sent": lambda buffer, x, handle: buffer.combine(x, handle, config=DIRECT.config),
}


@pytest.mark.emulator_only("a GPU's arrays do not know whose they are")
@pytest.mark.parametrize("use", USES)
def test_a_use_after_that_is_an_error(use):
    def main(buffer, arguments):
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        part, copy = recv_x[:2], recv_x.copy()
        for _ in range(2):
            USES[use](buffer, recv_x, handle)  # it is the caller's now
            recent = buffer.dispatch(arguments["x"], handle=handle, config=DIRECT.config, zero_copy=True)[0]
        for old in (recv_x, part) if use != "sent" else (recv_x,):
            with pytest.raises(nbep.EmulatorError, match="zero-copy dispatch 0 received after zero-copy dispatch 2"):
                USES[use](buffer, old, handle)
        with pytest.raises(nbep.EmulatorError, match="zero-copy dispatch 0"):
            handle.recv_src_idx.tolist()
        return copy.tobytes() == recent.tobytes()

    assert on_each_rank(main, num_nvl_bytes=1 << 16) == [True, True]


def test_a_handle_serves_both_ways_whichever_made_it():
    def both(comm, case, options, made, used):
        rings, direct = (Options(zero_copy=zero_copy) for zero_copy in (False, True))
        buffer = nbep.Buffer(
            comm,
            num_nvl_bytes=rings.buffer_arguments(case)["num_nvl_bytes"],
            num_zero_copy_bytes=direct.buffer_arguments(case)["num_zero_copy_bytes"],
        )
        outcome = dispatch(buffer, case, direct if made == "zero_copy" else rings, comm.rank)
        way = direct if used == "zero_copy" else rings
        outcome.cached_x = cached_dispatch(buffer, to_target(case.x[comm.rank]), outcome.handle, way)
        combine(buffer, case, rings, comm.rank, outcome)  # rewrites send_head
        cached_dispatch(buffer, to_target(case.x[comm.rank]), outcome.handle, direct)
        combine(buffer, case, way, comm.rank, outcome)
        buffer.destroy()
        return outcome

    for made, used in (("zero_copy", "rings"), ("rings", "zero_copy")):
        case = make_case(5, num_ranks=2, num_tokens=6, num_topk=3)
        outcomes = spawn(both, 2, (case, Options(), made, used))
        check(case, Options(zero_copy=False), outcomes, 0)


def chain(comm, cases) -> list:
    """Dispatches and combines of what came, where it came, all launched before the first is waited for."""
    options = Options(nbep.Config(2, 1, 3), with_topk=False, zero_copy=True)
    needed = [options.buffer_arguments(case)["num_zero_copy_bytes"] for case in cases]
    buffer = nbep.Buffer(comm, num_zero_copy_bytes=max(needed))
    later = {"config": options.config, "zero_copy": True, "async_finish": True}
    handles = [dispatch_of(buffer, case, options, comm.rank)[4] for case in cases]
    results = []
    for _ in range(3):
        for case, handle in zip(cases, handles, strict=True):
            recv_x, *_ = buffer.dispatch(case.x[comm.rank], handle=handle, **later)
            combined_x, _, event = buffer.combine(recv_x, handle, **later)
            results.append(combined_x)
    event.current_stream_wait()
    buffer.destroy()
    return results


def dispatch_of(buffer, case, options, rank):
    return buffer.dispatch(**dispatch_arguments(buffer, case, options, rank)[1])


@pytest.mark.emulator_only("one rank is made slow")
@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(3)]))
def test_hosts_that_run_ahead_of_a_slow_rank_do_not_take_rows_that_are_in_use(seeds, memory_model, monkeypatch):
    places = [
        (f"{KERNELS}.direct_dispatch", "send_token"),
        (f"{KERNELS}.direct_dispatch", "receive"),
        ("nbep.device.kernels.parts.fetched_sums", "fetch_token"),
    ]
    slow = SlowRank(monkeypatch, places)
    cases = [make_case(seed, num_tokens=(6, 3 + seed), num_topk=2, unused=0) for seed in range(3)]
    wanted = []
    for case in cases:
        dispatched = reference.dispatch(case.x, case.layouts, 1)
        wanted.append(reference.combine([d.recv_x for d in dispatched], dispatched))
    for seed in seeds:
        slow.rank, slow.reads = seed % 2, (0, 5, 50)[seed % 3]
        for rank, results in enumerate(spawn(chain, 2, (cases,), seed, memory_model=memory_model)):
            for number, got in enumerate(results):
                assert got.tobytes() == wanted[number % 3][rank][0].tobytes(), (seed, rank, number)


# The split of warps, and what moves


@dear
@pytest.mark.parametrize("num_rows", both_parts([5], thorough=[1, 2, 3, 4, 6, 7, 8, 9, 10]))
def test_a_sum_of_any_number_of_rows_has_the_references_bits(num_rows):
    """From as many ranks as a token has experts, and two biases if it has more than two rows."""
    num_biases = 2 if num_rows > 2 else 0
    num_topk, num_ranks = num_rows - num_biases, 4 if num_rows <= 6 else 8
    case = make_case(9, num_ranks=num_ranks, num_tokens=2, num_topk=num_topk, experts_per_rank=1, unused=0, hidden=776)
    assert all(layout.is_token_in_rank.sum(1).tolist() == [num_topk] * 2 for layout in case.layouts)
    run(case, Options(nbep.Config(2, 1, 2), num_biases=num_biases, zero_copy=True))


@dear
@pytest.mark.parametrize("chunk", both_parts([2], thorough=[1, 5, 64]))
def test_any_number_of_rows_may_land_together(chunk):
    run(make_case(7, num_tokens=(17, 5)), Options(nbep.Config(2, chunk, chunk + 1), zero_copy=True))


@pytest.mark.parametrize("hidden", both_parts([384, 8704], thorough=[512]))
def test_scales_travel_in_copies_of_their_own_or_by_the_lanes(hidden):
    """Of 3, 4 and 68: a copy takes multiples of 16 bytes, and a lane keeps two."""
    case = make_case(10, num_tokens=(3, 2), hidden=hidden, routing="everywhere")
    run(case, Options(fp8="column", with_topk=False, zero_copy=True))


@pytest.mark.emulator_only("the arrays are NumPy's")
def test_scales_of_more_neighbours_than_a_stage_takes_arrive_however_they_lie_in_memory():
    """40 tokens with gaps between those that go to the same rank: two groups, of several runs each."""
    case = make_case(12, num_ranks=2, num_tokens=(40, 5), num_topk=1, hidden=512)
    for fp8 in ("row", "column"):
        run(case, Options(fp8=fp8, with_topk=False, zero_copy=True))

    def main(buffer, arguments):
        x, scales = reference.per_token_cast_to_fp8(arguments["x"])
        apart, shifted = np.zeros((2 * len(scales), 8), np.float32), np.zeros(scales.size + 1, np.float32)
        apart[::2, ::2] = scales
        shifted[1:] = scales.ravel()
        received = []
        for each in (scales, np.asfortranarray(scales), apart[::2, ::2], shifted[1:].reshape(scales.shape)):
            recv_x = buffer.dispatch(**arguments | {"x": (x, each)})[0]
            received.append(recv_x[1].tobytes())
        return received[1:] == [received[0]] * 3

    assert on_each_rank(main, Options(zero_copy=True, with_topk=False), case) == [True, True]


class Copies:
    """Counts what the copy engine moves in direct_dispatch."""

    def __init__(self):
        self.loaded: Counter = Counter()  # rank -> rows
        self.stored: Counter = Counter()

    def on_copy(self, thread, allocation, offset, data, site):
        if thread.block.launch.name == "direct_dispatch":
            counter = self.loaded if allocation.number == 0 else self.stored
            counter[thread.rank] += 1


@pytest.mark.emulator_only("a tracer sees it")
def test_a_token_is_loaded_once_however_many_ranks_want_it():
    copies = Copies()
    case = make_case(8, num_ranks=4, num_tokens=6, num_topk=4, routing="everywhere")
    run(case, DIRECT, tracer=copies)
    assert copies.loaded == dict.fromkeys(range(4), 6)
    assert copies.stored == dict.fromkeys(range(4), 4 * 6)


@pytest.mark.emulator_only("a tracer sees it")
def test_scales_of_neighbours_leave_in_one_copy_for_each_rank():
    copies = Copies()
    case = make_case(8, num_ranks=2, num_tokens=6, num_topk=2, hidden=512, routing="everywhere")
    run(case, Options(fp8="column", with_topk=False, zero_copy=True), tracer=copies)
    assert copies.stored == dict.fromkeys(range(2), 2 * 6 + 2)


# What is refused


def refused(message: str, case=CASE, options: Options = DIRECT, verb="dispatch", **changes: Any) -> None:
    """Both ranks get a ValueError from dispatch, or from combine behind it."""
    buffer_arguments = {name: changes.pop(name) for name in ("num_nvl_bytes", "num_zero_copy_bytes") if name in changes}

    def main(buffer, arguments):
        if verb == "dispatch":
            with pytest.raises(ValueError, match=re.escape(message)):
                buffer.dispatch(**arguments | changes)
            return
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        with pytest.raises(ValueError, match=re.escape(message)):
            buffer.combine(recv_x, handle, zero_copy=True, **changes)

    on_each_rank(main, options, case, **buffer_arguments)


def test_a_buffer_without_the_memory_is_refused():
    refused("zero_copy: got True; must be False: num_zero_copy_bytes was 0", num_zero_copy_bytes=0)


def test_more_worst_tokens_than_a_half_has_rows_are_refused():
    refused("num_worst_tokens: got 100000; must be at most", num_worst_tokens=100000)


def test_a_half_that_has_no_row_is_refused():
    refused("num_zero_copy_bytes: got 6528 at construction", num_zero_copy_bytes=6528)


def test_too_little_room_for_what_combine_lays_out_is_refused():
    case = make_case(1, num_ranks=2, num_tokens=30, routing="everywhere")
    options = Options(nbep.Config(4, 1, 2))
    refused("num_zero_copy_bytes: got 9216", case, options, "combine", num_zero_copy_bytes=9216)


@pytest.mark.parametrize("with_worst", [False, True])
@pytest.mark.parametrize("memory_model", ["sc", pytest.param("checked", marks=GPU_HAS_ITS_OWN)])
def test_tokens_that_do_not_fit_are_reported_and_dropped(memory_model, with_worst):
    case = make_case(9, num_tokens=30, routing="everywhere", num_topk=2)
    options = Options(num_worst_tokens=40 if with_worst else 0, zero_copy=True)
    few = {"num_zero_copy_bytes": make_few(case, options)} if not with_worst else {}

    def main(comm):
        buffer = nbep.Buffer(comm, **options.buffer_arguments(case) | few)
        _, arguments = dispatch_arguments(buffer, case, options, comm.rank)
        with pytest.raises(ValueError, match=rf"recv_x: got \d+ rows on rank {comm.rank}; must be at least 60"):
            buffer.dispatch(**arguments)
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire", memory_model=memory_model)


def make_few(case, options) -> int:
    """Half of what the tokens need."""
    return options.buffer_arguments(case)["num_zero_copy_bytes"] // 256 * 128


def test_ranks_that_go_different_ways_raise():
    seen = []

    def main(buffer, arguments):
        zero_copy = buffer.rank == 0
        try:
            buffer.dispatch(**arguments | {"zero_copy": zero_copy})
        except ValueError as error:  # on the rank that comes second, whichever it is
            seen.append(str(error))
            buffer.dispatch(**arguments | {"zero_copy": not zero_copy})

    on_each_rank(main, num_nvl_bytes=1 << 16)
    assert len(seen) == 1
    assert "zero_copy: got" in seen[0]


# A peer that does not come


@pytest.mark.emulator_only("the late launch is arranged")
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("kernel", ["direct_dispatch", "direct_combine"])
def test_a_late_peer_is_named_and_gets_what_was_sent(kernel, memory_model):
    case = make_case(4, num_tokens=9, routing="everywhere")
    expected = Expected(case, DIRECT)
    failed: list[int] = []

    def calls(buffer, rank):
        outcome = dispatch(buffer, case, DIRECT, rank)
        if kernel == "direct_combine":
            combine(buffer, case, DIRECT, rank, outcome)
        return outcome

    def main(comm):
        buffer = make_buffer(comm, case, DIRECT)
        if comm.rank == 0:
            with pytest.raises(nbep.PeerTimeout, match=r"(direct dispatch|notify) .* for rank 1"):
                calls(buffer, 0)
            failed.append(0)
        else:
            with pytest.MonkeyPatch.context() as patch:
                hold_back(patch, kernel, failed)
                expected.check(1, calls(buffer, 1), "the late rank")
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire", memory_model=memory_model)
    assert failed == [0]
