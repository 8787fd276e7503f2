"""The page of a trace in a browser: it opens, the slider moves all of it, and what it shows is what the trace says.

NBEP_TEST_BROWSER: a path to the program, or 1 for one that is on the PATH or that Playwright has installed. If it is
set, tests that find no browser fail; if not, they are skipped. `.ci/browser` gets one without root.
"""

import linecache
import os
import shutil
from pathlib import Path

import pytest
from traced_runs import EACH_MODE, hanging_run, traced_run

from nbep.device.primitives import ld_acquire_sys_s32, st_release_sys_s32, thread_idx
from nbep.emulator import World
from nbep.lab.trace import Trace
from nbep.lab.trace.events import readings
from nbep.lab.trace.page import all_stories, line_of_role

SIZE = {"width": 1280, "height": 860}


REQUIRED = "NBEP_TEST_BROWSER"
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root, and in most containers, a browser cannot build its sandbox; it opens no page but those of the tests.
ARGUMENTS = ("--no-sandbox",)


def skip_or_fail(reason: str):
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    """Playwright's, without windows; skips the test if there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        skip_or_fail("the package playwright is not installed: pip install '.[browser]'")
    named = os.environ.get(REQUIRED, "")
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, PROGRAMS)), None) or playwright.chromium.executable_path
        program = found if named in ("", "1") else named
        if not Path(program).exists():
            skip_or_fail("there is no Chromium: `playwright install chromium-headless-shell`, or `.ci/browser FOLDER`")
        try:
            browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        except Error as error:
            skip_or_fail(f"{program} does not start: {error}")
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens the page of a trace. At the end nothing has gone wrong in it, and it has asked for no other file."""
    context = browser.new_context(viewport=SIZE, offline=True)
    troubles, requests = [], []
    page = context.new_page()
    page.on("console", lambda message: troubles.extend([message.text] * (message.type == "error")))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))

    def opened(trace, part="#explore", **media):
        page.emulate_media(**media)
        page.goto(trace.to_html(tmp_path / "trace.html").as_uri() + part)
        return page

    yield opened
    context.close()
    assert troubles == []
    assert {url.partition(":")[0] for url in requests} <= {"file"}
    assert len(requests) <= 1


def settled(page):
    """The page, when it shows its step."""
    page.wait_for_function("!page.willDraw")
    return page


def go_to(page, step: int):
    page.locator("#step").fill(str(step))
    return settled(page)


def table(page) -> list[tuple[str, ...]]:
    """rank, role, what it does, its line, and the state."""
    return [
        (*row.locator("td").all_inner_texts(), row.get_attribute("class").removesuffix(" chosen"))
        for row in page.locator("#now tbody tr").all()
    ]


def row_of(page, rank: int, role: str) -> tuple[str, ...]:
    (row,) = [row for row in table(page) if row[:2] == (f"rank {rank}", role)]
    return row


def pixel(page, x: float, y: float) -> list[int]:
    """The colour of a point of the timeline's canvas."""
    return page.evaluate(
        "([x, y]) => [...page.timeline.canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)", [x, y]
    )


def place_of(page, event: int) -> list[float]:
    """Where the mark of an event is on the timeline's canvas."""
    row = "page.timeline.heights[page.rows.ofThread[page.run.thread[i]]]"
    return settled(page).evaluate(f"i => [page.timeline.x(page.run.step[i]), {row}]", event)


def is_tail(event) -> bool:
    return event.what == "store" and event.cell.name == "tail" and event.kernel == "dispatch"


def ring_name(ring) -> str:
    level, node = f"{ring.level} ".lstrip(), f", for node {ring.node}" if ring.node >= 0 else ""
    return f"rank {ring.rank}: {level}ring from rank {ring.src}, channel {ring.channel}{node}"


@pytest.mark.parametrize("mode", EACH_MODE)
def test_the_slots_follow_the_slider_as_the_rings_do(open_page, mode):
    trace = traced_run(mode)
    page = open_page(trace)
    kernel = "dispatch" if mode == "intranode" else "internode_dispatch"
    names = {ring_name(ring): ring for ring in trace.rings(kernel) if ring.call == 0}
    assert bool(names) == (mode != "low latency")
    back = min((each.begin for each in trace.launches if each.kernel.endswith("combine")), default=0)
    steps = sorted({step for ring in names.values() for step in ring.steps[1:-1] if step < back})
    for step in steps[:: max(len(steps) // 12, 1)]:
        shown = go_to(page, step).evaluate("page.slots.fillsAt(page.step)")
        assert {name: shown.get(name, 0) for name in names} == {name: ring.at(step) for name, ring in names.items()}


def test_arrow_keys_go_from_event_to_event_and_home_and_end_to_the_ends(open_page):
    trace = traced_run("intranode")
    page = open_page(trace)
    steps = sorted({event.step for event in trace.events()})
    slider = page.locator("#slider")
    slider.focus()
    page.keyboard.press("End")
    assert slider.input_value() == str(trace.last_step)
    page.keyboard.press("Home")
    assert slider.input_value() == str(min(launch.begin for launch in trace.launches))
    go_to(page, steps[40])
    slider.focus()
    for expected in (steps[41], steps[42]):
        page.keyboard.press("ArrowRight")
        assert slider.input_value() == str(expected)
    page.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(steps[41])
    page.keyboard.press("Shift+ArrowRight")
    assert slider.input_value() == str(steps[41] + 1)
    page.keyboard.press("w")
    waits = [event.step for event in trace.events("wait") if event.step > steps[41] + 1]
    assert slider.input_value() == str(waits[0])


def test_a_role_that_waits_says_for_what_and_shows_its_line(open_page):
    trace = traced_run("intranode")
    page = open_page(trace)
    wait = max(
        (event for event in trace.events("wait", cell="tail", kernel="dispatch") if event.role == "receiver"),
        key=lambda event: event.until - event.step,
    )
    go_to(page, wait.until - 1)
    _, _, text, code, state = row_of(page, wait.rank, "receiver")
    assert state == "waits"
    assert text.startswith(f"waits {wait.until - wait.step} steps for {wait.cell.text}, sees {wait.value}")
    line = wait.at[line_of_role(wait.at)]
    assert code.startswith(f"{Path(line.file).name}:{line.number}")
    assert code.endswith(linecache.getline(line.file, line.number).strip())
    page.locator("#now tr", has_text=f"rank {wait.rank}").filter(has_text="receiver").click()
    assert settled(page).locator("#source .here").get_attribute("data-number") == str(line.number)
    assert page.locator("#source .here").inner_text().strip() == linecache.getline(line.file, line.number).strip()
    page.locator("#source button", has_text="receive_tokens").click()
    assert "wait_tail_past(" in settled(page).locator("#source .here").inner_text()
    go_to(page, wait.until)
    assert not row_of(page, wait.rank, "receiver")[2].startswith(f"waits {wait.until - wait.step} steps")


def test_an_arrow_is_drawn_from_a_tail_to_who_reads_it(open_page):
    trace = traced_run("intranode")
    page = open_page(trace)
    events = trace.events()
    stored, seen = max(
        (pair for pair in readings(events) if is_tail(events[pair.stored])),
        key=lambda pair: events[pair.seen].step - events[pair.stored].step,
    )
    page.locator("#call").select_option(label="dispatch")
    begin, end = events[stored].step, events[seen].step
    go_to(page, (begin + end) // 2)
    page.evaluate(f"page.timeline.show({begin} - 5, {end} + 5); page.later()")
    (x1, y1), (x2, y2) = place_of(page, stored), place_of(page, seen)

    def is_blue(x, y):
        red, _, blue = pixel(page, x, y)
        return blue - red > 60

    assert any(is_blue(x1 + 0.75 * (x2 - x1) + dx, y1 + 0.75 * (y2 - y1)) for dx in (-1, 0, 1))
    page.evaluate("page.run.stored = page.run.seen = new Int32Array(); page.draw()")
    assert not any(is_blue(x1 + 0.75 * (x2 - x1) + dx, y1 + 0.75 * (y2 - y1)) for dx in (-1, 0, 1))


def test_the_pointer_on_a_store_says_who_stored_what(open_page):
    trace = traced_run("intranode")
    page = open_page(trace)
    number, store = next((i, event) for i, event in enumerate(trace.events()) if is_tail(event))
    go_to(page, store.step)
    page.evaluate("page.timeline.show(page.step - 30, page.step + 30); page.later()")
    (x, y), box = place_of(page, number), page.locator("#timeline canvas").bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    tip = page.locator("#tip").inner_text()
    assert f"stores {store.cell.text} of rank {store.cell.owner} = {store.value} (release)" in tip
    assert f"rank {store.rank}, sender, block {store.block}, warp {store.thread // 32}, lane {store.thread % 32}" in tip
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_a_thread_that_is_never_woken_is_red_to_the_end(open_page):
    trace = hanging_run()
    page = open_page(trace)
    (wait,) = [event for event in trace.events("wait", cell="tail", rank=0) if event.until is None]
    go_to(page, trace.last_step)
    assert row_of(page, 0, "receiver")[4] == "hangs"
    assert row_of(page, 0, "receiver")[2].startswith(f"waits for ever for {wait.cell.text}, sees {wait.value}")
    assert "receive_tokens" in page.locator("#source button[aria-pressed=true]").inner_text(), "it is shown unasked"
    row = page.evaluate("page.rows.list.findIndex(({ rank, label }) => rank === 0 && label === 'receiver')")
    for step in (wait.step + 1, (wait.step + trace.last_step) // 2, trace.last_step - 1):
        x, y = page.evaluate(f"[page.timeline.x({step}), page.timeline.heights[{row}] + 6]")
        red, green, _ = pixel(page, x, y)
        assert red - green > 80


def test_a_click_on_a_role_opens_its_warps_and_one_on_a_rank_closes_it(open_page):
    page = open_page(traced_run("intranode"))

    def labels():
        return settled(page).evaluate("page.rows.list.map((row) => row.label)")

    def click(label):
        y = page.evaluate(
            "label => { const row = page.rows.list.find((row) => row.label === label);"
            " return row.top + row.height / 2 + 26 - page.timeline.section.scrollTop; }",
            label,
        )
        page.locator("#timeline canvas").click(position={"x": 40, "y": y})

    before = labels()
    assert {"rank 0", "sender", "receiver", "copier", "coordinator"} <= set(before)
    click("sender")
    assert [label for label in labels() if label.startswith("block")] != []
    click("rank 1")
    assert labels()[-1] == "rank 1"


def test_one_call_is_shown_alone(open_page):
    trace = traced_run("intranode")
    page = open_page(trace)
    page.locator("#call").select_option(label="combine")
    shown = settled(page).evaluate("page.rows.list.filter((row) => row.kind === 'role').map((row) => row.label)")
    assert set(shown) == {event.role for event in trace.events(kernel="combine")}
    begin = min(launch.begin for launch in trace.launches if launch.kernel == "combine")
    assert page.locator("#slider").input_value() == str(begin)


def test_it_opens_where_the_first_slot_is_filled(open_page):
    trace = traced_run("intranode")
    page = settled(open_page(trace))
    assert page.locator("#slider").input_value() == str(trace.events("fill")[0].step)
    assert page.locator("#now tbody tr[data-key]").count() > 0
    assert page.locator("#source .here").count() == 1


def test_it_opens_at_the_end_if_somebody_hangs(open_page):
    trace = hanging_run()
    assert settled(open_page(trace)).locator("#slider").input_value() == str(trace.last_step)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_reader_likes_and_can_be_changed(open_page, scheme):
    page = open_page(traced_run("intranode"), color_scheme=scheme)

    def brightness():
        return sum(pixel(page, 400, 3)) / 3  # of the ruler

    before = brightness()
    assert (before > 200) == (scheme == "light")
    page.keyboard.press("t")
    settled(page)
    assert (brightness() > 200) == (scheme != "light")


def test_a_notebook_s_frame_holds_the_whole_page(browser):
    page = browser.new_page()
    page.set_content(f"<div>{traced_run('intranode').page()._repr_html_()}</div>")
    frame = page.frames[1]
    frame.wait_for_function("window.page && !window.page.willDraw")
    assert frame.locator("#now tbody tr").count() > 0
    page.close()


@pytest.mark.thorough
def test_a_hundred_thousand_events_take_no_element_each(open_page):
    def kernel(flag):
        for i in range(2900):
            st_release_sys_s32(flag + 4 * thread_idx(), i)
            ld_acquire_sys_s32(flag + 4 * (thread_idx() ^ 1))

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        flag = world.ranks[0].space.allocate(128, "flag", zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (flag.address,), 1, 32)
        stream.synchronize()

    world.run([host])
    page = open_page(trace)
    assert page.evaluate("page.run.count") == len(trace.events()) >= 100_000
    assert page.locator("*").count() < 500
    page.keyboard.press("End")
    assert settled(page).locator("#slider").input_value() == str(trace.last_step)


# --- the story ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", EACH_MODE)
def test_the_page_opens_on_a_story_whose_steps_are_turned(open_page, mode):
    trace = traced_run(mode)
    story = all_stories(trace)[0]
    page = open_page(trace, part="")
    assert page.locator("main").is_hidden()
    for number, step in enumerate(story.steps):
        assert page.locator("#story-number").inner_text() == f"{number + 1} of {len(story.steps)}"
        assert page.locator("#story-title").inner_text() == step.title.replace("`", "")
        assert page.locator("#story-picture .station").count() == len(story.stations)
        assert page.locator("#story-picture circle.token:not(.was)").count() == 1 + (step.at != step.to)
        waiting = page.locator("#story-picture rect.pill.waits").count()
        assert waiting == (step.waits is not None)
        if number + 1 < len(story.steps):
            page.locator("#story-next").click()
    assert page.locator("#story-next").is_disabled()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#story-number").inner_text().startswith(f"{len(story.steps) - 1} of")


def test_explore_opens_the_page_at_what_the_story_has_told(open_page):
    trace = traced_run("intranode")
    story = all_stories(trace)[0]
    page = open_page(trace, part="")
    page.locator("#story-next").click()
    page.locator("#explore").click()
    assert page.locator("#story").is_hidden()
    assert settled(page).locator("#slider").input_value() == str(story.steps[1].step)
    times = [step.step for step in story.steps]
    begin, end = page.evaluate("[page.timeline.from, page.timeline.to]")
    assert begin <= min(times) <= max(times) <= end, "what the story tells is in sight"
    assert end - begin <= 1.1 * max(max(times) - min(times), 20), "and no more than that"
    told = {station.rank for station in story.stations}
    assert not told & set(page.evaluate("[...page.rows.closedRanks]")), "its ranks are open"
    page.keyboard.press("0")
    assert page.evaluate("page.timeline.to") > trace.last_step
    assert page.locator(".signs").is_visible(), "the legend stands on the page"
    page.locator("#tell").click()
    assert page.locator("#story-number").inner_text().startswith("2 of")


def test_a_click_on_a_slot_follows_its_token(open_page):
    trace = traced_run("intranode")
    other = all_stories(trace)[-1]
    fill = next(
        e for e in trace.events("fill", kernel="dispatch") if e.token is not None and e.token[:2] == other.key[:2]
    )
    page = go_to(open_page(trace), fill.step)
    box = page.evaluate("text => page.slots.boxes.find((box) => box[4] === text)", other.title)
    page.locator("#slots canvas").click(position={"x": box[0] + 5, "y": box[1] + 5})
    assert page.locator("#story").is_visible()
    assert page.locator("#token option:checked").inner_text().startswith(other.title)
