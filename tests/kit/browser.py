"""A person in front of the console: the Chromium of the machine, driven by Playwright.

A test that uses this is marked with needs("chromium"). Playwright's own browsers are not downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.kit.stack import WAIT_S
from tests.kit.tools import program

_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PATIENCE_MS = 1000 * WAIT_S  # of a busy machine


@contextmanager
def running_browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=list(_ARGUMENTS))
        yield browser
        browser.close()


class Visitor:
    """Who looks at the console, with cookies and a window of their own. `faults`: what went wrong in the page."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._heed)

    def _heed(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.faults.append(message.text)  # among others, what the content security policy refused

    def open(self, *parts: str, query: str = "") -> Page:
        """Open a page of the console by its address."""
        path = "/".join(quote(part, safe="") for part in parts)
        self.page.goto(f"{self.url}/console/#/{path}{query}")
        return self.page

    def sign_in(self, key: str) -> Page:
        page = self.open("sign-in")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        return page


@contextmanager
def visiting(browser: Browser, url: str, *, dark: bool = False, width: int = 1280) -> Iterator[Visitor]:
    """Yield a visitor; at the end check that nothing went wrong in the page."""
    context = browser.new_context(
        color_scheme="dark" if dark else "light", viewport={"width": width, "height": 900}, service_workers="block"
    )
    try:
        visitor = Visitor(context.new_page(), url)
        yield visitor
        assert visitor.faults == []
    finally:
        context.close()  # ends its streams of events, too
