"""Open WebUI's retrieval: its own functions, and whole Open WebUI with a document, hybrid search and a reranker."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks import BASE_URL, KEY, MODEL, check, run
from checks import URL as EMBEDS_URL
from rerank_checks import DOCUMENTS, NAME, QUERY, URL, ranks

HOME = tempfile.TemporaryDirectory()
os.environ |= {
    "DATA_DIR": HOME.name,
    "FROM_INIT_PY": "true",  # as its own command sets before it imports the rest
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "OPENAI_API_BASE_URL": BASE_URL,
    "OPENAI_API_KEY": KEY,
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "ollama",
    "RAG_EMBEDDING_MODEL": MODEL,
    "RAG_EMBEDDING_PREFIX_FIELD_NAME": "input_type",
    "RAG_OLLAMA_BASE_URL": EMBEDS_URL,
    "RAG_OLLAMA_API_KEY": KEY,
    "ENABLE_RAG_HYBRID_SEARCH": "True",
    "RAG_RERANKING_ENGINE": "external",
    "RAG_RERANKING_MODEL": NAME,
    "RAG_EXTERNAL_RERANKER_URL": f"{URL}/v2/rerank",
    "RAG_EXTERNAL_RERANKER_API_KEY": KEY,
    "OFFLINE_MODE": "True",
    "ANONYMIZED_TELEMETRY": "False",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
}
from open_webui.retrieval.models.external import ExternalReranker  # noqa: E402
from open_webui.retrieval.utils import generate_openai_batch_embeddings, get_embedding_function  # noqa: E402

START_S = 200
TEXTS = ["a cat", "a dog", "What is inference?"]
LONG = "word " * 5_000


def embedded(engine: str, texts: list[str] | str, size: int = 2, prefix: str | None = None) -> Any:
    """Its vectors, in batches of `size` that it sends at the same time."""
    url = EMBEDS_URL if engine == "ollama" else BASE_URL
    return asyncio.run(get_embedding_function(engine, MODEL, None, url, KEY, size)(texts, prefix=prefix))


def are_near(one: list[float], other: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6


@check
def both_engines_give_the_same_vectors() -> None:
    plain = generate_openai_batch_embeddings(MODEL, TEXTS, BASE_URL, KEY)
    for engine in ("openai", "ollama"):
        assert all(map(are_near, embedded(engine, TEXTS), plain)), engine
        assert are_near(embedded(engine, TEXTS[0]), plain[0]), engine
    assert not are_near(plain[0], plain[1])
    assert are_near(embedded("openai", TEXTS[0], prefix="query"), plain[0]), "the model has no prompts"


@check
def a_thousand_chunks_at_once() -> None:
    """a thousand chunks, each in a request of its own, all at the same time"""
    assert len({vector[0] for vector in embedded("openai", [f"chunk {i}" for i in range(1_000)], size=1)}) > 900


@check
def the_engine_ollama_cuts_long_chunks() -> None:
    """the engine Ollama cuts long chunks; a model that generates loses their beginning"""
    assert are_near(embedded("ollama", LONG), embedded("ollama", f"head {LONG}"))


@check
def the_external_reranker_scores_pairs() -> None:
    scores = dict(ranks(3))
    for route in ("v1/rerank", "v2/rerank"):
        reranker = ExternalReranker(KEY, f"{URL}/{route}", NAME)
        assert reranker.predict([(QUERY, text) for text in DOCUMENTS]) == [scores[i] for i in range(3)]
    assert len(reranker.predict([(QUERY, LONG), (QUERY, "short")])) == 2


@contextmanager
def open_webui() -> Iterator[str]:
    """URL of the program's own server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = Path(HOME.name) / "log"
    program = Path(sys.executable).parent / "open-webui"
    with log.open("w") as out:
        process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, "PYTHONPATH": ""}, stdout=out, stderr=out, cwd=HOME.name,
        )  # fmt: skip
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                asked(f"{url}/health")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
        yield url
    finally:
        process.kill()
        process.wait()


def asked(url: str, body: Any = None, token: str = "", content: tuple[str, bytes] | None = None) -> Any:
    """`content`: the media type and the bytes of a body that is no JSON."""
    media, data = content or ("application/json", None if body is None else json.dumps(body).encode())
    headers = {"Content-Type": media, "Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=200) as answer:
        return json.load(answer)


def uploaded(url: str, token: str, text: str) -> str:
    """Name of the collection that has the chunks of a document."""
    mark = uuid.uuid4().hex
    head = 'Content-Disposition: form-data; name="file"; filename="houses.txt"\r\nContent-Type: text/plain'
    body = f"--{mark}\r\n{head}\r\n\r\n{text}\r\n--{mark}--\r\n".encode()
    content = (f"multipart/form-data; boundary={mark}", body)
    return "file-" + asked(f"{url}/api/v1/files/?process_in_background=false", token=token, content=content)["id"]


@check
def a_document_is_found_by_hybrid_search() -> None:
    """whole Open WebUI finds the chunk of a document by hybrid search, and sorts chunks by the reranker's scores"""
    with open_webui() as url:
        account = {"email": "admin@localhost", "password": "admin"}
        token = asked(f"{url}/api/v1/auths/signin", account)["token"]
        others = [f"Chapter {i}. " + "Nothing of note is told in these words. " * 22 for i in range(20)]
        name = uploaded(url, token, "\n\n".join([*others[:10], DOCUMENTS[0], *others[10:]]))
        found = asked(f"{url}/api/v1/retrieval/query/doc", {"collection_name": name, "query": QUERY}, token)
        texts, scores = found["documents"][0], found["distances"][0]
        assert any(DOCUMENTS[0] in text for text in texts), texts
        direct = ExternalReranker(KEY, f"{URL}/v2/rerank", NAME).predict([(QUERY, text) for text in texts])
        assert scores == direct and scores == sorted(scores, reverse=True)


run()
