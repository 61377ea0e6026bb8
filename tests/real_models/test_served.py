"""Servers of published models: an adapter adds its products, and speculation changes no answer to real code."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Daemon
from tests.real.adapted import NAME, SERVED_TOLERANCE, served_nll, write_adapter
from tests.real.conftest import Recording
from tests.real_models.files import RealModel

CODE = "\n".join((ROOT / "kernels" / "cpu" / "parallel.h").read_text(encoding="utf-8").splitlines()[:40])
EDIT = f"Here is a file:\n\n```cpp\n{CODE}\n```\n\nThe same file with `num_threads` renamed to `workers`:\n\n```cpp\n"


@pytest.fixture(scope="module")
def exact_server(real: RealModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    adapted = write_adapter(tmp_path_factory.mktemp("adapter"), real.path)
    exact = ("--dtype", "float32", "--quantization", "none")
    served = Daemon(str(real.path), *exact, "--kv-memory", "256MiB", "--lora", adapted)
    served.wait_ready()
    yield served
    served.stop()


def test_an_adapter_adds_its_products(exact_server: Daemon, recording: Recording) -> None:
    window = recording.windows[0]
    name = exact_server.get("/v1/models").json()["data"][0]["id"]
    assert served_nll(exact_server.url, NAME, window.ids) == pytest.approx(recording.adapted_nll, rel=SERVED_TOLERANCE)
    assert served_nll(exact_server.url, name, window.ids) == pytest.approx(window.nll, rel=SERVED_TOLERANCE)
    assert abs(recording.adapted_nll - window.nll) > 100 * SERVED_TOLERANCE * window.nll


def test_speculation_changes_no_edit_of_code(real: RealModel) -> None:
    """From the file's blocks, as served by default. An edit repeats most of what it edits."""
    answers = []
    for method in ("none", "ngram"):
        served = Daemon(str(real.path), "--kv-memory", "256MiB", "--speculative", method)
        try:
            served.wait_ready()
            body = {"prompt": EDIT, "max_tokens": 160, "temperature": 0, "stop": ["```"]}
            answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=250)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["text"])
            told = served.get("/state").json()["speculation"]
        finally:
            served.stop()
    assert answers[0] == answers[1] and len(answers[0]) > 100
    print(f"{told['accepted_draft_tokens']} of {told['draft_tokens']} guesses were right")
    assert told["accepted_draft_tokens"] > 20
