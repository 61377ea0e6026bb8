"""Models over HTTP beside transformers: the ids of checkpoints that it saved are those of its own `generate`, alone and
32 at once, and the embedded model's vectors are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import Daemon

NUM_NEW = 20
TEXTS = ["a cat", "a dog", "What is inference?", "The moon is far away. " * 20, "caf\u00e9 \U0001f600"]


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """What it says, read only where it is asked."""
    from . import by_transformers  # noqa: PLC0415

    return by_transformers


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ids_are_those_of_generate(
    family: str, transformers: ModuleType, start: Callable[..., Daemon], tmp_path: Path
) -> None:
    expected = transformers.make_checkpoint(family, tmp_path, NUM_NEW)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    daemon = start(str(tmp_path), "--served-model-name", "m", "--dtype", "float32")
    client = daemon.client()

    def ask(ids: tuple[int, ...]) -> list[int]:
        answer = client.completions.create(
            model="m",
            prompt=list(ids),
            max_tokens=NUM_NEW,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

    alone = list(expected)[7]
    assert ask(alone) == expected[alone]
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(ask, expected)) == list(expected.values())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(pooling: str, transformers: ModuleType, daemon: Daemon) -> None:
    answer = daemon.client().embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling})
    for item, expected in zip(answer.data, transformers.vectors(TEXTS, pooling), strict=True):
        cosine = sum(a * b for a, b in zip(item.embedding, expected, strict=True))
        assert cosine > 0.999, TEXTS[item.index]
        assert math.isclose(math.hypot(*item.embedding), 1.0, abs_tol=1e-6)
