"""Draw the pictures of the README: the page of a run, as a browser shows it.

    pip install '.[browser]' && playwright install chromium-headless-shell
    python docs/pictures/draw.py

NBEP_TEST_BROWSER names another Chromium, as for the tests of the page.
"""

import os
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import nbep
from nbep.trace import Trace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import first_program  # noqa: E402

STEP = "The receiver waits"


def main() -> None:
    trace = Trace()
    nbep.spawn(first_program.main, num_ranks=2, target="emulator", seed=1, tracer=trace)
    named = os.environ.get("NBEP_TEST_BROWSER", "")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        program = named if named not in ("", "1") else playwright.chromium.executable_path
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 640}, color_scheme="light")
        page.goto(trace.to_html(Path(folder) / "run.html").as_uri())
        while page.locator("#story-title").inner_text() != STEP:
            page.locator("#story-next").click()
        page.screenshot(path=HERE / "story.png")
        browser.close()


if __name__ == "__main__":
    main()
