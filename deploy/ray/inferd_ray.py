"""inferd on Ray Serve: each replica is one `inferd serve`, and a conversation stays where its prefix is cached.

    serve run --app-dir deploy/ray --working-dir deploy/ray inferd_ray:build model=smollm2 replicas=2

`Gateway` answers HTTP. It sends each request to a replica that its conversation's beginning decides, by Ray's
consistent hashing. `Server` runs one daemon on its node and passes requests on to it, headers and aborts included.
"""

# No `from __future__ import annotations`: FastAPI could not resolve them in what Ray sends to its workers.
import ctypes
import hashlib
import json
import logging
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import JSONResponse, Response, StreamingResponse

logger = logging.getLogger("ray.serve")

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_MOST_AT_ONCE = 1024
"""Requests that Ray hands to a replica at once. inferd queues and refuses requests itself, and knows better when."""
_KEY_CHARACTERS = 256
_READY = re.compile(r" at (http://\S+?)/v1 ")
_OF_ONE_CONNECTION = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "host",
    "content-length",
}
"""Headers that are not passed on, because each connection has its own."""

Head = tuple[int, list[tuple[str, str]]]
"""Status and headers of an answer."""


@serve.deployment(max_ongoing_requests=_MOST_AT_ONCE, health_check_period_s=5, graceful_shutdown_timeout_s=45)
class Server:
    """One daemon on a free port of the loopback address."""

    def __init__(self, command: str) -> None:
        """Starts the daemon and waits until its model is loaded."""
        self._daemon = subprocess.Popen(
            [*shlex.split(command), "--port", "0", "--log-format", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_end_with_parent,
        )
        self._url = self._wait_ready()
        threading.Thread(target=self._log, daemon=True).start()
        self._session: aiohttp.ClientSession | None = None

    def _wait_ready(self) -> str:
        lines = []
        assert self._daemon.stdout is not None
        for line in self._daemon.stdout:
            lines.append(line)
            found = _READY.search(line)
            if found is not None:
                return found[1]
        raise RuntimeError(f"inferd ended before it was ready: {''.join(lines[-20:])}")

    def _log(self) -> None:
        assert self._daemon.stdout is not None
        for line in self._daemon.stdout:
            logger.info(line.rstrip())

    async def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        async with self._http().get(f"{self._url}/live") as answer:
            answer.raise_for_status()

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Head | bytes]:
        """Status and headers of the daemon's answer, then its body as it comes. If Ray cancels this because the client
        has gone, the connection closes, and inferd aborts the request."""
        async with self._http().request(method, self._url + path, headers=headers, data=body) as answer:
            yield answer.status, [(k, v) for k, v in answer.headers.items() if k.lower() not in _OF_ONE_CONNECTION]
            async for chunk in answer.content.iter_any():
                yield chunk

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:  # it belongs to the event loop of the requests
            limits = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=limits, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        return self._session

    def __del__(self) -> None:
        self._daemon.send_signal(signal.SIGTERM)
        self._daemon.wait(timeout=40)


def _end_with_parent() -> None:
    """Have the kernel end the daemon if Ray kills the replica: 1 is PR_SET_PDEATHSIG of prctl(2)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


async def _body(parts: DeploymentResponseGenerator) -> AsyncIterator[bytes]:
    """The rest of an answer. A replica that dies meanwhile ends a stream with an error, as the daemon would."""
    try:
        async for chunk in parts:
            yield chunk
    except (RayError, RayServeException, aiohttp.ClientError) as error:
        logger.warning("a replica was lost while it answered: %r", error)
        yield b"data: " + json.dumps({"error": _LOST}).encode() + b"\n\n"
    finally:
        parts.cancel()


_LOST = {
    "message": "The replica that served this request was lost. Please retry.",
    "type": "server_error",
    "param": None,
    "code": "engine_error",
}


def unavailable() -> JSONResponse:
    """An answer that OpenAI's SDKs retry."""
    return JSONResponse({"error": _LOST}, 503, {"retry-after": "1"})


def conversation_key(body: bytes) -> str:
    """A key that all turns of a conversation share: of its model and what it begins with, up to the first message of
    the user. A request that has none, or an empty one, may go anywhere, which "" tells Ray."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    begin: Any = fields.get("messages") or fields.get("input") or fields.get("prompt")
    if isinstance(begin, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in begin]
        begin = begin[: roles.index("user") + 1] if "user" in roles else begin[:_KEY_CHARACTERS]
    elif isinstance(begin, str):
        begin = begin[:_KEY_CHARACTERS]
    if not begin:
        return ""
    content = json.dumps([fields.get("model"), fields.get("cache_salt"), begin])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


# Ray packs the routes when it reads `ingress`, so all that they call is defined above.
app = FastAPI(openapi_url=None)


@serve.deployment(max_ongoing_requests=_MOST_AT_ONCE, ray_actor_options={"num_cpus": 0})
@serve.ingress(app)
class Gateway:
    """Answers HTTP by the replicas of `Server`."""

    def __init__(self, server: DeploymentHandle) -> None:
        self._server = server

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def answer(self, request: Request, path: str) -> Response:
        body = await request.body()
        url = f"/{path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_ONE_CONNECTION}
        handle = self._server.options(stream=True, session_id=conversation_key(body))
        parts = handle.ask.remote(request.method, url, headers, body)
        try:
            status, answered = await anext(aiter(parts))
        except (RayError, RayServeException, aiohttp.ClientError, StopAsyncIteration) as error:
            logger.warning("no replica answered: %r", error)
            return unavailable()
        answer = StreamingResponse(_body(parts), status)
        answer.raw_headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in answered]
        return answer


def build(args: dict[str, str]) -> serve.Application:
    """The application, from the arguments of `serve run`: model, replicas, flags of inferd, its command, and the CPUs
    and GPUs of each replica."""
    command = f"{args.get('command', 'inferd')} serve {shlex.quote(args.get('model', 'tiny'))} {args.get('flags', '')}"
    server = Server.options(
        num_replicas=int(args.get("replicas", "1")),
        ray_actor_options={"num_cpus": float(args.get("cpus", "1")), "num_gpus": float(args.get("gpus", "0"))},
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    return Gateway.bind(server.bind(command))
