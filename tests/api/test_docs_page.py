"""/docs: a page whose every file comes from this server."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from tests.api.conftest import app_settings


def test_the_page_names_only_files_of_this_server(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    named = re.findall(r"(?:src|href)=\"([^\"]*)\"", answer.text)
    assert sorted(named) == ["/docs/favicon-32x32.png", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"]
    assert "'/openapi.json'" in answer.text
    assert "//" not in answer.text.replace("<!-- `SwaggerUIBundle` is now available on the page -->", "")


def test_its_files_are_served(http: httpx.Client) -> None:
    pytest.importorskip("fastapi_swagger")
    for name, media_type in (("swagger-ui-bundle.js", "text/javascript"), ("swagger-ui.css", "text/css")):
        answer = http.get(f"/docs/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(media_type)
        assert len(answer.content) > 100_000


@pytest.mark.parametrize("name", ["nothing.js", "..%2fmain.py", "__init__.py", ""])
def test_no_other_file_is(http: httpx.Client, name: str) -> None:
    assert http.get(f"/docs/{name}").status_code == 404


def test_the_page_works_behind_the_prefix_of_a_proxy(serve: Callable[..., str]) -> None:
    page = httpx.get(serve(app_settings(), root_path="/llm") + "/docs").text
    assert "'/llm/openapi.json'" in page
    named = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(named) == 3 and all(each.startswith("/llm/docs/") for each in named)
