"""A browser without windows, for tests of pages. Playwright drives any Chromium; `.ci/browser` gets one without root.

NBEP_TEST_BROWSER: a path to the program, or 1 for one that is on the PATH or that Playwright has installed. If it is
set, tests that find no browser fail; if not, they are skipped.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REQUIRED = "NBEP_TEST_BROWSER"
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root, and in most containers, a browser cannot build its sandbox; it opens no page but those of the tests.
ARGUMENTS = ("--no-sandbox",)


@contextmanager
def open_browser() -> Iterator:
    """Playwright's browser; skips the test if there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        skip_or_fail("the package playwright is not installed: pip install '.[browser]'")
    with sync_playwright() as playwright:
        program = find_program() or playwright.chromium.executable_path
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


def find_program() -> str | None:
    named = os.environ.get(REQUIRED, "")
    if named not in ("", "1"):
        return named
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def skip_or_fail(reason: str):
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but {reason}")
    pytest.skip(reason)
