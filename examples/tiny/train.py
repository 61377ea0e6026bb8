"""Trains the embedded model from the text in this folder, on the CPU, with one seed: `make train`.

With `--draft` it trains a draft model for the embedded one, which begins as the first quarter of its layers. This
module owns the model's shape, the optimizer and its schedule. It writes a checkpoint completely or not at all.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.tiny.batches import Batch, Batches
from examples.tiny.conversation import END, TEXT_END, render
from examples.tiny.mixture import EARLY, LATE, USUAL, Diet, Mixture
from examples.tiny.tokenizer import MAX_POSITIONS, VOCAB_SIZE, id_of, save_tokenizer, train_tokenizer
from inferd.engine.api.checkpoint import EMBEDDED_PATH

SEED = 1
BATCH_TOKENS = 2048
NUM_HELD_OUT_BATCHES = 6
EVERY = 100  # steps between two checkpoints
WARMUP_STEPS = 60


@dataclass(frozen=True, slots=True)
class Stage:
    num_steps: int
    matrix_rate: float  # Muon's rate, for the matrices of the layers.
    embedding_rate: float  # Adam's rate, for the embedding and the norms.
    fall_from: float  # Share of the steps after which the rates fall linearly to a hundredth.
    first_diet: Diet
    num_first: int  # Steps with the first diet.
    diet: Diet

    def rise_and_fall(self, step: int) -> float:
        fall = (self.num_steps - step) / (self.num_steps * (1 - self.fall_from))
        return min((step + 1) / WARMUP_STEPS, 1.0, max(fall, 0.01))

    def diet_at(self, step: int) -> Diet:
        return self.first_diet if step < self.num_first else self.diet


# Measured: with twice the first rates the held-out loss stays at 0.4, and falls to 0.2 as soon as the rates fall.
STAGES = (
    Stage(3200, 2e-3, 1.5e-3, fall_from=0.15, first_diet=EARLY, num_first=640, diet=USUAL),
    Stage(1900, 1.2e-3, 8e-4, fall_from=0.1, first_diet=LATE, num_first=0, diet=LATE),
)
DRAFT_STAGES = (Stage(2400, 2e-3, 1.2e-3, fall_from=0.15, first_diet=USUAL, num_first=0, diet=USUAL),)
NUM_DRAFT_LAYERS = 1


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    ends = [id_of(tokenizer, END), id_of(tokenizer, TEXT_END)]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)  # each layer starts as the identity
    return model


def make_draft_model() -> LlamaForCausalLM:
    """The first layers of the embedded model between its embedding and its head."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(EMBEDDED_PATH, dtype=torch.float32).train()
    model.model.layers = model.model.layers[:NUM_DRAFT_LAYERS]
    model.config.num_hidden_layers = NUM_DRAFT_LAYERS
    return model


def loss_of(body: Callable[..., Any], model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats over the batch's targets; the vocabulary is scored at those positions only."""
    ids, targets = batch
    is_target = targets != -100
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[is_target]
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float(), targets[is_target])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, batches: list[Batch]) -> float:
    model.train(False)
    loss = sum(loss_of(model.model, model, batch).item() for batch in batches) / len(batches)
    model.train()
    return loss


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [muon, adam]


_NOT_OF_A_LLAMA = (
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "is_encoder_decoder",
    "return_dict",
)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint into `folder`. A file takes its name only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as name:
        draft = Path(name)
        weights = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
        del weights["lm_head.weight"]  # tied to the embedding
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        config = {key: value for key, value in config.items() if value is not None and key not in _NOT_OF_A_LLAMA}
        config["bos_token_id"] = None  # if absent, it would become Llama's own default
        generation = {
            "do_sample": True,
            "eos_token_id": [id_of(tokenizer, END), id_of(tokenizer, TEXT_END)],
            "pad_token_id": id_of(tokenizer, TEXT_END),
            "temperature": 0.6,
            "top_p": 0.9,
        }
        (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (draft / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        save_tokenizer(tokenizer, draft)
        for path in sorted(draft.iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def check_template(tokenizer_dir: Path, mixture: Mixture, num_samples: int = 300) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_dir)
    for _ in range(num_samples):
        conversation = mixture.draw()
        messages = [message.schema() for message in conversation.messages]
        tools = [tool.schema() for tool in conversation.tools] or None
        served = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        trained = "".join(f"{header}{body}\n" for header, body in render(conversation))
        assert served == trained, f"the template and `render` differ:\n{served}\n---\n{trained}"


def train(folder: Path, first_stage: int, stages: Sequence[Stage], *, is_draft: bool, is_compiled: bool) -> None:
    """Run `stages` from `first_stage` on. If that is not 0, begin with the checkpoint in `folder`. A draft model has
    the tokenizer of the embedded model."""
    torch.manual_seed(SEED)
    if is_draft and first_stage == 0:
        tokenizer = Tokenizer.from_file(str(EMBEDDED_PATH / "tokenizer.json"))
        model = make_draft_model()
    elif first_stage == 0:
        tokenizer = train_tokenizer(Mixture(SEED, held_out=False).all_texts())
        model = make_model(tokenizer)
        save(model, tokenizer, folder)
        check_template(folder, Mixture(SEED + 1, held_out=False))
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    held_out_batches = Batches(Mixture(SEED, held_out=True), tokenizer, BATCH_TOKENS, SEED)
    held_out = [held_out_batches.draw() for _ in range(NUM_HELD_OUT_BATCHES)]
    for index in range(first_stage, len(stages)):
        print(f"stage {index + 1}, held-out loss before {held_out_loss(model, held_out):.3f}", flush=True)
        batches = Batches(Mixture(SEED + index, held_out=False), tokenizer, BATCH_TOKENS, SEED + index)
        train_stage(model, stages[index], batches, held_out, partial(save, model, tokenizer, folder), is_compiled)


def train_stage(
    model: LlamaForCausalLM,
    stage: Stage,
    batches: Batches,
    held_out: list[Batch],
    save_now: Callable[[], None],
    is_compiled: bool,
) -> None:
    body = torch.compile(model.model, dynamic=False) if is_compiled else model.model
    optimizers = make_optimizers(model)
    num_targets, started = 0, time.monotonic()
    with _progress() as progress:
        bar = progress.add_task("training", total=stage.num_steps, loss=math.nan)
        for step in range(stage.num_steps):
            batch = batches.draw(stage.diet_at(step))
            loss = loss_of(body, model, batch)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, (stage.matrix_rate, stage.embedding_rate), strict=True):
                optimizer.param_groups[0]["lr"] = rate * stage.rise_and_fall(step)
                optimizer.step()
                optimizer.zero_grad()
            num_targets += int((batch[1] != -100).sum())
            progress.update(bar, advance=1, loss=loss.item())
            if (step + 1) % EVERY == 0 or step + 1 == stage.num_steps:
                save_now()
                minutes = (time.monotonic() - started) / 60
                now = held_out_loss(model, held_out)
                progress.console.print(f"step {step + 1}, held-out loss {now:.3f}, {minutes:.1f} min")
    num_tokens = stage.num_steps * BATCH_TOKENS
    print(f"{stage.num_steps} steps, {num_tokens:,} tokens, {num_targets:,} of them learned", flush=True)


def _progress() -> Progress:
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the checkpoint (default: the embedded model's)")
    parser.add_argument("--draft", action="store_true", help="train a draft model for the embedded one; needs --out")
    parser.add_argument("--stage", type=int, default=1, help="go on from the checkpoint with this stage (default: 1)")
    parser.add_argument(
        "--max-steps", type=int, metavar="N", help="end each stage after N steps, to try the script out"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="do without torch.compile, which needs a C++ compiler"
    )
    arguments = parser.parse_args()
    if arguments.draft and arguments.out is None:
        parser.error("--draft needs --out, the folder of the draft model")
    planned = DRAFT_STAGES if arguments.draft else STAGES
    stages = [
        replace(stage, num_steps=min(stage.num_steps, arguments.max_steps or stage.num_steps)) for stage in planned
    ]
    out = arguments.out or EMBEDDED_PATH
    train(out, arguments.stage - 1, stages, is_draft=arguments.draft, is_compiled=not arguments.no_compile)


if __name__ == "__main__":
    main()
