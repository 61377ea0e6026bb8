"""What transformers says: the ids and vectors that a server's are compared with.

To read it takes 3 s of processor time, and every process of the tests collects every file: `test_against_transformers`
alone reads this module, when it runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from inferd.engine.api.checkpoint import EMBEDDED_PATH

SHAPE = {
    "vocab_size": 3072, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _make(family: str) -> PreTrainedModel:
    """A random model whose logits are far from ties: weights three times their usual size."""
    torch.manual_seed(5)
    model: PreTrainedModel = (
        LlamaForCausalLM(LlamaConfig(**SHAPE)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    )
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.eval()


def make_checkpoint(family: str, folder: Path, num_new: int) -> dict[tuple[int, ...], list[int]]:
    """Saves a model of several files in `folder`; 32 prompts and the `num_new` ids that `generate` adds to each."""
    model = _make(family)
    model.save_pretrained(folder, max_shard_size="200KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_PATH / name, folder / name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 3072, (3 + 4 * i,), generator=generator).tolist() for i in range(32)]
    return {
        tuple(ids): model.generate(torch.tensor([ids]), max_new_tokens=num_new, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    }


def vectors(texts: Sequence[str], pooling: str) -> list[list[float]]:
    """Of the embedded model, of length one."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_PATH)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_PATH, dtype=torch.float32).eval()
    found = []
    for text in texts:
        with torch.no_grad():
            states = model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0).tolist())
    return found
