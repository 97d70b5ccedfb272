"""Does the status page work in a real browser?

Needs playwright and a Chromium: CHROMIUM names one, otherwise the system's is taken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_process import ServerProcess

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright, of the browser-test extra"
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

MILLISECONDS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        started = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Page:
    """The page, and what the browser complained of."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page()
        self.page.set_default_timeout(MILLISECONDS)
        self.complaints: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def shows(self, selector: str, text: str) -> None:
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=MILLISECONDS)

    def press(self, selector: str) -> None:
        self.page.click(selector)

    def widths(self, tag: str, kind: str) -> float:
        """Per cent of the longest bar that this kind of memory of a tag takes."""
        script = "rects => rects.reduce((sum, rect) => sum + Number(rect.getAttribute('width')), 0)"
        found = self.page.locator(f"[data-tag={tag}] rect.{kind}")
        return float(found.evaluate_all(script))


def test_the_page_shows_sleep_and_wake_and_has_buttons_for_them(
    browser: Any, tmp_path: Path
) -> None:
    with ServerProcess() as server:
        page = Page(browser, server.url)
        page.shows("#state", "awake")
        assert page.widths("weights", "live") > 50
        assert page.widths("weights", "asleep") == 0
        page.press("[data-post=sleep]")
        page.shows("#message", "slept kv_cache, weights: freed")
        page.shows("#state", "asleep")
        assert server.get("is_sleeping").json()["is_sleeping"]
        assert page.widths("weights", "live") == 0
        assert page.widths("weights", "asleep") == 100
        page.press("[data-tag=weights] button")
        page.shows("#message", "woke weights: mapped")
        page.shows("#state", "partly awake")
        page.press("[data-post=wake_up]")
        page.shows("#state", "awake")
        page.shows("#transitions tr:first-child", "wake up")
        assert page.page.locator("#transitions tr").count() == 3
        assert page.page.locator("#timeline path").get_attribute("d").count("L") >= 1
        page.press("#generate")
        page.shows("#text", ">")
        assert page.page.screenshot(path=str(tmp_path / "page.png"))
        assert page.complaints == []
        assert server.interrupt()[0] == 0


def test_the_page_says_why_not_and_asks_for_a_token(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    with ServerProcess("--token-file", str(file)) as server:
        page = Page(browser, server.url)
        page.shows("#state", "refused")
        page.page.fill("#token", "secret")
        page.shows("#state", "awake")
        page.press("[data-post=sleep]")
        page.shows("#state", "asleep")
        page.press("#generate")
        page.shows("#message", "the engine is asleep")
