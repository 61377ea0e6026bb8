"""Records what transformers computes from the same GGUF file in float32.

    python record.py MODEL.gguf MATERIAL OUTPUT [MOST [TEXT ...]]

It reads the weights, the tokenizer and the chat template by transformers' own reader, and imports nothing of inferd.
MATERIAL is the folder with text.txt and chats.txt. MOST: number of pieces of the text and of chats, by default all of
the text and 16 chats. TEXT: files that together make one long text. The packages in oracle.txt must be installed beside
transformers.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_CHATS, NUM_ANSWER_TOKENS, WINDOW = 16, 64, 512
NUM_LONG, NUM_SCORED = 8192, 512
"""Tokens of the long text, and how many of its last ones are scored."""
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
RANK = 4


@torch.inference_mode()
def record(gguf: Path, material: Path, most: int | None = None, text: str = "") -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (tests of adapters need none of it)

    loader: Any = AutoModelForCausalLM
    model: Any = loader.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)  # type: ignore[no-untyped-call]
    ids = tokenizer((material / "text.txt").read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)][:most]
    chats = []
    for question in (material / "chats.txt").read_text(encoding="utf-8").splitlines()[: most or NUM_CHATS]:
        prompt = prompt_of(tokenizer, question)
        chats.append({"prompt": prompt, "answer": greedy(model, prompt, tokenizer.eos_token_id)})
    long_ids = tokenizer(text, add_special_tokens=False)["input_ids"][:NUM_LONG]
    long = {"ids": long_ids, "nll": end_nll(model, long_ids)} if text else None
    plain = [{"ids": window, "nll": nll(model, window)} for window in windows]
    for name, (a, b) in adapter(shapes_of(model)).items():
        model.get_submodule(name).weight += b @ a
    return {
        "made with": {name: version(name) for name in ("transformers", "torch", "gguf")},
        "windows": plain,
        "chats": chats,
        "long": long,
        "adapted_nll": nll(model, windows[0]),
    }


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the matrices of all layers, by module."""
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if name.startswith("model.layers.") and name.endswith(MODULES)
    }


def adapter(shapes: dict[str, tuple[int, int]]) -> dict[str, tuple[Tensor, Tensor]]:
    """A LoRA adapter: A [rank, inputs] and B [outputs, rank] in fp32 of each matrix. Its numbers follow from the shapes
    and names, and differ in every row and column."""
    made = {}
    for index, (name, (out_size, in_size)) in enumerate(sorted(shapes.items())):
        turns = torch.arange(RANK, dtype=torch.float64) + 1 + index
        a = torch.sin(turns[:, None] * torch.arange(in_size, dtype=torch.float64)) * in_size**-0.5
        b = torch.cos(torch.arange(out_size, dtype=torch.float64)[:, None] * turns) * 0.1
        made[name] = (a.float(), b.float())
    return made


def end_nll(model: Any, ids: list[int]) -> float:
    """Mean negative log probability of the last tokens."""
    logits = model(torch.tensor([ids]), logits_to_keep=NUM_SCORED + 1).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-NUM_SCORED:])))


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    """The question by the chat template; of a model without one, with the tokens that begin every text."""
    if tokenizer.chat_template is None:
        plain: list[int] = tokenizer(question)["input_ids"]
        return plain
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompt


def nll(model: Any, ids: list[int]) -> float:
    """Mean negative log probability of the tokens after the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def greedy(model: Any, prompt: list[int], end_id: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


if __name__ == "__main__":
    joined = "".join(Path(file).read_text(encoding="utf-8") for file in sys.argv[5:])
    found = record(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[4:5]), text=joined)
    Path(sys.argv[3]).write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
