"""A trace holds what the kernels did: publishes, waits, the fill of each ring, and the pictures made of them."""

from dataclasses import replace

import pytest
from cases import make_case
from intranode import Options, dispatch, num_nvl_bytes, round_trip

import nbep
from nbep.device import primitives as ptx
from nbep.emulator import World
from nbep.lab.trace import Trace

CONFIG = nbep.Config(2, 2, 4)  # one channel, chunks of two tokens, rings of four
CASE = make_case(3, num_ranks=2, num_tokens=[9, 4], num_topk=2, hidden=16)
RINGS = [(0, 1), (1, 0)]  # (src, dst): what a rank sends to itself takes no ring
OPTIONS = Options(CONFIG)


def traced(seed: int = 7, fn=round_trip, options: Options = OPTIONS) -> Trace:
    trace = Trace()
    nbep.spawn(fn, CASE.num_ranks, "emulator", (CASE, options), seed, tracer=trace)
    return trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced()


def chunks_to(dst: int, src: int) -> int:
    """A chunk is two tokens that go to dst, or what is left; tokens at the end that go elsewhere make one of none."""
    goes = CASE.layouts[src].is_token_in_rank[:, dst]
    num_chunks, in_chunk = 0, 0
    for token, member in enumerate(goes):
        in_chunk += int(member)
        if in_chunk == 2 or token == len(goes) - 1:
            num_chunks, in_chunk = num_chunks + 1, 0
    return num_chunks


@pytest.mark.parametrize(("src", "dst"), RINGS)
def test_dispatch_publishes_a_tail_for_each_chunk(trace, src, dst):
    tails = [
        event.value
        for event in trace.events("store", cell=f"tail[channel 0, src {src}]", rank=src, kernel="dispatch")
        if event.cell.owner == dst
    ]
    assert len(tails) == chunks_to(dst, src)
    assert tails == sorted(tails)
    assert tails[-1] == CASE.layouts[src].num_tokens_per_rank[dst]


def test_tails_are_released_and_heads_are_relaxed(trace):
    for kernel in ("dispatch", "combine"):
        assert {event.order for event in trace.events("store", cell="tail", kernel=kernel)} == {"release"}
        assert {event.order for event in trace.events("store", cell="head", kernel=kernel)} == {"relaxed"}


def test_every_token_is_put_into_the_slot_of_its_ring_index(trace):
    fills = trace.events("fill", cell="x[", kernel="dispatch")
    assert {(event.cell.src, event.cell.owner) for event in fills} == set(RINGS)
    for src, dst in RINGS:
        slots = [event.cell.slot for event in fills if (event.cell.src, event.cell.owner) == (src, dst)]
        # Two warps need not be in order; a lap of the ring is.
        expected = [i % 4 for i in range(CASE.layouts[src].num_tokens_per_rank[dst])]
        assert sorted(slots) == sorted(expected)


@pytest.mark.parametrize("mix_roles", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_copiers_fill_the_rows_of_own_tokens_and_receivers_the_others(rank, mix_roles):
    trace = traced(options=Options(replace(CONFIG, mix_roles=mix_roles)))
    fills = trace.events("fill", cell="recv_x[row ", rank=rank, kernel="dispatch")
    roles = dict(sorted((event.value, event.role) for event in fills))
    from_rank_0, from_rank_1 = (CASE.layouts[src].num_tokens_per_rank[rank] for src in range(2))
    of_rank = ["copier", "receiver"] if rank == 0 else ["receiver", "copier"]
    assert len(fills) == len(roles)
    assert list(roles) == list(range(from_rank_0 + from_rank_1))
    assert list(roles.values()) == [of_rank[0]] * from_rank_0 + [of_rank[1]] * from_rank_1
    assert {event.block for event in fills if event.role == "copier"} == {0, 1}, "both blocks of the channel copy"


def test_copiers_touch_no_ring(trace):
    """At their end they look at the claim: whether this rank has failed."""
    events = [event for event in trace.events() if event.role == "copier"]
    assert {event.cell.name for event in events} <= {"recv_x", "mbarrier", "claim and layout workspace"}


@pytest.mark.parametrize("rank", [0, 1])
def test_receivers_of_combine_fill_a_row_for_each_token(trace, rank):
    fills = trace.events("fill", cell="combined_x", rank=rank)
    assert {event.role for event in fills} == {"receiver"}
    assert sorted(event.cell.row for event in fills) == list(range(len(CASE.x[rank])))


def test_no_ring_is_fuller_than_its_slots_and_dispatch_leaves_it_empty(trace):
    rings = trace.rings()
    assert [(ring.src, ring.rank, ring.kernel) for ring in rings] == [
        (1, 0, "dispatch"),
        (1, 0, "combine"),
        (0, 1, "dispatch"),
        (0, 1, "combine"),
    ]
    assert {ring.capacity for ring in rings} == {4}
    assert max(ring.peak for ring in rings) <= 4
    assert max(ring.peak for ring in trace.rings("dispatch")) >= 2
    for ring in trace.rings("dispatch"):
        assert ring.fill[-1] == 0
        assert ring.num_tokens == CASE.layouts[ring.src].num_tokens_per_rank[ring.rank]
        assert ring.steps == sorted(ring.steps)


def test_a_wait_ends_after_the_store_that_ends_it(trace):
    waits = [event for event in trace.events("wait", cell="tail", kernel="dispatch") if event.role == "receiver"]
    assert waits
    for wait in waits:
        stores = trace.events("store", cell=wait.cell.text, kernel="dispatch")
        assert any(wait.step <= store.step <= wait.until and store.value > wait.value for store in stores)


@pytest.mark.parametrize("mix_roles", [False, True])
def test_whoever_moves_a_tail_sends_and_whoever_moves_a_head_receives(mix_roles):
    trace = traced(options=Options(replace(CONFIG, mix_roles=mix_roles)))
    roles = {name: trace.events("store", cell=name, kernel="dispatch") for name in ("start", "tail", "head")}
    assert {name: {event.role for event in events} for name, events in roles.items()} == {
        "start": {"sender"},
        "tail": {"sender"},
        "head": {"receiver"},
    }
    assert {event.block for event in roles["tail"]} == ({0, 1} if mix_roles else {0})


@pytest.mark.parametrize(("src", "dst"), RINGS)
def test_a_picture_of_mixed_roles_has_what_both_ends_publish(src, dst):
    trace = traced(options=Options(replace(CONFIG, mix_roles=True)))
    lanes = trace.plot_channel(src, dst).axes[0]
    assert "tail: stored, then seen" in [text.get_text() for text in lanes.get_legend().get_texts()]


def test_same_seed_gives_the_same_trace_and_another_seed_another(trace):
    assert traced().events() == trace.events()
    assert traced(seed=8).events() != trace.events()


def test_tracing_does_not_change_the_run(trace):
    counters = []

    def watched(comm, case, options):
        result = round_trip(comm, case, options)
        counters.append(comm.runtime.world.counters)
        return result

    plain = nbep.spawn(watched, 2, "emulator", (CASE, OPTIONS), 7)
    seen = nbep.spawn(watched, 2, "emulator", (CASE, OPTIONS), 7, tracer=Trace())
    assert counters[:2] == counters[2:]
    for a, b in zip(plain, seen, strict=True):
        assert a.combined_x.tobytes() == b.combined_x.tobytes()


def test_pictures_are_drawn_and_saved(trace, tmp_path):
    pictures = {
        "rings": trace.plot_rings(),
        "dispatch": trace.plot_channel(0, 1),
        "combine": trace.plot_channel(1, 0, kernel="combine"),
        "barrier": trace.plot_cells("barrier_signal", kernel="notify_dispatch"),
    }
    for name, picture in pictures.items():
        path = tmp_path / f"{name}.png"
        picture.savefig(path)
        assert path.stat().st_size > 10_000
    rings = pictures["rings"]
    assert [axes.get_title(loc="left") for axes in rings.axes] == ["rank 0 receives", "rank 1 receives"]
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in rings.axes]
    assert labels == [["from rank 1, channel 0"], ["from rank 0, channel 0"]]
    assert "steps" in rings.axes[-1].get_xlabel()


def test_a_picture_shows_itself_in_a_notebook(trace):
    assert trace.plot_channel(0, 1)._repr_png_().startswith(b"\x89PNG")


def test_rings_that_are_not_there_are_named(trace):
    with pytest.raises(ValueError, match="channel 1 from rank 0 to rank 1"):
        trace.plot_channel(0, 1, channel=1)
    with pytest.raises(ValueError, match="channel 0 from rank 0 to rank 0"):
        trace.plot_channel(0, 0)
    with pytest.raises(ValueError, match="notify_dispatch"):
        trace.plot_rings("notify_dispatch")
    with pytest.raises(ValueError, match="'no_such_cell'"):
        trace.plot_cells("no_such_cell")


def test_tables_say_what_the_events_say(trace):
    table = trace.table("store", cell="tail", kernel="dispatch").splitlines()
    tails = trace.events("store", cell="tail", kernel="dispatch")
    assert len(table) == 1 + len(tails)
    for line, event in zip(table[1:], tails, strict=True):
        assert line.split()[0] == str(event.step)
        assert f"stores {event.cell.text} = {event.value} (release)" in line
    assert trace.table(limit=3).splitlines()[-1].startswith("... ")
    rows = trace.table("fill", cell="recv_x", rank=0)
    assert "copier    fills recv_x[row 0]" in rows
    assert "receiver  fills recv_x[row 7]" in rows
    assert "sender    fills channel 0, src 0, slot 0" in trace.table("fill", kernel="dispatch")


@pytest.mark.parametrize("name", ["arrivals", "counts"])
def test_cells_named_as_those_of_the_low_latency_mode_hold_plain_numbers(name):
    """get_dispatch_layout has one named `arrivals`: it counts blocks, and TAG means nothing there."""

    def kernel(cell):
        if ptx.thread_idx() < 2:
            ptx.atom_add_acq_rel_gpu_s32(cell, 1)

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        cell = world.ranks[0].space.allocate(128, name, zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (cell.address,), 1, 32)
        stream.synchronize()

    world.run([host])
    table = trace.table("atomic", cell=name)
    for value in (1, 2):
        assert f"makes {name}[byte 0] {value} (acq_rel)" in table


def test_one_trace_records_one_run(trace):
    with pytest.raises(ValueError, match="another run"):
        nbep.spawn(round_trip, 2, "emulator", (CASE, OPTIONS), tracer=trace)


def test_two_calls_of_a_kernel_are_kept_apart():
    def twice(comm, case, options):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        for _ in range(2):
            dispatch(buffer, case, options, comm.rank)
        buffer.destroy()

    trace = traced(fn=twice)
    first, second = (ring for ring in trace.rings("dispatch") if (ring.rank, ring.src) == (1, 0))
    assert (first.call, second.call) == (0, 1)
    assert first.num_tokens == second.num_tokens
    assert first.steps[-1] <= second.steps[0]
    trace.plot_channel(0, 1, call=1)


def test_a_run_that_hangs_leaves_its_waits_open():
    def kernel(flag):
        if ptx.thread_idx() == 0:
            while ptx.ld_acquire_sys_s32(flag) != 2:
                ptx.wait_expired(1 << 60)
        elif ptx.thread_idx() == 32:
            ptx.st_release_sys_s32(flag, 1)

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        flag = world.ranks[0].space.allocate(128, "flag", zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (flag.address,), 1, 64)
        stream.synchronize()

    with pytest.raises(nbep.DeadlockError):
        world.run([host])
    (wait,) = [event for event in trace.events("wait", cell="flag") if event.until is None]
    assert (wait.thread, wait.value) == (0, 1)
    assert "never woken" in trace.table("wait")
    assert trace.launches[0].end is None
    assert trace.plot_cells("flag").axes


def test_a_wait_that_finds_what_it_has_seen_goes_on():
    def kernel(flag):
        if ptx.thread_idx() == 0:
            while ptx.ld_acquire_sys_s32(flag) == 0:
                ptx.wait_expired(1 << 60)
        else:
            for _ in range(50):
                ptx.ld_acquire_sys_s32(flag + 64)

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        flag = world.ranks[0].space.allocate(128, "flag", zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (flag.address,), 1, 2)
        stream.synchronize()

    # Before the emulator says that nothing goes on, it wakes who waits, to look once more.
    with pytest.raises(nbep.DeadlockError):
        world.run([host])
    (wait,) = trace.events("wait")
    assert wait.until is None
    assert wait.step < trace.last_step - 20
