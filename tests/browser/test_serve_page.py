"""Does the status page work in a real browser?

Needs playwright and a Chromium: CHROMIUM names one, otherwise the system's is taken.
``.ci/run`` installs both; where one is missing, these tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_process import ServerProcess

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright, of the browser extra"
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium, found as CHROMIUM or in PATH"
)

MILLISECONDS = 60_000
# It talks to our page only, as root too, and starts no service of its own. The profile
# is a fresh one: playwright makes a folder for each launch.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        started = run.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
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

    def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=MILLISECONDS)

    def is_now(self, state: str) -> None:
        playwright.expect(self.page.locator("#state")).to_have_text(state, timeout=MILLISECONDS)

    def lists_transitions(self, count: int) -> None:
        rows = self.page.locator("#transitions tr")
        playwright.expect(rows).to_have_count(count, timeout=MILLISECONDS)

    def press(self, selector: str) -> None:
        self.page.click(selector)

    def widths(self, tag: str, kind: str) -> float:
        """Per cent of the longest bar that this kind of memory of a tag takes."""
        script = "rects => rects.reduce((sum, rect) => sum + Number(rect.getAttribute('width')), 0)"
        found = self.page.locator(f"[data-tag={tag}] rect.{kind}")
        return float(found.evaluate_all(script))

    def mapped_over_time(self) -> list[float]:
        """The timeline: which share of the memory was mapped at each look, oldest first."""
        drawn = self.page.locator("#timeline path").get_attribute("d")
        heights = [float(point.split(",")[1]) for point in drawn.split(" L")[1:-1]]
        return [(100 - height) / 96 for height in heights]


def test_the_page_shows_sleep_and_wake_and_has_buttons_for_them(
    browser: Any, tmp_path: Path
) -> None:
    with ServerProcess() as server:
        page = Page(browser, server.url)
        page.is_now("awake")
        assert page.widths("weights", "live") > 50
        assert page.widths("weights", "asleep") == 0
        page.press("[data-post=sleep]")
        page.shows("#message", "slept kv_cache, weights: freed")
        page.is_now("asleep")
        assert server.get("is_sleeping").json()["is_sleeping"]
        assert page.widths("weights", "live") == 0
        assert page.widths("weights", "asleep") == 100
        page.shows("[data-tag=weights] .numbers", "0 B mapped")
        assert all(tag["mapped_bytes"] == 0 for tag in server.get("memory").json()["tags"])
        page.press("[data-tag=weights] button")
        page.shows("#message", "woke weights: mapped")
        page.is_now("partly awake")
        page.press("[data-post=wake_up]")
        page.is_now("awake")
        assert page.widths("weights", "live") > 50
        page.shows("#transitions tr:first-child", "wake up")
        page.lists_transitions(3)
        plotted = page.mapped_over_time()
        assert (plotted[0], min(plotted), plotted[-1]) == (1, 0, 1)
        page.press("#generate")
        page.shows("#text", re.compile("."))
        assert page.page.screenshot(path=str(tmp_path / "page.png"))
        assert page.complaints == []
        assert server.interrupt()[0] == 0


def test_the_page_says_why_not_and_asks_for_a_token(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    with ServerProcess("--token-file", str(file)) as server:
        page = Page(browser, server.url)
        page.is_now("refused")
        page.page.fill("#token", "secret")
        page.is_now("awake")
        page.press("[data-post=sleep]")
        page.is_now("asleep")
        page.press("#generate")
        page.shows("#message", "the engine is asleep")
