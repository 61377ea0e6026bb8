"""Requests whose fault is not in a field: bytes that are no JSON, methods, paths, headers, queries and keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.reliability import fuzzing
from tests.security.recorded.asking import ADMIN, ITEM, KEY, STORED
from tests.security.recorded.corpus import JSON
from tests.security.recorded.interface import SEED, Interface, base, body_of, post

NUM_SEVERAL = 25
"""Requests of each route with two or three faults in their heads."""


def in_bytes(routes: Interface) -> Iterator[dict[str, Any]]:
    """Bytes that no writer of JSON writes, and JSON that is no object."""
    for path, name, _ in routes.with_body():
        whole = body_of(base(name))
        broken = {
            "empty": b"", "a space": b" ", "null": b"null", "a list": b"[]", "a list of bodies": b"[" + whole + b"]",
            "a string": b'"x"', "a number": b"1", "an empty object": b"{}", "cut": whole[:-1], "twice": whole + whole,
            "followed": whole + b" x", "BOM": b"\xef\xbb\xbf" + whole, "UTF-16": whole.decode().encode("utf-16"),
            "UTF-32": whole.decode().encode("utf-32"), "Latin-1": whole[:-1] + b',"user":"\xe9"}',
            "half a character": whole[:-1] + b',"user":"\\ud800"}',
            "half a character, raw": whole[:-1] + b',"user":"\xed\xa0\x80"}',
            "a pair": whole[:-1] + b',"user":"\\ud83d\\ude00"}', "NUL": whole[:-1] + b',"user":"\x00"}',
            "a line break": whole[:-1] + b',"user":"a\nb"}', "a comment": b"/* */" + whole,
            "a comma at the end": whole[:-1] + b",}", "single quotes": whole.replace(b'"', b"'"),
            "a key twice": whole[:-1] + b"," + whole[1:], "a key twice inside": whole[:-1] + b',"x":{"a":1,"a":2}}',
            "nested": whole[:-1] + b',"x":' + b"[" * 200 + b"]" * 200 + b"}", "open brackets": b"[" * 100_000,
            "128 levels": whole[:-1] + b',"x":' + b"[" * 127 + b"]" * 127 + b"}",
            "129 levels": whole[:-1] + b',"x":' + b"[" * 128 + b"]" * 128 + b"}",
            **{f"the number {text}": whole[:-1] + f',"x":{text}}}'.encode() for text in
               ("NaN", "-Infinity", "1e400", "-1e400", "01", "1.", ".5", "+1", "1e", "0x1", "-0", "1E5", "9" * 5_000)},
            "gzip": b"\x1f\x8b\x08" + whole, "a form": b"prompt=x&max_tokens=1",
        }  # fmt: skip
        for fault, body in broken.items():
            yield post(path, "", fault, body)


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
TYPES = (
    "text/plain", "", "application/json; charset=utf-16", "APPLICATION/JSON", "application/problem+json", "text/json",
    "application/x-ndjson", "multipart/form-data; boundary=x", "application/json, text/plain", ";", "application/+json",
    "application/xml",
)  # fmt: skip
NUMBERS = (
    "nan", "inf", "-1", "0", "1e400", "", "x", "1,2", " 5000 ", "1_000", "\u00e9", "0x10", "86400", "86401", "3600001",
)  # fmt: skip
HEADERS = (
    *(("Content-Type", value) for value in TYPES),
    *((name, value) for name in ("X-Request-Timeout", "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms") for value in NUMBERS),
    ("Content-Encoding", "gzip"), ("Content-Encoding", "identity"), ("Content-Encoding", "br, gzip"),
    ("Idempotency-Key", "x" * 300), ("Priority", "u=9"), ("Accept", "text/html"), ("Accept", "text/event-stream"),
    ("Expect", "100-continue"), ("Cookie", "a" * 4_000), ("X-Request-Id", "a" * 600), ("X-Request-Id", "\u00e9"),
    ("anthropic-version", "0"), ("anthropic-beta", "x"), ("OpenAI-Beta", "x"), ("Authorization", "Basic x"),
    ("Authorization", "Bearer x"), ("x-api-key", "x"), ("Range", "bytes=9-"), ("X-HTTP-Method-Override", "GET"),
)  # fmt: skip


def in_heads(routes: Interface) -> Iterator[dict[str, Any]]:
    """Methods, paths, headers and queries that a route does not have."""
    rng = random.Random(f"{SEED} heads")
    bodies = {path: body_of(base(name)) for path, name, _ in routes.with_body()}
    for right, path, _ in routes.operations:
        concrete = path.replace("{response_id}", "resp_x").replace("{model_id}", "tiny")
        route = f"{right} {path}"
        ways = [(method, concrete, "method") for method in METHODS]
        ways += [(right, concrete + end, "path") for end in ("/", "?", "?x=1", "?stream=true", "%2f", "#x", "//", "/x")]
        ways += [(right, way, "path") for way in (concrete.upper(), "/" + concrete, concrete + "%00")]
        for method, way, fault in ways:
            body = bodies.get(path) if method in ("POST", "PUT", "PATCH") else None
            yield post(path, way[-40:], fault, b"", route=route, method=method, path=way, body=body)
        if right == "POST":
            yield post(path, "", "no body", b"", route=route, path=concrete, body=None)
            yield post(path, "", "a body", b"", route=route, path=concrete, body=b"[" * 500)
    for path, body in bodies.items():
        for name, value in HEADERS:
            headers = ((name, value),) if name == "Content-Type" else (*JSON.items(), (name, value))
            yield post(path, name, value[:40], body, headers=headers)
            both = body[:-1] + b',"unknown":1}'
            yield post(path, f"{name} + unknown", value[:40], both, headers=headers)
        yield post(path, "Content-Type", "twice", body, headers=(*JSON.items(), ("Content-Type", "text/plain")))
        yield post(path, "Content-Type", "none", body, headers=())
        yield post(path, "Content-Type", "none, and no JSON", b"{", headers=())
        yield from _several(rng, path, body)
    for path in fuzzing._PATHS:
        for method in ("GET", "POST"):
            yield post(path, "", "path", b"", route=f"{method} elsewhere", method=method, path=path, body=None)


def _several(rng: random.Random, path: str, body: bytes) -> Iterator[dict[str, Any]]:
    """Faults in two headers or more, in the body too. Which of them the answer names is part of the interface."""
    bodies = (body, b"{", b"[]", b"", b"{}", body[:-1] + b',"unknown":1}', body[:-1] + b',"model":"none"}')
    for _ in range(NUM_SEVERAL):
        some = rng.sample(HEADERS, rng.choice((2, 2, 3)))
        if all(name != "Content-Type" for name, _ in some) and rng.random() < 0.9:
            some += JSON.items()
        way = path + rng.choice(("", "", "?x=1", "/"))
        method = rng.choice(("POST",) * 5 + ("PUT",))
        fields = " + ".join(name for name, _ in some)
        yield post(path, fields, "several", rng.choice(bodies), method=method, path=way, headers=tuple(some))


VALUES = (
    "", "0", "1", "-1", "100", "101", "+1", "1.0", "1e2", "%201", "%D9%A1", "99999999999", "true", "false", "True",
    "null", "x", "%00", "%ff", "x" * 300, "asc", "desc", "DESC", "[]", "%5B%22x%22%5D", "message.output_text.logprobs",
    "reasoning.encrypted_content", "file_search_call.results", ITEM,
)  # fmt: skip


def in_queries(routes: Interface) -> Iterator[dict[str, Any]]:
    """Queries of a stored response, and some of one that is not there; ids that are none."""
    rng = random.Random(f"{SEED} queries")
    for method, path, operation in routes.operations:
        names = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
        if not names:
            continue
        names += ["starting_after", "include_obfuscation", "limits", "Order", "include[]", "x", ""]
        queries = [(name, f"{name}={value}") for name in names for value in VALUES]
        for _ in range(150):
            some = [f"{rng.choice(names)}={rng.choice(VALUES)}" for _ in range(rng.choice((2, 2, 3)))]
            queries.append(("several", "&".join(some)))
        for num in (16, 17, 63, 64, 65):
            queries += [("include", "&".join(["include=" + VALUES[-4]] * num)), ("limit", "&".join(["limit=1"] * num))]
        odd = ("&", "&&", "=", "limit", "limit=", "limit=1;order=asc", "%6Cimit=0", "?limit=0")
        queries += [("", text) for text in odd]
        for field, query in queries:
            fault = "bounds" if query.partition("=")[2].isdigit() else "query"
            for owner in (STORED, "resp_x") if rng.random() < 0.5 else (STORED,):
                whole = f"{path.replace('{response_id}', owner)}?{query}"
                yield post(path, field, fault, b"", route=f"{method} {path}", method=method, path=whole, body=None)
    for field, end in (("cancel", "/cancel"), ("delete", "")):
        method = "POST" if end else "DELETE"
        route = f"{method} /v1/responses/{{response_id}}{end}"
        for owner in (STORED, "resp_x", "%00", "a" * 500):
            whole = f"/v1/responses/{owner}{end}"
            yield post(whole, field, "path", b"", route=route, method=method, path=whole, body=None)


def with_keys(routes: Interface) -> Iterator[dict[str, Any]]:
    """Every route with every kind of key, and without."""
    bodies = {path: body_of(base(name)) for path, name, _ in routes.with_body()}
    for method, path, _ in routes.operations:
        concrete = path.replace("{response_id}", "resp_x").replace("{model_id}", "tiny")
        for name, value in (
            ("none", ""), ("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {ADMIN}"), ("x-api-key", KEY),
            ("Authorization", "Bearer wrong"), ("Authorization", f"bearer {KEY}"), ("x-api-key", "wrong"),
        ):  # fmt: skip
            for body in dict.fromkeys((bodies.get(path), b"{" if path in bodies else None)):
                headers = (*(JSON.items() if body is not None else ()), *(((name, value),) if value else ()))
                yield post(
                    path, name, value[:10], b"", route=f"{method} {path}", method=method, path=concrete,
                    headers=headers, body=body, server="keyed",
                )  # fmt: skip
