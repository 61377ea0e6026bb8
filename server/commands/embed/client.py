"""Asks a server for the vectors of a batch of lines. Waits and asks again while the server is busy or away, and finds
the lines that it refuses."""

from __future__ import annotations

import base64
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.embed.lines import Line
from inferd.server.commands.embed.output import Row

_CONNECT_TIMEOUT_S = 5.0
_MOST_WAIT_S = 30.0
_BUSY = (408, 425, 429, 502, 503, 504)
"""Statuses of a request that may succeed later."""
_MAX_MESSAGE = 500


class EmbedError(ConfigError):
    """The run cannot go on. Its text is one line for the terminal."""

    exit_code = 1


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
            vectors = sorted(response.json()["data"], key=lambda item: int(item["index"]))
            return [Row(line, self._vector(item)) for line, item in zip(lines, vectors, strict=True)]
        message, param = _error_of(response)
        is_of_line = response.status_code >= 500 or (response.status_code in (400, 413) and param.startswith("input"))
        if not is_of_line or param == "input_type":
            hint = " Give the key by --api-key or INFERD_API_KEY." if response.status_code == 401 else ""
            raise EmbedError(f"the server refused: {message}{hint}")
        if len(lines) == 1:
            return [Row(lines[0], error=message)]
        middle = len(lines) // 2
        return self._asked(lines[:middle]) + self._asked(lines[middle:])

    def _vector(self, item: Mapping[str, Any]) -> array[Any]:
        return array(self.type_code, base64.b64decode(item["embedding"]))

    def _answer(self, texts: Sequence[str]) -> httpx.Response:
        """The first answer that is not "later". Raises `EmbedError` if there is none in time."""
        until, wait_s = time.monotonic() + self.patience_s, 0.5
        while True:
            try:
                response = self.http.post(
                    "/v1/embeddings", json={**self.fields, "input": texts, "encoding_format": "base64"}
                )
                if response.status_code not in _BUSY:
                    return response
                message = _error_of(response)[0]
                told_s = _seconds(response.headers.get("retry-after"))
            except httpx.HTTPError as error:
                message, told_s = f"no answer from {self.http.base_url} ({error})", None
            if time.monotonic() > until:
                raise EmbedError(f"gave up after {self.patience_s:g} s: {message}")
            time.sleep(min(_MOST_WAIT_S, told_s if told_s is not None else wait_s * random.uniform(1, 2)))
            wait_s = min(2 * wait_s, _MOST_WAIT_S)


def connect(base_url: str, api_key: str | None) -> httpx.Client:
    """Raises `EmbedError` for a URL that is none."""
    if not base_url.startswith(("http://", "https://")):
        raise EmbedError(f"--base-url must begin with http:// or https://, but got {base_url!r}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=base_url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)


def first_model(http: httpx.Client) -> str:
    """The first model that the server lists. Raises `EmbedError` if no server answers."""
    try:
        response = http.get("/v1/models")
        if response.status_code != 200:
            raise EmbedError(f"the server refused: {_error_of(response)[0]}")
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise EmbedError(
            f"no server at {http.base_url} ({error}): start one with `inferd serve`, or leave --base-url out"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise EmbedError(f"{http.base_url}/v1/models lists no model; give --model") from error


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """(message, parameter) of a refusal."""
    try:
        error = response.json()["error"]
        return str(error["message"])[:_MAX_MESSAGE], str(error.get("param") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"HTTP {response.status_code}", ""


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
