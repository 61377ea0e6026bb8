"""`inferd serve`, which records every request with its answer's status.

python tests/agents/recording_server.py RECORD ENGINE serve [flags of `inferd serve`]

ENGINE is "scripted" for the engine of `scripted_engine.py`, or "real".

RECORD gets a line of JSON for each request, when its answer ends: method, path, query, body, status, warning (the
header `x-inferd-warning`), and the answer's body if the status is an error's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.engine.api.process import engine_process
from inferd.server import cli
from inferd.server.lifecycle import serve

WARNING = b"x-inferd-warning"


class Recorder:
    """ASGI middleware before all of the server's own."""

    def __init__(self, app: ASGIApp, record: Path) -> None:
        self._app, self._record = app, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, answer, line = bytearray(), bytearray(), dict[str, Any](status=0, warning="")

        async def heard() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                headers = dict(message["headers"])
                line["warning"] = headers.get(WARNING, b"").decode("latin-1")
            elif line["status"] >= 400:
                answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, heard, told)
        finally:
            line |= {"method": scope["method"], "path": scope["path"], "query": scope["query_string"].decode()}
            line |= {"body": body.decode(errors="replace"), "answer": answer.decode(errors="replace")}
            with self._record.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def main() -> None:
    record, engine, *arguments = sys.argv[1:]
    if engine == "scripted":
        engine_process.ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("scripted_engine.py")))
    configured = serve.http_config
    serve.http_config = lambda app, *rest: configured(Recorder(app, Path(record)), *rest)
    sys.argv = ["inferd", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
