"""Shared by the checks of clients that rerank: their server, and the ranks that they must give."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path

from checks import KEY

NAME = "reranker"
QUERY = "what runs past the houses"
DOCUMENTS = ["The river runs past seven old houses.", "Nobody knows why.", "It turns north."]

_ROOT = Path(__file__).resolve().parents[2]
_server = subprocess.Popen(
    [os.environ["INFERD_PYTHON"], "-m", "tests.clients.reranker"],
    cwd=_ROOT,
    env={**os.environ, "PYTHONPATH": str(_ROOT)},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
"""It ends when this process does."""
assert _server.stdout is not None
URL = _server.stdout.readline().strip()


def ranks(num: int) -> list[tuple[int, float]]:
    """(index, score) of the best documents, as the server gives them without any client."""
    body = json.dumps({"model": NAME, "query": QUERY, "documents": DOCUMENTS, "top_n": num}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1/rerank", body, headers)) as answer:
        return [(result["index"], result["relevance_score"]) for result in json.load(answer)["results"]]
