"""Measures the page at /: time to its paints from loopback, and the server's processor time while it is open.

python benchmarks/page.py [--seconds S] [--loads N]

The server has the engine of `free_engine.py`, so that nothing else computes. It needs Chromium and Playwright, as
`tests/page` does. Nothing is sent to the model while the processor time is measured.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.conftest import Daemon, free_model

PAINTS = """new Promise(done => new PerformanceObserver(list => done([
  performance.getEntriesByName('first-contentful-paint')[0].startTime, list.getEntries().at(-1).startTime,
])).observe({type: 'largest-contentful-paint', buffered: true}))"""
"""Milliseconds from the navigation to the first paint with content, and to that of the largest text, which the scripts
draw."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for which the idle server is watched")
    parser.add_argument("--loads", type=int, default=20, help="number of loads without a browser cache")
    asked = parser.parse_args()
    daemon = Daemon("--log-level", "warning", program=free_model(20))
    try:
        daemon.wait_ready()
        # Playwright is no dependency of the project.
        with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            _report_paints([_paints_ms(browser, daemon.url) for _ in range(asked.loads)])
            closed = _share(daemon, asked.seconds)
            page = browser.new_page()
            page.goto(f"{daemon.url}/")
            page.wait_for_selector(".status.ready")
            print(f"server: {_share(daemon, asked.seconds):.2%} of a core with the page open, {closed:.2%} without it")
            browser.close()
    finally:
        daemon.stop(signal.SIGKILL)


def _paints_ms(browser: Any, url: str) -> tuple[float, float]:
    """`PAINTS` in a browser profile of its own."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{url}/")
        page.wait_for_selector(".status.ready")
        first_ms, largest_ms = page.evaluate(PAINTS)
        return float(first_ms), float(largest_ms)


def _report_paints(paints_ms: list[tuple[float, float]]) -> None:
    for name, paint_ms in zip(("first paint", "conversation"), zip(*paints_ms, strict=True), strict=True):
        print(f"{name}: median {median(paint_ms):.0f} ms, most {max(paint_ms):.0f} ms, of {len(paint_ms)} loads")


def _share(daemon: Daemon, seconds: float) -> float:
    """Processor time of the server process over the time that passed."""
    process = psutil.Process(daemon.process.pid)
    began_s, before = time.monotonic(), process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return float(used_s / (time.monotonic() - began_s))


if __name__ == "__main__":
    main()
