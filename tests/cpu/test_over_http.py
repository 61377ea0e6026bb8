"""Over HTTP, checkpoints saved by transformers give the ids of its own `generate`, alone and 32 at once. The embedded
model gives transformers' vectors.

The tests are not among the end-to-end tests, because those processes need not import transformers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.quality.gguf_blocks import as_bf16, as_q4_1, as_q8_0
from benchmarks.quality.gguf_files import convert
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.e2e.conftest import Daemon, start

IS_RECORDED = False

__all__ = ["start"]

NUM_NEW = 12
TEXTS = ["a cat", "a dog", "What is inference?", "The moon is far away. " * 20, "caf\u00e9 \U0001f600"]
SHAPE = {
    "vocab_size": 3072, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def make(family: str) -> PreTrainedModel:
    """A random model whose logits are far from ties: its weights are three times their usual size."""
    torch.manual_seed(5)
    model: PreTrainedModel = (
        LlamaForCausalLM(LlamaConfig(**SHAPE)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    )
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.eval()


@pytest.mark.sampled(keep=3, among="models over HTTP and their memory")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ids_are_those_of_generate(family: str, start: Callable[..., Daemon], tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_PATH / name, tmp_path / name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 3072, (3 + 4 * i,), generator=generator).tolist() for i in range(32)]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    daemon = start(str(tmp_path), "--served-model-name", "m", "--dtype", "float32")
    client = daemon.client()

    def ask(ids: list[int]) -> list[int]:
        answer = client.completions.create(
            model="m",
            prompt=ids,
            max_tokens=NUM_NEW,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

    assert ask(prompts[7]) == expected[7]
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(ask, prompts)) == expected


@pytest.mark.sampled(keep=3, among="models over HTTP and their memory")
def test_a_gguf_file_answers_as_the_checkpoint_that_it_was_made_from(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    file = convert(EMBEDDED_PATH, tmp_path / "tiny.gguf", lambda _: as_bf16)
    clients = [start(*arguments).client() for arguments in ((str(file), "--dtype", "float32"), ())]
    assert [client.models.list().data[0].id for client in clients] == ["tiny", "tiny"]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]
    }}}  # fmt: skip
    schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False
    }}}  # fmt: skip
    for fields in ({}, {"response_format": schema}, {"tools": [tool], "tool_choice": "required"}, {"logprobs": True}):
        ours, original = (
            client.chat.completions.create(  # type: ignore[call-overload]
                model="tiny",
                messages=[{"role": "user", "content": "What are you?"}],
                temperature=0,
                max_tokens=60,
                **fields,
            )
            .choices[0]
            .model_dump()
            for client in clients
        )
        for choice in (ours, original):
            for call in choice["message"]["tool_calls"] or ():
                del call["id"]
        assert ours == original


def test_a_gguf_file_is_served_from_its_blocks(start: Callable[..., Daemon], tmp_path: Path) -> None:
    file = convert(EMBEDDED_PATH, tmp_path / "tiny.gguf", lambda name: as_q8_0 if "embd" in name else as_q4_1)
    daemon = start(str(file), "--quantization", "auto", "--device", "cpu")
    assert "int4 weights" in daemon.output and "(Q4_1, Q8_0 kept)" in daemon.output
    assert "the memory plan of this model is wrong" not in daemon.output
    answer = daemon.client().completions.create(model="tiny", prompt="a", max_tokens=8, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_vectors_are_those_of_transformers(start: Callable[..., Daemon]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_PATH)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_PATH, dtype=torch.float32).eval()
    client = start().client()
    for pooling in ("last", "mean"):
        answer = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling})
        for text, item in zip(TEXTS, answer.data, strict=True):
            with torch.no_grad():
                states = model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0]
            expected = states[-1] if pooling == "last" else states.mean(dim=0)
            similarity = torch.nn.functional.cosine_similarity(torch.tensor(item.embedding), expected, dim=0)
            assert float(similarity) > 0.999, text
            assert math.isclose(math.hypot(*item.embedding), 1.0, abs_tol=1e-6)
