"""One browser for all tests. They run with LUCE_TEST_BROWSER=1 (`make test-browser`) and are skipped without it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Browser, Page, chromium, find_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if os.environ.get("LUCE_TEST_BROWSER") != "1":
        pytest.skip("tests in a browser run with: make test-browser")
    program = find_chromium()
    if program is None:
        pytest.fail("expected Chromium on PATH (Debian: apt-get install chromium) or in LUCE_CHROMIUM, found none")
    with chromium(program) as started:
        yield started


class Visit:
    """Opens pages, and looks at them when the test is over: nothing may have gone wrong in them, nor left the server."""

    def __init__(self, browser: Browser, name: str) -> None:
        self._browser = browser
        self._name = re.sub(r"\W+", "-", name).strip("-")
        self.pages: list[Page] = []
        self.expected = ["net::ERR_"]  # the server ends before the page does

    def __call__(self, url: str, **view: bool | int) -> Page:
        """Open the status page of the server at `url` and wait until it shows something."""
        page = self._browser.open(url, **view)
        self.pages.append(page)
        page.wait("document.readyState === 'complete'")
        return page

    def shoot(self, page: Page, what: str) -> None:
        """Keep a picture when LUCE_SCREENSHOTS names a folder."""
        if folder := os.environ.get("LUCE_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(Path(folder) / f"{self._name}-{what}.png")

    def end(self) -> None:
        """Check and close all pages."""
        for page in self.pages:
            self.shoot(page, "end")
            origin = page.js("location.origin")
            strangers = [url for url in page.requests if not url.startswith((f"{origin}/", "data:"))]
            troubles = [text for text in page.troubles if not any(word in text for word in self.expected)]
            page.close()
            assert not strangers
            assert not troubles


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visit]:
    visits = Visit(browser, request.node.name)
    yield visits
    visits.end()
