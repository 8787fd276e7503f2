"""Stories are made from events: what they say of a token, its places, waits and stores is what the trace says."""

import pytest
from cases import make_case
from intranode import Options, round_trip
from traced_runs import EACH_MODE, hanging_run, traced_run

import nbep
from nbep.device.primitives import block_idx, ld_acquire_sys_s32, st_release_sys_s32
from nbep.emulator import World
from nbep.lab.trace import Trace
from nbep.lab.trace.page import HANGS, MOST_STEPS, all_stories
from nbep.specimens.views.token_path import Scene

LEAST_STEPS = 8


@pytest.mark.parametrize("mode", EACH_MODE)
def test_the_first_story_leads_from_x_to_the_expert_and_home(mode):
    story = all_stories(traced_run(mode))[0]
    assert LEAST_STEPS <= len(story.steps) <= MOST_STEPS
    titles = [station.title for station in story.stations]
    assert (titles[0], titles[-1]) == ("x", "combined_x")
    assert "recv_x" in titles
    assert story.stations[0].rank == story.stations[-1].rank == story.key[0]
    assert [step.at for step in story.steps] == sorted(step.at for step in story.steps)
    assert story.steps[-1].to == len(story.stations) - 1
    steps = [step.step for step in story.steps]
    assert steps == sorted(steps)


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_token_keeps_its_bytes_on_the_way_to_its_expert(mode):
    trace = traced_run(mode)
    fills = {(e.step, e.cell.owner): e for e in trace.events("fill") if e.first}
    compared = 0
    for story in all_stories(trace):
        found = []
        for step in story.steps:
            station = story.stations[step.to]
            if (step.step, station.rank) in fills and "combine" not in fills[step.step, station.rank].kernel:
                found.append(fills[step.step, station.rank].first)
        assert len(set(found)) <= 1, story.title
        compared += len(found) > 1
    assert compared > 0


@pytest.mark.parametrize("mode", EACH_MODE)
def test_each_step_is_an_event_of_the_role_that_it_names(mode):
    trace = traced_run(mode)
    at = {(event.step, event.rank, event.role) for event in trace.events()}
    began = {(event.rank, event.role, event.cell.text) for event in trace.events("wait")}
    for story in all_stories(trace):
        for step in story.steps:
            if step.who is not None:
                assert (step.step, *step.who) in at
            if step.waits is not None:
                assert any((rank, role) == step.waits for rank, role, _ in began)


@pytest.mark.parametrize("mode", EACH_MODE)
def test_who_waits_for_a_free_slot_waits_for_the_ring_that_it_fills_next(mode):
    """And that ring has too few free slots: fills before the wait, less the last head that was stored."""
    trace = traced_run(mode)
    scene, seen = Scene(trace), 0
    heads = trace.events(("store", "atomic"), cell="head")
    for fill in scene.fills:
        if fill.cell.name == "x" and (room := scene.move(fill).room) is not None:
            seen += 1
            assert fill.cell.channel == room.cell.channel
            if fill.cell.node < 0:
                taken, num_slots = scene.taken_slots(scene.move(fill))
                assert 0 < taken <= num_slots
                assert (room.cell.owner, room.cell.src) == (fill.cell.owner, fill.cell.src)
            freed = [event for event in heads if event.cell == room.cell and event.step < room.step]
            assert int(room.value or 0) <= max((int(event.value) for event in freed), default=0)
    assert seen > 0 or mode == "low latency"  # which has no rings


def test_a_wait_in_front_of_another_ring_is_no_part_of_a_token_s_story():
    """Seen with four ranks: the warps of a block wait for the heads of other peers meanwhile."""
    trace = Trace()
    case = make_case(5, num_ranks=4, num_tokens=[12] * 4, num_topk=2, hidden=16)
    nbep.spawn(round_trip, 4, "emulator", (case, Options(nbep.Config(2, 1, 2))), 11, tracer=trace)
    scene = Scene(trace)
    rooms = {id(room): (fill, room) for fill in scene.fills if (room := scene.move(fill).room) is not None}
    assert rooms
    for fill, room in rooms.values():
        assert (room.cell.owner, room.cell.src) == (fill.cell.owner, fill.rank)


def test_no_role_reads_a_slot_before_it_is_published():
    """In each story the step that lets the row be read comes before the one that takes it on."""
    for story in all_stories(traced_run("intranode")):
        published = [step.step for step in story.steps if step.title.startswith("`tail`")]
        arrived = next(step.step for step in story.steps if step.title.startswith("The token is at"))
        assert published[0] < arrived


def test_a_run_that_hangs_has_a_story_that_ends_there():
    trace = hanging_run()
    story = all_stories(trace)[0]
    last = story.steps[-1]
    assert (last.title, last.step) == (HANGS, trace.last_step)
    assert last.waits == (0, "receiver")
    assert "tail[channel 0, src 1]" in last.text


def test_a_program_without_tokens_has_the_story_of_a_value():
    def kernel(flag):
        if block_idx() == 0:
            st_release_sys_s32(flag, 7)
        else:
            while ld_acquire_sys_s32(flag) != 7:
                pass

    trace = Trace()
    world = World(1, seed=2, tracer=trace)

    def host():
        flag = world.ranks[0].space.allocate(64, "flag", zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (flag.address,), 2, 1)
        stream.synchronize()

    world.run([host])
    (story,) = all_stories(trace)
    assert [step.title for step in story.steps] in (["A store", "It is seen"], ["A wait", "A store", "It is seen"])
    assert "writes 7" in story.steps[-2].text


def test_a_trace_of_nothing_has_no_story():
    trace = Trace()
    nbep.spawn(lambda comm: None, 2, "emulator", tracer=trace)
    assert all_stories(trace) == []
