"""A real headless Chromium, and pages that remember every console error and every request they made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.runs.programs import find_program

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1440, "height": 900}
PATIENCE_MS = 90_000
"""Deadline of every wait for the page."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser. TIDEMILL_CHROMIUM names one that is not on the PATH."""
    path = os.environ.get("TIDEMILL_CHROMIUM") or find_program(*NAMES)
    # A container has neither the privileges of Chromium's sandbox nor much /dev/shm; the page is our own.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page of one context: ``page``, what it did in ``errors`` and ``requests``. token: sent with each request."""

    def __init__(self, browser: Browser, url: str, token: str | None = None, **options: Any) -> None:
        sent = {"extra_http_headers": {"Authorization": f"Bearer {token}"}} if token else {}
        # Without a GPU, what moves all the time is drawn by a processor, which others need.
        self.context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **sent, **options})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.url = url
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def elsewhere(self) -> list[str]:
        """Requests that went to another host or port than the page's."""
        here = urlsplit(self.url).netloc
        return [
            url for url in self.requests if urlsplit(url).scheme in ("http", "https") and urlsplit(url).netloc != here
        ]

    def violations(self) -> list[str]:
        """What axe-core finds, one line each."""
        # A colour that is on its way is neither the old nor the new one.
        self.until("() => document.getAnimations().every((one) => !(one instanceof CSSTransition))")
        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {one['help']}: {[node['failureSummary'] + node['html'] for node in one['nodes'][:3]]}"
            for one in found
        ]

    def routes(self) -> list[str]:
        """Every method and path that the server's OpenAPI document names."""
        document = self.page.evaluate("async () => (await fetch('openapi.json')).json()")
        return [f"{method} {path}" for path, item in document["paths"].items() for method in item]

    def number(self, figure: str) -> float:
        """A figure at the top of the page."""
        text = self.page.locator(f"[data-figure={figure}] .card-value").inner_text()
        return float(text.replace(",", "").replace("k", "e3"))

    def until(self, function: str, argument: Any = None) -> None:
        """Wait until a JavaScript function of ``argument`` says so; a bare expression would need eval."""
        self.page.wait_for_function(function, arg=argument, timeout=PATIENCE_MS)

    def until_step_after(self, step: float) -> None:
        """Wait until the page shows a later step."""
        figure = "document.querySelector('[data-figure=step] b').textContent.replace(',', '')"
        self.until(f"step => Number({figure}) > step", step)

    def close(self) -> None:
        self.context.close()
