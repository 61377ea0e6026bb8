"""Asks a server for the vectors of a batch of lines. Waits and asks again while the server is busy or away, and finds
the lines that it refuses."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
import socket
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.embed.lines import Line
from inferd.server.commands.embed.output import Row

_CONNECT_TIMEOUT_S = 5.0
_MOST_WAIT_S = 30.0
_BUSY = (408, 425, 429, 502, 503, 504)
"""Statuses of a request that may succeed later."""
_SERVER_ERROR = 500
"""Status of a request that broke something in the server: maybe one of its lines did."""
_MAX_FAULTS = 3
"""Number of lines in a row, each asked alone, after whose `_SERVER_ERROR` the server is at fault, not the lines."""
_MAX_MESSAGE = 500
_SHORT_TEXT = "text"
"""Text that every model can embed: it tells whether the server takes the settings of a run."""


_API_WAY_TO_CUT = "set 'truncate_prompt_tokens' to -1"
_WAY_TO_CUT = "use --truncate"
"""The server's way to have a text cut, and that of the command."""


class EmbedError(ConfigError):
    """The run cannot go on. Its text is one line for the terminal."""

    exit_code = 1


@dataclass(slots=True)
class _Faults:
    """Server errors of lines that were asked alone. Threads share it: a count that is lost delays the end a little."""

    num_in_a_row: int = 0
    good_text: str | None = None
    """A text that got its vector; None until there is one."""


@dataclass(frozen=True, slots=True)
class Described:
    """The model that embeds, as its first answer shows it."""

    name: str
    width: int
    """Number of numbers in a vector."""
    warning: str
    """Words of the server about the request; empty if it has none."""
    fingerprint: str
    """Hash of the short text's vector before its components are made smaller: another model, quantization or pooling
    gives another. A server gives the same text the same bits whatever else runs."""


@dataclass(frozen=True, slots=True)
class Embedder:
    """The server, and how it is asked."""

    http: httpx.Client
    fields: Mapping[str, Any]
    """Fields of every request beside the texts."""
    type_code: str
    """Type of the components, as of an array."""
    patience_s: float
    """Seconds for which a request is tried again while the server is busy or away."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set at the end of the run: threads then wait for the server no longer."""
    _faults: _Faults = field(default_factory=_Faults)
    _sockets: list[socket.socket] = field(default_factory=list)
    """Those of the connections to the server."""
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """End the requests in flight, so that the server computes them no longer."""
        self.stopped.set()
        with self._noting:
            connections = list(self._sockets)
        for connection in connections:
            # A close alone reaches the server only after the thread that reads has got its answer.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.http.close()

    def described(self) -> Described:
        """Embeds a short text. Raises `EmbedError` if the server does not take the settings."""
        name, vector, warning = self._short()
        whole = vector
        if "output_dtype" in self.fields:
            fields = {key: value for key, value in self.fields.items() if key != "output_dtype"}
            whole = replace(self, fields=fields, type_code="f")._short()[1]
        return Described(name, len(vector), warning, hashlib.sha256(whole.tobytes()).hexdigest())

    def _short(self) -> tuple[str, array[Any], str]:
        """(the model's name, the vector of a short text, the server's warning). Raises as `described`."""
        response = self._answer([_SHORT_TEXT])
        if response.status_code != 200:
            raise _refused(response)
        try:
            answer = response.json()
            name, vector = str(answer["model"]), self._vector(answer["data"][0])
        except (ValueError, LookupError, TypeError) as error:
            raise EmbedError(f"{self.http.base_url} gave no vector in the form of /v1/embeddings") from error
        return name, vector, response.headers.get("x-inferd-warning", "")

    def rows(self, lines: Sequence[Line]) -> list[Row]:
        """One row for each line, in order. Raises `EmbedError` if the server cannot be asked."""
        rows = {line.index: Row(line, error=line.error) for line in lines if line.error}
        good = [line for line in lines if not line.error]
        if good:
            rows |= {row.line.index: row for row in self._asked(good)}
        return [rows[line.index] for line in lines]

    def _asked(self, lines: Sequence[Line]) -> list[Row]:
        """Halves a batch that is refused, until the refused line is alone."""
        response = self._answer([line.text for line in lines])
        if response.status_code == 200:
            self._faults.num_in_a_row, self._faults.good_text = 0, lines[0].text
            vectors = sorted(response.json()["data"], key=lambda item: int(item["index"]))
            return [Row(line, self._vector(item)) for line, item in zip(lines, vectors, strict=True)]
        message, param = _error_of(response)
        is_fault = response.status_code == _SERVER_ERROR
        is_of_line = is_fault or (response.status_code in (400, 413) and param.startswith("input"))
        if not is_of_line or param == "input_type":
            raise _refused(response)
        if len(lines) == 1:
            if is_fault:
                self._count_fault(message)
            return [Row(lines[0], error=message)]
        middle = len(lines) // 2
        return self._asked(lines[:middle]) + self._asked(lines[middle:])

    def _count_fault(self, message: str) -> None:
        """Raises `EmbedError` if so many lines failed in a row that the fault is the server's. A text that got its
        vector before tells: the lines are at fault if it gets one again."""
        faults = self._faults
        faults.num_in_a_row += 1
        if faults.num_in_a_row < _MAX_FAULTS:
            return
        if faults.good_text is None or self._answer([faults.good_text]).status_code != 200:
            raise EmbedError(f"the server failed on {_MAX_FAULTS} lines in a row, each asked alone: {message}")
        faults.num_in_a_row = 0

    def _vector(self, item: Mapping[str, Any]) -> array[Any]:
        return array(self.type_code, base64.b64decode(item["embedding"]))

    def _note(self, event: str, about: Mapping[str, Any]) -> None:
        """Keep the socket of a new connection. httpx calls it at each step of a request."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._noting:
                self._sockets[:] = [known for known in self._sockets if known.fileno() >= 0]
                self._sockets.append(about["return_value"].get_extra_info("socket"))

    def _answer(self, texts: Sequence[str]) -> httpx.Response:
        """The first answer that is not "later". Raises `EmbedError` if there is none in time, or if the run ends."""
        until, wait_s = time.monotonic() + self.patience_s, 0.5
        while not self.stopped.is_set():
            try:
                response = self.http.post(
                    "/v1/embeddings",
                    json={**self.fields, "input": texts, "encoding_format": "base64"},
                    extensions={"trace": self._note},
                )
                if response.status_code not in _BUSY:
                    return response
                message = _error_of(response)[0]
                told_s = _seconds(response.headers.get("retry-after"))
            except httpx.HTTPError as error:
                message, told_s = f"no answer from {self.http.base_url} ({error})", None
            if time.monotonic() > until:
                raise EmbedError(f"gave up after {self.patience_s:g} s: {message}")
            self.stopped.wait(min(_MOST_WAIT_S, told_s if told_s is not None else wait_s * random.uniform(1, 2)))
            wait_s = min(2 * wait_s, _MOST_WAIT_S)
        raise EmbedError("the run was stopped")


def connect(base_url: str, api_key: str | None) -> httpx.Client:
    """Raises `EmbedError` for a URL that is none."""
    if not base_url.startswith(("http://", "https://")):
        raise EmbedError(f"--base-url must begin with http:// or https://, but got {base_url!r}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=base_url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)


def check_answers(http: httpx.Client) -> None:
    """Raises `EmbedError` if no server answers, or if it does not take the key."""
    try:
        # `Embedder` must know the connections that it uses, so this one is closed.
        response = http.get("/v1/models", headers={"Connection": "close"})
    except httpx.HTTPError as error:
        raise EmbedError(
            f"no server at {http.base_url} ({error}): start one with `inferd serve`, or leave --base-url out"
        ) from error
    if response.status_code != 200:
        raise _refused(response)


def _refused(response: httpx.Response) -> EmbedError:
    hint = " Give the key by --api-key or INFERD_API_KEY." if response.status_code == 401 else ""
    return EmbedError(f"the server refused: {_error_of(response)[0]}{hint}")


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """(message, parameter) of a refusal."""
    try:
        error = response.json()["error"]
        message = str(error["message"]).replace(_API_WAY_TO_CUT, _WAY_TO_CUT)
        return message[:_MAX_MESSAGE], str(error.get("param") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"HTTP {response.status_code}", ""


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
