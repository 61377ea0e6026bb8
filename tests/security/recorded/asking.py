"""Recorded requests and answers: how files hold them, how a request is sent, and which parts of its answer are kept.

Requests are stored whole, so that they stay the same when the code that wrote them changes. The served app is the real
one, with a router that answers from a script in place of an engine. Knows nothing about faults.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import re
import socket
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from inferd.engine.api.wire.messages import Submit
from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.text.model import ServedModel
from inferd.server.transport.limits import ConnectionLimits
from tests.api.conftest import MAX_MODEL_LEN, MODEL_PATH, NAME, VOCAB_SIZE, Script, ScriptedRouter, serving

FOLDER = Path(__file__).parent
REQUESTS, ANSWERS, OPENAPI = FOLDER / "requests.jsonl.gz", FOLDER / "answers.jsonl.gz", FOLDER / "openapi.json.gz"

PAGE = "https://app.example"
KEY, ADMIN = "recorded-key", "recorded-admin"
SERVERS: dict[str, dict[str, Any]] = {
    "open": {},
    "keyed": {"api_key": (KEY,), "admin_key": (ADMIN,)},
    "warn": {"unknown_fields": "warn"},
    "any host": {"allowed_hosts": ("*",)},
    "starting": {},
    "pages": {"allowed_origins": (PAGE,), "allowed_hosts": ("LLM.example",)},
}
"""Settings of the servers that are asked."""

ANTHROPIC = "/v1/messages"
"""Paths of Anthropic's interface, whose errors have another shape, begin with this."""
STORED, ITEM = "resp_RECORDED", "item_RECORDED"
"""In a path or a body: the id of a stored response, and of one of its input items, made before the request is sent."""
WAIT_S = 60.0
_KEPT_HEADERS = (
    "access-control-allow-origin", "retry-after", "retry-after-ms", "www-authenticate", "x-should-retry", "vary",
)  # fmt: skip
_REPEATABLE = (
    "/render", "/count_tokens", "/tokenize", "/detokenize", "/v1/embeddings", "/embed_all", "/api/embeddings",
    "/embedding", "/predict",
)  # fmt: skip
"""Ends of paths whose answers hold no id and no time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. With `method` empty, `body` is all that is sent over a connection of its own."""

    id: str
    route: str
    """Method and path as the documentation writes them, or "raw"."""
    field: str
    fault: str
    server: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes | None

    def row(self) -> dict[str, Any]:
        """The request as JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.body is not None:
            try:
                fields["body"] = self.body.decode()
            except UnicodeDecodeError:
                fields["body"] = {"base64": base64.b64encode(self.body).decode()}
        return fields

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        body = row["body"]
        if isinstance(body, dict):
            body = base64.b64decode(body["base64"])
        elif body is not None:
            body = body.encode()
        headers = tuple((name, value) for name, value in row["headers"])
        return cls(**{**row, "headers": headers, "body": body})


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of an answer that must stay the same."""

    status: int
    type: str | None = None
    code: str | None = None
    param: str | None = None
    """Anthropic's errors have none: the name that their message begins with, or the first that it quotes."""
    media: str = ""
    headers: tuple[str, ...] = ()
    """Names of some headers; with their values if a client acts on them."""
    hints: tuple[str, ...] = ()
    """Names that the message of an unknown or removed parameter quotes besides it: what to write instead."""
    digest: str = ""
    """CRC-32 of an answer that is the same each time, or else of what the router was asked; empty if neither was."""


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """The same rows give the same bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        for row in rows:
            packed.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def read_rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rb") as lines:
        yield from map(json.loads, lines)


def read_cases() -> list[Case]:
    return list(map(Case.of_row, read_rows(REQUESTS)))


# -- sending -----------------------------------------------------------------------------------------------------------


@contextmanager
def served() -> Iterator[dict[str, Client]]:
    """One client for each of `SERVERS`."""
    model = ServedModel.load(MODEL_PATH, (NAME, "alias"), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    with ExitStack() as stack:
        clients = {}
        for name, flags in SERVERS.items():
            router = ScriptedRouter(model)
            router.will(Script(token_ids=(5,)))
            if name == "starting":
                router.state, router.has_engine = State.STARTING, False
            settings = Settings(access_log=False, **flags)
            # The time that a body takes to come depends on the machine, and no recorded request is slow.
            limits = ConnectionLimits(head_idle_s=WAIT_S, head_s=WAIT_S, linger_s=WAIT_S, stall_s=WAIT_S)
            clients[name] = Client(stack.enter_context(serving(model, router, settings, limits=limits)), router)
            stack.callback(clients[name].close)
        yield clients


class Client:
    """Sends requests one after the other, over a connection that is kept while the server keeps it."""

    def __init__(self, url: str, router: ScriptedRouter) -> None:
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._router = router
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, case: Case) -> tuple[Answer, bytes]:
        """The answer and its body. The model is awake, so that an answer does not depend on a request before."""
        if self._router.is_asleep:
            self._router.state = State.SERVING
        method, path, headers, body = case.method, case.path, case.headers, case.body
        if not method:
            self.close()
            self._router.submits = []
            assert body is not None
            answer = self._exchange(body, body.partition(b" ")[0].decode("latin-1"), path)
            self.close()
            return answer
        names = (STORED, ITEM)
        if any(name in path or name.encode() in (body or b"") for name in names):
            for name, value in zip(names, self._store(dict(headers)), strict=True):
                path, body = path.replace(name, value), body and body.replace(name.encode(), value.encode())
        self._router.submits = []
        return self._exchange(request_of(method, path, headers, body), method, path)

    def _store(self, headers: dict[str, str]) -> tuple[str, str]:
        """(a stored response's id, its input item's id); the names themselves if the server makes none."""
        headers = {name: value for name, value in headers.items() if name == "Authorization"} | _JSON
        raw = request_of("POST", "/v1/responses", tuple(headers.items()), b'{"input":"x","max_output_tokens":1}')
        answer, body = self._exchange(raw, "POST", "/v1/responses")
        if answer.status != 200:
            return STORED, ITEM
        name = json.loads(body)["id"]
        path = f"/v1/responses/{name}/input_items"
        items = self._exchange(request_of("GET", path, tuple(headers.items()), None), "GET", path)[1]
        return name, json.loads(items)["data"][0]["id"]

    def _exchange(self, raw: bytes, method: str, path: str) -> tuple[Answer, bytes]:
        for is_kept in (True, False):
            if self._socket is None:
                self._socket, is_kept = socket.create_connection(self._address, WAIT_S), False
            with suppress(ConnectionError):  # the head was answered, and the rest of the body is not read
                self._socket.sendall(raw)
            response = http.client.HTTPResponse(self._socket, method=method)
            try:
                response.begin()
                body = response.read()
                break
            except (ConnectionError, http.client.HTTPException):
                self.close()
                if not is_kept:
                    return Answer(0), b""
        if response.will_close:
            self.close()
        return answer_of(path, response, body, self._router.submits), body


_JSON = {"Content-Type": "application/json"}


def request_of(method: str, path: str, headers: tuple[tuple[str, str], ...], body: bytes | None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    if all(name.lower() != "host" for name, _ in headers):
        lines.append("Host: localhost")
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def answer_of(path: str, response: http.client.HTTPResponse, body: bytes, submits: list[Submit]) -> Answer:
    media = (response.getheader("content-type") or "").partition(";")[0]
    headers = [name for name in _KEPT_HEADERS if response.getheader(name) is not None]
    if (allow := response.getheader("allow")) is not None:
        headers.append("allow: " + ", ".join(sorted(allow.split(", "))))
    if warning := response.getheader("x-inferd-warning"):
        headers.append("x-inferd-warning: " + ", ".join(_QUOTED.findall(warning)))
    error: Any = None
    if media == "application/json" and response.status >= 400 and body:
        error = _error_of(body)
    elif media == "text/event-stream":
        error = _streamed_error(body)
    told: dict[str, str | None] = {}
    hints: tuple[str, ...] = ()
    if isinstance(error, dict):
        told = {name: error.get(name) for name in ("type", "code", "param")}
        if path.startswith(ANTHROPIC):
            told["param"] = named_in(error["message"])
        if _INSTEAD.search(error["message"]):
            hints = tuple(name for name in _QUOTED.findall(error["message"]) if name != told["param"])
    digest = ""
    if response.status == 200 and path.partition("?")[0].endswith(_REPEATABLE):
        digest = f"{zlib.crc32(_IDS.sub(b'', body)):08x}"
    elif submits:
        digest = f"{zlib.crc32(_asked_for(submits)):08x}"
    return Answer(response.status, **told, media=media, headers=tuple(headers), hints=hints, digest=digest)


def _error_of(body: bytes) -> Any:
    """None for an error of another shape, such as FastAPI's own."""
    value = json.loads(body)
    return value.get("error") if isinstance(value, dict) else None


def _streamed_error(body: bytes) -> Any:
    """The error event of a stream that failed."""
    for line in body.splitlines():
        if line.startswith(b"data: {") and b'"error"' in line and (error := json.loads(line[6:]).get("error")):
            return error
    return None


def _asked_for(submits: list[Submit]) -> bytes:
    """The prompts and parameters that reached the router, without ids, times and seeds, which the server may draw."""
    told = (
        (
            one.prompt_ids,
            one.scheduling.priority,
            one.scheduling.ttft_target_s,
            one.scheduling.tpot_target_s,
            _without_adapter(msgspec.to_builtins(msgspec.structs.replace(one.params, seed=0))),
        )
        for one in submits
    )
    return b"".join(map(msgspec.json.encode, told))


def _without_adapter(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that requests had before there were adapters, and the adapter of a request that has one."""
    if params["adapter"] is None:
        del params["adapter"]
    return params


_NAME = r"[A-Za-z_][\w.\[\]-]*"
_QUOTED = re.compile(rf"'({_NAME})'")
_IDS = re.compile(rb'"(id|request_id|created)":("[^"]*"|\d+)')
_INSTEAD = re.compile("(Unknown|Unsupported) parameter: ")


def named_in(message: str) -> str | None:
    """The field that a message is about."""
    found = re.match(rf"({_NAME}): ", message) or _QUOTED.search(message)
    return found[1] if found else None


def names(message: str, param: str) -> bool:
    """Whether a message in other words is about the same field."""
    return message.startswith(f"{param}: ") or f"'{param}'" in message


def openapi_of(client: Client) -> Any:
    """The document that the server gives at /openapi.json."""
    return json.loads(client.ask(Case("", "", "", "", "", "GET", "/openapi.json", (), None))[1])
