"""The least HTTP server around a library that has none: /v1/embeddings of texts, and /ready.

    PYTHONPATH=. python -m benchmarks.encoders.front LIBRARY FOLDER FILES PRECISION --host HOST --port PORT

It needs fastapi, uvicorn and tokenizers. Texts that wait are computed together, at most 32 of similar length, by one
thread: so each library gets what a careful user would write around it.
"""

from __future__ import annotations

import asyncio
import importlib
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.encoders.libraries import LIBRARIES, Encode

_MOST_TEXTS = 32
Waiting = tuple[list[int], "asyncio.Future[list[float]]"]


def compute(encode: Encode, waiting: queue.Queue[Waiting], loop: asyncio.AbstractEventLoop) -> None:
    while True:
        batch = [waiting.get()]
        while len(batch) < _MOST_TEXTS and not waiting.empty():
            batch.append(waiting.get())
        vectors = encode([ids for ids, _ in batch]).tolist()
        for (_, future), vector in zip(batch, vectors, strict=True):
            loop.call_soon_threadsafe(future.set_result, vector)


def main() -> None:
    library, folder, files, precision, *options = sys.argv[1:]
    fastapi, uvicorn, tokenizers = map(importlib.import_module, ("fastapi", "uvicorn", "tokenizers"))
    encode = LIBRARIES[library](Path(folder), Path(files), precision)
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    waiting: queue.Queue[Waiting] = queue.Queue()
    app = fastapi.FastAPI()

    async def embeddings(body: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        futures: list[asyncio.Future[list[float]]] = []
        for encoding in tokenizer.encode_batch(texts):
            futures.append(loop.create_future())
            waiting.put((encoding.ids, futures[-1]))
        data = [{"object": "embedding", "index": i, "embedding": await own} for i, own in enumerate(futures)]
        return fastapi.responses.JSONResponse({"object": "list", "model": "m", "data": data})

    async def begin() -> None:
        arguments = (encode, waiting, asyncio.get_running_loop())
        threading.Thread(target=compute, args=arguments, daemon=True).start()

    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"])
    app.add_api_route("/ready", lambda: {})
    app.router.on_startup.append(begin)
    host, port = (options[options.index(name) + 1] for name in ("--host", "--port"))
    uvicorn.run(app, host=host, port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
