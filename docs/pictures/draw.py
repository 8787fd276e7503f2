"""Draw the picture of the README: the page that `nbep demo --html` writes, as a browser shows it.

    pip install '.[browser]' && playwright install chromium-headless-shell
    python docs/pictures/draw.py

NBEP_TEST_BROWSER names another Chromium, as for the tests of the page.
"""

import os
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from nbep import demo

HERE = Path(__file__).resolve().parent
STEP = "The receiver waits"


def main() -> None:
    named = os.environ.get("NBEP_TEST_BROWSER", "")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = Path(folder) / "run.html"
        demo.main(["--html", str(run), "--no-picture"])
        program = named if named not in ("", "1") else playwright.chromium.executable_path
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 640}, color_scheme="light")
        page.goto(run.as_uri())
        while page.locator("#story-title").inner_text() != STEP:
            page.locator("#story-next").click()
        page.screenshot(path=HERE / "story.png")
        browser.close()


if __name__ == "__main__":
    main()
