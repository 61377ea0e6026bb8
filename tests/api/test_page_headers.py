"""Every answer in HTML forbids frames and other hosts, whatever route gives it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from inferd.server.endpoints.routes import PAGE, ROUTES
from inferd.server.playground.page import page_headers
from tests.api.conftest import app_settings

KEY = "right"
PAGES = {"/", "/docs"}


def rules_of(answer: httpx.Response) -> dict[str, str]:
    rules = answer.headers.get("content-security-policy", "").split("; ")
    return dict(rule.partition(" ")[::2] for rule in rules)


def check(answer: httpx.Response) -> None:
    rules, where = rules_of(answer), answer.url
    assert rules.pop("script-src", "").split()[0] == "'self'", where
    assert "unsafe" not in str(rules_of(answer)), where
    assert (rules["default-src"], rules["frame-ancestors"]) == ("'none'", "'none'"), where
    assert set(rules.values()) <= {"'none'", "'self'", "'self' data:"}, where
    others = {name: value for name, value in page_headers().items() if name != "Content-Security-Policy"}
    assert {name: answer.headers.get(name) for name in others} == others, where


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {KEY}"}], ids=["nobody", "user"])
@pytest.mark.parametrize("root_path", ["", "/llm"], ids=["alone", "prefix"])
def test_each_answer_in_html_has_them(serve: Callable[..., str], headers: dict[str, str], root_path: str) -> None:
    url = serve(app_settings(api_key=(KEY,), admin_key=(KEY,), access_log=False), root_path=root_path)
    pages = set()
    with httpx.Client(base_url=url, headers={"Accept": "text/html", **headers}) as http:
        for route in ROUTES + PAGE:
            for method in (route.method, "PUT", *(["HEAD"] if route.method == "GET" else [])):
                answer = http.request(method, route.path.replace("{model_id:path}", "tiny"), headers=headers)
                if "html" in answer.headers.get("content-type", ""):
                    pages.add(route.path)
                    check(answer)
        for path in ("/redoc", "/nothing", "/docs/", "/playground/", "/docs/oauth2-redirect", "/%00", "/index.html"):
            answer = http.get(path)
            assert answer.status_code in (401, 404) and "html" not in answer.headers["content-type"], path
    assert pages == PAGES


def test_the_script_of_docs_is_allowed_by_its_hash_alone(serve: Callable[..., str]) -> None:
    """It differs by the prefix of a proxy, so its hash does too."""
    scripts = [
        rules_of(httpx.get(f"{serve(app_settings(), root_path=prefix)}/docs"))["script-src"] for prefix in ("", "/llm")
    ]
    assert len(set(scripts)) == 2 and all(script.count("'sha256-") == 1 for script in scripts)
