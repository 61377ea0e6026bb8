"""/docs in a browser: it works under its policy, loads nothing from another host, and cannot be framed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from inferd.server.text.model import ServedModel
from tests.api.conftest import MAX_MODEL_LEN, MODEL_PATH, VOCAB_SIZE, ScriptedRouter, app_settings, serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = ServedModel.load(MODEL_PATH, ("tiny",), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    with serving(model, ScriptedRouter(model), app_settings(access_log=False)) as url:
        yield url


def test_a_request_can_be_tried(browser: Any, url: str) -> None:
    pytest.importorskip("fastapi_swagger")
    faults: list[str] = []
    asked: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/docs")
        route = page.locator(".opblock", has=page.locator("[data-path='/v1/models']"))
        route.locator(".opblock-summary-control").click()
        route.get_by_role("button", name="Try it out").click()
        route.get_by_role("button", name="Execute").click()
        route.locator(".live-responses-table", has_text='"id": "tiny"').wait_for()
    assert faults == []
    assert [each for each in asked if not each.startswith((url, "data:", "blob:"))] == []


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_another_site_cannot_show_a_page_in_a_frame(browser: Any, url: str, path: str) -> None:
    with framing(f"{url}{path}") as outer, browser.new_context() as context:
        page = context.new_page()
        refusals: list[str] = []
        page.on("console", lambda message: refusals.append(message.text) if message.type == "error" else None)
        page.goto(outer)
        page.wait_for_load_state("networkidle")
        assert [frame for frame in page.frames if frame.url.startswith(url)] == []
        assert any("frame" in refusal for refusal in refusals)


@contextmanager
def framing(address: str) -> Iterator[str]:
    """A site on the loopback that shows an address in a frame."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"<!doctype html><iframe src='{address}'></iframe>".encode())

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    with HTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
