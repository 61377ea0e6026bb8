"""A headless Chromium, and the page at / of a server with scripted answers. Skipped if something is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed: the page is not tested")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the page is not tested")
    with api.sync_playwright() as playwright:
        # Chromium's sandbox does not start as root, as which containers run.
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"], ignore_default_args=["--hide-scrollbars"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, timeout_ms: float = 10_000) -> Iterator[Any]:
    """The page of a server. Afterwards it has reported no error and refused nothing."""
    faults: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(timeout_ms)
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"{url}/")
        page.wait_for_selector(".status.ready")
        yield page
    # The browser itself reports answers that are no success.
    assert [fault for fault in faults if "Failed to load resource" not in fault] == []


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: Any, text: str) -> None:
    """Wait for an answer that is finished and formatted."""
    answer = page.locator(".assistant", has_text=text).filter(has=page.locator(".facts", has_text="tokens"))
    answer.filter(has_not=page.locator(".markdown[aria-busy=true]")).wait_for()
