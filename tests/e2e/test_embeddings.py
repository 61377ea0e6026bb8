"""/v1/embeddings of the embedded model through OpenAI's client, while other requests generate."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import mul
from pathlib import Path
from typing import Any

import openai
import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH

from .conftest import Daemon
from .test_client import wait_idle
from .test_serve import counter

OWN = {"INFERD_WEIGHT_CACHE": "false", "INFERD_KV_MEMORY": "64MiB"}
TEXTS = ["a cat", "a dog", "What is inference?", "The moon is far away. " * 20, "caf\u00e9 \U0001f600"]


def embed(client: openai.OpenAI, texts: Any, **options: Any) -> list[list[float]]:
    answer = client.embeddings.create(model="tiny", input=texts, **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def test_both_formats_carry_the_same_numbers_in_the_order_of_the_inputs(daemon: Daemon) -> None:
    client = daemon.client()
    coded = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="base64")
    raw = [base64.b64decode(item.embedding) for item in coded.data]  # type: ignore[arg-type]
    floats = embed(client, TEXTS, encoding_format="float")
    assert raw == [struct.pack(f"<{len(vector)}f", *vector) for vector in floats]
    assert embed(client, TEXTS) == floats, "as the client asks by itself"
    assert [embed(client, text)[0] for text in TEXTS] == floats, "each alone"
    assert embed(client, TEXTS[::-1]) == floats[::-1]
    assert (
        coded.usage.prompt_tokens
        == coded.usage.total_tokens
        == sum(client.embeddings.create(model="tiny", input=text).usage.prompt_tokens for text in TEXTS)
    )


def test_leading_components_are_scaled_anew(daemon: Daemon) -> None:
    client = daemon.client()
    (whole,), (cut,) = embed(client, "a cat"), embed(client, "a cat", dimensions=16)
    length = math.hypot(*whole[:16])
    assert cut == pytest.approx([value / length for value in whole[:16]], abs=1e-7)
    (raw,) = embed(client, "a cat", dimensions=16, extra_body={"normalize": False})
    assert math.hypot(*raw) > 2.0
    with pytest.raises(openai.BadRequestError) as caught:
        embed(client, "a cat", dimensions=len(whole) + 1)
    assert (caught.value.param, caught.value.code) == ("dimensions", "integer_above_max_value")
    assert f"<= {len(whole)}" in caught.value.message


def test_company_changes_no_bit_and_nothing_is_left_behind(daemon: Daemon) -> None:
    client = daemon.client()
    alone = embed(client, TEXTS, extra_body={"pooling": "mean"})
    texts = [f"Sentence {i} about {'things ' * (i % 37)}" for i in range(400)]
    finished = r'inferd_requests_finished_total\{[^}]*finish_reason="stop"[^}]*\}'
    before, drawn = counter(daemon, finished), counter(daemon, "inferd_generation_tokens_total")

    def ask(i: int) -> list[list[float]]:
        return embed(client, [*texts, *TEXTS] if i == 0 else TEXTS, extra_body={"pooling": "mean"})[-len(TEXTS) :]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [alone] * 6
    wait_idle(daemon)
    assert counter(daemon, finished) - before == 400 + 6 * len(TEXTS)
    assert counter(daemon, "inferd_generation_tokens_total") == drawn


def test_what_is_too_long_is_refused_or_cut_as_asked(daemon: Daemon) -> None:
    client = daemon.client()
    limit = client.models.list().data[0].max_model_len  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError) as caught:
        embed(client, [[5], [5] * (limit + 1)])
    assert (caught.value.param, caught.value.code) == ("input[1]", "context_length_exceeded")
    (whole,) = embed(client, [[5] * limit])
    (cut,) = embed(client, [[7, *[5] * limit]], extra_body={"truncate_prompt_tokens": -1})
    assert cut == whole


def test_a_folder_of_sentence_transformers_says_how_its_model_embeds(
    daemon: Daemon, start: Callable[..., Daemon], tmp_path: Path
) -> None:
    """The embedded model as an embedding model is stored: without a head, with modules and prompts."""
    folder = tmp_path / "sentences"
    shutil.copytree(EMBEDDED_PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaModel"], "matryoshka_dimensions": [16]})
    )
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    served = start(str(folder), "--served-model-name", "tiny", "--dtype", "float32", "--kv-memory", "64MiB")
    as_said = {"pooling": "mean", "normalize": False}
    plain, own = daemon.client(), served.client()
    assert embed(own, TEXTS) == embed(plain, TEXTS, extra_body=as_said)
    found = embed(own, TEXTS, extra_body={"input_type": "query"})
    assert found == embed(plain, [f"Find: {text}" for text in TEXTS], extra_body=as_said)
    long = {"extra_body": {"truncate_prompt_tokens": 5}}
    assert embed(own, TEXTS[3], **long) == embed(own, "The moon is far away. " * 2, **long), "the end is cut"
    assert len(embed(own, "a cat", dimensions=16)[0]) == 16
    with pytest.raises(openai.BadRequestError) as caught:
        embed(own, "a cat", dimensions=17)
    assert (caught.value.param, caught.value.code) == ("dimensions", "invalid_value")
    with pytest.raises(openai.BadRequestError) as caught:
        own.completions.create(model="tiny", prompt="Once")
    assert caught.value.param == "model" and "/v1/embeddings" in caught.value.message


def test_the_command_starts_a_server_of_its_own(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n".join(text.strip() for text in TEXTS))
    command = [sys.executable, "-m", "inferd", "embed", str(tmp_path / "in.txt"), "--model", "tiny"]
    ended = subprocess.run(command, env={**os.environ, **OWN}, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "in.txt.embeddings.jsonl").read_text().splitlines()]
    asked = embed(daemon.client(), [text.strip() for text in TEXTS])
    found = [row["embedding"] for row in rows]
    assert [len(vector) for vector in found] == [len(vector) for vector in asked]
    assert all(sum(map(mul, one, other)) > 0.999 for one, other in zip(found, asked, strict=True))
    wrong = [*command[:-1], str(tmp_path / "none"), "--restart"]
    ended = subprocess.run(wrong, env={**os.environ, **OWN}, capture_output=True, text=True, timeout=280, check=False)
    assert (ended.returncode, "the server did not start" in ended.stderr) == (1, True), ended.stderr
