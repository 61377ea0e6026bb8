"""Every row of the security tests that is one HTTP request, as a recorded request.

Rows are left out if their answers depend on time or on earlier requests:

- heads and bodies that never end or come byte by byte
- floods of connections and pipelined requests
- endless framing, which may end a connection before its answer is read
- quotas, schemas that are refused when they take too long, and texts of 10 MB
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.api.client_requests import REQUESTS as OF_CLIENTS
from tests.security import (
    test_auth,
    test_bounded_work,
    test_fields,
    test_grammars,
    test_http,
    test_json_in_strings,
    test_origins,
)
from tests.security.recorded.asking import ADMIN, KEY, Case

SLOW = {
    *test_grammars.BY_TIME, "an endless schema", "an endless schema in Lark", "an endless schema in a tag",
    "16 MB of trailer", "10 MB of digits", "10 MB of a letter, cut",
}  # fmt: skip
JSON = {"Content-Type": "application/json"}
KEYS = {test_auth.KEY: KEY, test_auth.ADMIN: ADMIN}


def cases() -> Iterator[Case]:
    """All of them, with ids of their own."""
    for number, case in enumerate(_cases()):
        yield Case(f"corpus-{number}", **case)


def post(path: str, value: Any, fault: str, server: str = "open", **headers: str) -> dict[str, Any]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return {
        "route": f"POST {path}", "field": "", "fault": fault, "server": server, "method": "POST", "path": path,
        "headers": tuple((JSON | headers).items()), "body": body,
    }  # fmt: skip


def raw(data: bytes, fault: str, server: str = "any host") -> dict[str, Any]:
    return {
        "route": "raw", "field": "", "fault": fault, "server": server, "method": "", "path": "", "headers": (),
        "body": data,
    }  # fmt: skip


def parametrized(test: Any, index: int = 0) -> list[Any]:
    """The rows of a test's mark."""
    return list(test.pytestmark[index].args[1])


def _cases() -> Iterator[dict[str, Any]]:
    yield from _bodies()
    yield from _grammars()
    yield from _json_in_strings()
    yield from _connections()
    yield from _pages()


def _bodies() -> Iterator[dict[str, Any]]:
    for body, _ in parametrized(test_fields.test_what_one_body_may_ask_for_is_bounded):
        yield post("/v1/completions", {"max_tokens": 1, **body}, "too much work")
    for name, (_, make) in test_bounded_work.CASES.items():
        if name not in SLOW:
            yield raw(make(), name)
    for name, (body, headers, _) in test_http.HOSTILE_BODIES.items():
        yield post("/v1/completions", body, name, **headers)
    for asked in OF_CLIENTS:
        yield post(asked.path, asked.body, f"as {asked.client} writes it")


def _grammars() -> Iterator[dict[str, Any]]:
    base = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
    for name, fields in {**test_grammars.REFUSED, **test_grammars.SERVED}.items():
        if name not in SLOW:
            yield post("/v1/chat/completions", base | fields, name)
    for family, (path, body) in test_grammars.FAMILIES.items():
        for name, schema in {"an integer": {"type": "integer"}, **test_grammars.EVERYWHERE_REFUSED}.items():
            yield post(path, body(schema), f"{family}: {name}")


def _json_in_strings() -> Iterator[dict[str, Any]]:
    turns, items = test_json_in_strings.turns, test_json_in_strings.items
    for name, text in test_json_in_strings.HOSTILE.items():
        for path, body in (
            ("/v1/chat/completions", {"messages": turns(text)}),
            ("/v1/chat/completions/render", {"messages": turns(text)}),
            ("/tokenize", {"messages": turns(text)}),
            ("/v1/responses", {"input": items(text)}),
            ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": text}}),
        ):
            yield post(path, body, f"in a string: {name}")
    for number in test_json_in_strings.NUMBERS:
        for template in ('"temperature": %s', '"logit_bias": {"1": %s}', '"seed": %s'):
            yield post(
                "/v1/completions", ('{"prompt": "x", ' + template % number + "}").encode(), f"the number {number}"
            )
    for number in ("nan", "inf", "-inf", "1e999", "-nan", "", "x", "0", "-1", "1e-9"):
        for header in ("X-Request-Timeout", "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"):
            for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": turns()})):
                yield post(path, body, f"{header}: {number}", **{header: number})


def _connections() -> Iterator[dict[str, Any]]:
    for name, data in test_http.AMBIGUOUS.items():
        yield raw(data, name)
    for name in ("include", "include[]", "a", "after", ""):
        query = "&".join([name] * (60_000 // (len(name) + 1)))
        for path in ("/v1/responses/x", "/v1/responses/x/input_items"):
            yield raw(test_auth.get(f"{path}?{query}".encode()), f"a query of many parameters: {name}")
    yield raw(test_http.POST + b"Content-Length: 99999999999\r\n\r\n", "a body that is too long")
    for name, data in test_auth.TRICKS.items():
        for key, ours in KEYS.items():
            data = data.replace(key.encode(), ours.encode())
        yield raw(data, f"without a key: {name}", "keyed")


def _pages() -> Iterator[dict[str, Any]]:
    """Requests of web pages, allowed and not, and requests that name another host than this machine."""
    body, preflight = test_origins.BODY, test_origins.PREFLIGHT
    asked: list[dict[str, str]] = [{"Origin": origin} for origin in test_origins.FOREIGN]
    asked += [{"Origin": test_origins.PAGE}, {"Origin": "http://localhost:3000"}]
    asked += [{"Host": host} for host in (*test_origins.STRANGE_HOSTS, *test_origins.LOCAL_HOSTS, "LLM.example:443")]
    for headers in asked:
        told = " ".join(f"{name}: {value}" for name, value in headers.items())
        for server in ("open", "pages"):
            for path in ("/v1/completions", "/v1/messages", "/nowhere"):
                yield post(path, body, told, server, **headers)
            for method, path, more in (("GET", "/v1/models", {}), ("OPTIONS", "/v1/completions", preflight)):
                yield {
                    **post(path, body, told, server), "route": f"{method} {path}", "method": method, "body": None,
                    "headers": tuple((headers | more).items()),
                }  # fmt: skip
    for path in test_origins.POSTS:
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "text/json"):
            yield post(path, body, f"Content-Type: {kind}", **{"Content-Type": kind})
        yield {**post(path, body, "no content type"), "headers": ()}
