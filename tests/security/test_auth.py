"""S2: no spelling of a request avoids the keys, no key is logged, and admin routes can have their own port."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from inferd.engine.api.errors import ConfigError
from inferd.server.config.settings import Settings
from inferd.server.endpoints.route import Access
from inferd.server.endpoints.routes import ROUTES
from inferd.server.text.model import ServedModel
from tests.api.conftest import ScriptedRouter, app_settings, model, serving
from tests.e2e.conftest import Daemon, free_model, start

__all__ = ["model", "start"]

KEY, OTHER, ADMIN = "first-key-4f1d", "second-key-93ab", "admin-key-77c0"
WAIT_S = 60.0
HOST = b"Host: x\r\n"
RIGHT = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
WRONG = b"Authorization: Bearer wrong\r\n"


@pytest.fixture(scope="module")
def router(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


@pytest.fixture(scope="module")
def url(model: ServedModel, router: ScriptedRouter) -> Iterator[str]:
    settings = app_settings(api_key=(KEY, OTHER), admin_key=(ADMIN,))
    with serving(model, router, settings) as url:
        yield url


@pytest.fixture(scope="module")
def prefixed(model: ServedModel, router: ScriptedRouter) -> Iterator[str]:
    """A server behind a proxy that removes /llm, which allows browsers."""
    settings = app_settings(api_key=(KEY,), admin_key=(ADMIN,), allowed_origins=("https://a.example",))
    with serving(model, router, settings, root_path="/llm") as url:
        yield url


def ask(url: str, raw: bytes) -> tuple[int, bytes]:
    """(status, body) of the answer to these bytes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as client:
        client.sendall(raw)
        answer = http.client.HTTPResponse(client, method=raw.split(b" ")[0].decode())
        answer.begin()
        return answer.status, answer.read()


def get(target: bytes, headers: bytes = b"", method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\n" + HOST + headers + b"Connection: close\r\n\r\n"


MODELS = b"/v1/models"
TARGETS = [
    b"/v1/models", b"/v1/models/", b"/v1/models/tiny", b"/v1/models?x=/live", b"/v1/models#/live", b"/v1/models;/live",
    b"//v1/models", b"///v1/models", b"/v1//models", b"/./v1/models", b"/live/../v1/models", b"/live/..%2fv1/models",
    b"/live%2f..%2fv1/models", b"/%2e%2e/v1/models", b"/%2fv1/models", b"/v1%2fmodels", b"/v1/%6dodels", b"/V1/MODELS",
    b"/v1/models.", b"/v1/models%00", b"/v1/models%20", b"/v1/models%0a", b"/v1/models%3f/live", b"/live.", b"/live%00",
    b"/v1/models/%2e%2e/live", b"/v1/models\\..\\live", b"/%5cv1/models", b"/v1/%2e/models", b"/live/", b"/LIVE",
    b"/live%2f",
    b"/live;/v1/models", b"/live/%2e%2e/v1/models", b"/metrics/../config", b"/health%23/../v1/models", b"*",
    b"http://x/v1/models", b"http://localhost/v1/models", b"https://x:443/v1/models", b"http://x//v1/models",
    b"http://" + KEY.encode() + b"@x/v1/models", b"/v1/models?api_key=" + KEY.encode(),
    b"/v1/models?key=" + KEY.encode(),
    b"/v1/responses/live", b"/config", b"//config", b"/reset_prefix_cache", b"/tokenizer_info", b"/nothing",
]  # fmt: skip
"""Spellings of paths, all without a key. None is served, and the answers do not reveal which paths exist."""

HEADERS = {
    "no scheme": b"Authorization: " + KEY.encode() + b"\r\n",
    "another scheme": b"Authorization: Basic " + KEY.encode() + b"\r\n",
    "no key": b"Authorization: Bearer\r\n",
    "an empty key": b"Authorization: Bearer \r\n",
    "a tab": b"Authorization: Bearer\t" + KEY.encode() + b"\r\n",
    "quoted": b'Authorization: Bearer "' + KEY.encode() + b'"\r\n',
    "a longer key": RIGHT.replace(b"\r\n", b"x\r\n"),
    "a shorter key": RIGHT.replace(b"d\r\n", b"\r\n"),
    "upper case": RIGHT.upper(),
    "two keys in one": b"Authorization: Bearer " + KEY.encode() + b"," + OTHER.encode() + b"\r\n",
    "a key and more": b"Authorization: Bearer " + KEY.encode() + b" x\r\n",
    "right, then wrong": RIGHT + WRONG,
    "wrong, then right": WRONG + RIGHT,
    "two right ones": RIGHT + b"Authorization: Bearer " + OTHER.encode() + b"\r\n",
    "wrong, in another case": RIGHT + b"AUTHORIZATION: bearer wrong\r\n",
    "Anthropic's header": b"x-api-key: " + KEY.encode() + b"\r\n",
    "Azure's header": b"api-key: " + KEY.encode() + b"\r\n",
    "a proxy's header": b"Proxy-Authorization: Bearer " + KEY.encode() + b"\r\n",
    "an underscore": b"Authorization_: Bearer " + KEY.encode() + b"\r\n",
    "a cookie": b"Cookie: Authorization=Bearer " + KEY.encode() + b"\r\n",
    "an original URL": b"X-Original-URL: /live\r\nX-Rewrite-URL: /live\r\n",
    "an override of the method": b"X-HTTP-Method-Override: OPTIONS\r\n",
    "from here": b"X-Forwarded-For: 127.0.0.1\r\nForwarded: for=127.0.0.1\r\nX-Real-IP: 127.0.0.1\r\n",
    "a prefix": b"X-Forwarded-Prefix: /live\r\nX-Script-Name: /live\r\n",
    "to be upgraded": b"Upgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n",
    "the key's digest": b"Authorization: Bearer 2f0c5a\r\n",
    "bytes that are no text": b"Authorization: Bearer \xff\xfe\r\n",
    "a list's beginning": b"Authorization: Bearer [\r\n",
}
METHODS = [b"HEAD", b"OPTIONS", b"PUT", b"PATCH", b"DELETE", b"TRACE", b"POST", b"PROPFIND"]
TRICKS = {
    **{target.decode("latin-1"): get(target) for target in TARGETS},
    **{name: get(MODELS, headers) for name, headers in HEADERS.items()},
    **{method.decode(): get(MODELS, method=method) for method in METHODS},
    "HTTP/1.0": get(MODELS, version=b"1.0"),
    "a host that is a path": get(MODELS).replace(b"Host: x", b"Host: x/live"),
    "a host that is here": get(MODELS).replace(b"Host: x", b"Host: localhost"),
    "an empty host": get(MODELS).replace(b"Host: x", b"Host:"),
    "a key in a trailer": get(
        b"/v1/completions", b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n", b"POST"
    )
    + b'10\r\n{"prompt": "hi"}\r\n0\r\n'
    + RIGHT
    + b"\r\n",
    "a body on a public path": get(b"/live", b"Content-Length: 40\r\n", b"POST")
    + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n   ",
}


def test_a_key_opens(url: str) -> None:
    """The control of the tests above: the same bytes with a key are served."""
    assert ask(url, get(MODELS, RIGHT))[0] == 200
    assert ask(url, get(MODELS, b"authorization: bearer " + KEY.encode() + b"\r\n"))[0] == 200
    assert ask(url, get(MODELS, RIGHT + RIGHT))[0] == 200
    assert ask(url, get(b"http://anyone/v1/models", RIGHT))[0] == 200
    assert len(TRICKS) > 80


@pytest.mark.parametrize("raw", TRICKS.values(), ids=TRICKS)
def test_no_spelling_gets_past_the_keys(url: str, router: ScriptedRouter, raw: bytes) -> None:
    status, body = ask(url, raw)
    allowed = {405} if raw.startswith(b"POST /live") else {401}
    assert status in allowed, body
    assert b"tiny" not in body
    assert router.submits == []


@pytest.mark.parametrize(
    "target",
    [b"/v1/models", b"/llm/v1/models", b"/llm/llm/v1/models", b"/llm/live", b"/llmlive", b"/llm//live", b"//live"],
)
def test_nor_behind_a_prefix(prefixed: str, target: bytes) -> None:
    """A proxy removes the prefix once. A request that writes it twice asks for another path."""
    assert ask(prefixed, get(target))[0] == 401
    assert ask(prefixed, get(b"/live"))[0] == 200


def test_what_browsers_ask_beforehand_is_answered_and_gives_nothing(prefixed: str, router: ScriptedRouter) -> None:
    asked = b"Origin: https://a.example\r\nAccess-Control-Request-Method: POST\r\n"
    assert ask(prefixed, get(b"/v1/completions", asked, b"OPTIONS")) == (200, b"OK")
    assert ask(prefixed, get(b"/v1/completions", asked, b"POST"))[0] == 401
    assert router.submits == []


def test_every_route_is_closed_to_whom_its_label_says(url: str) -> None:
    """Access to every route by every method, with every kind of key."""
    keys = {"": None, "user": KEY, "admin": ADMIN}
    for route in ROUTES:
        path = re.sub(r"{\w+(:path)?}", "none", route.path)
        for role, key in keys.items():
            headers = f"Authorization: Bearer {key}\r\n".encode() if key else b""
            status, _ = ask(url, get(path.encode(), headers, route.method.encode()))
            is_closed = status in (401, 403)
            may = {Access.PUBLIC: True, Access.KEY: role != "", Access.ADMIN: role == "admin"}[route.access]
            assert is_closed is not may, (route.path, role, status)


def test_keys_are_known_by_their_digests_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are found and compared by SHA-256. A caller cannot choose its first bytes, so time reveals nothing."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watch(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    for key in (KEY, OTHER, ADMIN, "none"):
        ask(url, get(MODELS, f"Authorization: Bearer {key}\r\n".encode()))
    digests = [hashlib.sha256(key.encode()).digest() for key in (KEY, OTHER, ADMIN)]
    assert compared == [(digest, digest) for digest in digests]


def test_keys_are_in_no_line_of_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Right and wrong keys, in every place of a request, at log level debug."""
    wrong = "wrong-key-60d1"
    with caplog.at_level(logging.DEBUG):
        for key in (KEY, wrong):
            for header in (f"Authorization: Bearer {key}", f"x-api-key: {key}", f"Authorization: {key}\r\nX: \x00"):
                for target in (b"/v1/models", b"/v1/messages", b"/v1/models?api_key=" + key.encode(), b"/config"):
                    status, body = ask(url, get(target, header.encode() + b"\r\n"))
                    assert key.encode() not in body, status
    assert caplog.records, "nothing was logged at all"
    lines = [f"{record.name}: {record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert not [line for line in lines for key in (KEY, OTHER, ADMIN, wrong) if key in line]


OPEN_HOSTS = ["0.0.0.0", "::", "0", "10.0.0.1", "fe80::1", "example.com", "localhost.example.com", "127.0.0.1.example"]


@pytest.mark.parametrize("host", OPEN_HOSTS)
def test_who_is_open_to_others_needs_a_key_or_says_so(host: str) -> None:
    for keys in ({}, {"admin_key": (ADMIN,)}):
        with pytest.raises(ConfigError, match=r"other machines can reach host .*, and no key is set"):
            Settings.load({"host": host, **keys})
    assert Settings.load({"host": host, "api_key": (KEY,)}).host == host
    assert Settings.load({"host": host, "allow_unauthenticated": True}).host == host
    for closed in ("127.0.0.1", "::1", "127.1.2.3", "localhost"):
        assert Settings.load({"host": closed}).host == closed


def test_admin_routes_at_a_port_of_their_own(start: Callable[..., Daemon]) -> None:
    """Admin routes are served only at their port and to admin keys. That port serves no others except public ones."""
    daemon = start("--admin-port", "0", "--admin-key", ADMIN, "--api-key", KEY, program=free_model(0))
    found = re.search(r"admin routes are served only at (\S+) port (\d+)", daemon.output)
    assert found is not None, daemon.output
    there = f"http://{found[1]}:{found[2]}"
    as_admin, as_user = ({"Authorization": f"Bearer {key}"} for key in (ADMIN, KEY))

    def statuses(path: str, method: str = "GET") -> list[int]:
        """Statuses at both ports with the admin key."""
        urls = (daemon.url, there)
        return [httpx.request(method, url + path, headers=as_admin, timeout=WAIT_S).status_code for url in urls]

    assert statuses("/config") == [404, 200]
    assert statuses("/reset_prefix_cache", "POST") == [404, 200]
    assert statuses("/wake_up", "POST") == [404, 200]
    assert statuses("/start_profile", "POST") == [501, 501], "no port has it"
    assert statuses("/v1/models") == [200, 404]
    assert statuses("/live") == statuses("/metrics") == [200, 200]
    assert httpx.get(there + "/config", headers=as_user).status_code == 403
    assert httpx.get(there + "/config").status_code == 401
    spoofed = {**as_admin, "Host": there.removeprefix("http://"), "X-Forwarded-Port": found[2]}
    refused = httpx.get(daemon.url + "/config", headers=spoofed)
    unknown = httpx.get(daemon.url + "/nothing", headers=as_admin)
    assert refused.status_code == 404
    assert refused.json()["error"] == json.loads(unknown.text.replace("/nothing", "/config"))["error"]


def test_two_ports_must_differ() -> None:
    with pytest.raises(ConfigError, match="port and admin_port are both 8000"):
        Settings.load({"admin_port": 8000})
