"""Encoders behind the whole server: vectors of transformers, a killed engine, and a chat model beside them.

The tests are not among the end-to-end tests, because those processes need not import transformers.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.e2e.conftest import Daemon, start

IS_RECORDED = False

__all__ = ["start"]

TEXTS = ["a cat", "", "What is inference?", "The moon is far away. " * 20, "caf\u00e9 \U0001f600"]
SHAPE: dict[str, Any] = {
    "vocab_size": 3072, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
NUM_BULK = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with the embedded model's tokenizer."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(5)
    model = BertModel(BertConfig(**SHAPE), add_pooling_layer=False)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_PATH / name, path / name)
    return path


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    served = Daemon(str(folder), "--served-model-name", "m", may_fork=True)
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop(signal.SIGKILL)


def mean_of(folder: Path, texts: Sequence[str]) -> list[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0] for text in texts]
    return [torch.nn.functional.normalize(own.double().mean(0), dim=0) for own in states]


def vectors(client: openai.OpenAI, texts: Sequence[str]) -> list[Tensor]:
    answer = client.embeddings.create(model="m", input=list(texts))
    return [torch.tensor(item.embedding, dtype=torch.float64) for item in answer.data]


def test_vectors_are_those_of_transformers(daemon: Daemon, folder: Path) -> None:
    texts = [text for text in TEXTS if text]
    for ours, theirs in zip(vectors(daemon.client(), texts), mean_of(folder, texts), strict=True):
        assert 1 - float(ours @ theirs) < 1e-7


def test_an_encoder_asked_to_chat_says_what_it_does(daemon: Daemon) -> None:
    client = daemon.client()
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.completions.create(model="m", prompt="a")
    with pytest.raises(openai.BadRequestError, match="512 tokens"):
        client.embeddings.create(model="m", input="a " * 2000)
    assert "encoder, texts of up to 512 tokens, pooling mean, 64 components" in daemon.output
    assert "chat in a browser" not in daemon.output


def test_a_killed_engine_is_a_pause(daemon: Daemon) -> None:
    """Texts that the engine had are computed again, to the same bits."""
    texts = [f"{number} " + "The moon is far away. " * 12 for number in range(NUM_BULK)]
    client, found = daemon.client(), list[list[Tensor]]()
    expected = vectors(client, texts)
    asking = threading.Thread(target=lambda: found.append(vectors(client, texts)))
    asking.start()
    while 'state="running"} 0' in (metrics := httpx.get(f"{daemon.url}/metrics").text) and asking.is_alive():
        assert 'state="running"' in metrics
    os.kill(daemon.engine_pid, signal.SIGKILL)
    asking.join(60)
    assert len(found) == 1 and all(map(torch.equal, found[0], expected))


def test_an_encoder_beside_a_chat_model_leaves_it_the_cores(start: Callable[..., Daemon], folder: Path) -> None:
    daemon = start("tiny", f"m={folder}")
    client = daemon.client()
    assert len(vectors(client, ["a", "b"])) == 2
    unnamed = httpx.post(f"{daemon.url}/v1/embeddings", json={"input": "a"}).json()
    assert unnamed["model"] == "m", "it is made to embed, and the first model is not"
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=4)
    assert answer.choices[0].message.content
    each = [max(os.getpriority(os.PRIO_PROCESS, one) for one in threads_of(pid)) for pid in daemon.engine_pids]
    assert sorted(each) == [0, 10]


def threads_of(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
