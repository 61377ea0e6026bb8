"""The page at /: a page whose every file comes from this server. `tests/page` uses it in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from inferd.server.config.settings import Settings
from inferd.server.endpoints.routes import PAGE, PLAYGROUND_FILES
from inferd.server.playground.page import STATIC, page_headers, policy
from tests.api.conftest import app_settings

MAX_BYTES = 200_000
NOT_SERVED = {"LICENSES.txt"}
"""Beside the files of other projects, as their licences ask."""
NAMES = {
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1999/xhtml",
    "http://www.w3.org/1998/Math/MathML",
    "https://github.com/markedjs/marked",
    "https://github.com/babel/babel/blob/main/packages/babel-helpers/LICENSE",
    "http://",
}
"""Names of XML namespaces, addresses in comments, and the scheme that marked puts before `www.`. Nothing loads them."""


def test_every_file_is_served_as_it_is(http: httpx.Client) -> None:
    names = {path.name for path in STATIC.iterdir()} - NOT_SERVED
    assert {Path(route.path).name or "index.html" for route in PAGE} == names
    media = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for route in PAGE:
        answer = http.get(route.path)
        stored = STATIC / (Path(route.path).name or "index.html")
        assert answer.status_code == 200 and answer.content == stored.read_bytes()
        assert answer.headers["content-type"].startswith(media[stored.suffix])
        assert {name: answer.headers[name] for name in page_headers()} == page_headers()
        assert http.head(route.path).status_code == 200
    assert sum((STATIC / name).stat().st_size for name in names) < MAX_BYTES


def test_the_policy_allows_this_server_alone() -> None:
    rules = dict(rule.split(" ", 1) for rule in policy().split("; "))
    assert rules["default-src"] == "'none'"
    assert all(value in ("'self'", "'none'") for name, value in rules.items() if name != "img-src")
    assert rules["img-src"] == "'self' data:"


def test_no_file_names_another_host() -> None:
    for path in STATIC.iterdir():
        if path.name not in NOT_SERVED:
            found = set(re.findall(r"https?://[^\s\"'`)\\]*", path.read_text()))
            assert {name.rstrip(".") for name in found} <= NAMES, path.name


def test_the_page_has_no_script_or_style_of_its_own(http: httpx.Client) -> None:
    page = http.get("/").text
    assert re.findall(r"<script[^>]*>(?!</script>)|<style|style=|\son\w+=", page) == []
    named = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(named) == 4 and {f"/{name}" for name in named} <= {route.path for route in PLAYGROUND_FILES}


def test_modules_import_files_that_are_served() -> None:
    served = {Path(route.path).name for route in PLAYGROUND_FILES}
    for path in STATIC.glob("*.js"):
        assert set(re.findall(r"from \"\./([^\"]+)\"", path.read_text())) <= served, path.name


def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/playground/marked.js")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = http.get("/playground/marked.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get("/playground/marked.js", headers={"If-None-Match": '"other"'}).content == first.content
    assert http.get("/playground/preact.js").headers["etag"] != tag


@pytest.mark.parametrize("name", ["nothing.js", "..%2fpage.py", "index.html", "LICENSES.txt", "__init__.py", ""])
def test_no_other_file_is_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/playground/{name}").status_code == 404


def test_the_page_needs_no_key_and_works_behind_a_prefix(serve: Callable[..., str]) -> None:
    url = serve(app_settings(api_key=("right",), access_log=False), root_path="/llm")
    assert httpx.get(f"{url}/").text == (STATIC / "index.html").read_text()
    assert httpx.get(f"{url}/playground/app.js").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401


@pytest.mark.parametrize("keys", [(), ("right",)])
def test_the_page_may_call_its_own_server(serve: Callable[[Settings], str], keys: tuple[str, ...]) -> None:
    """A browser sends the page's origin with every request of the page that is no plain GET."""
    url = serve(app_settings(api_key=keys, host="127.0.0.1", access_log=False))
    headers = {"Origin": url, "Authorization": f"Bearer {''.join(keys) or 'any'}"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    foreign = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"Origin": "https://other.example"})
    assert foreign.status_code == (401 if keys else 403)


def test_without_the_page_its_addresses_are_like_any_other(serve: Callable[[Settings], str]) -> None:
    url = serve(app_settings(playground=False, access_log=False))
    assert {httpx.get(url + route.path).status_code for route in PAGE} == {404}
    locked = serve(app_settings(api_key=("right",), playground=False, access_log=False))
    assert {httpx.get(locked + path).status_code for path in ("/", "/nothing")} == {401}
