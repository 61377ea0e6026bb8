"""Compares our logits with transformers' on random checkpoints, and 64 greedy ids with those of `generate()`.

The measure is the error against transformers in fp64 on the same rounded weights. Ours may be at most `RATIO` times the
error of transformers' own run in the checkpoint's dtype. With one field of the config changed, it must be far above.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.cases import CASES, HYBRIDS
from tests.cpu.checkpoints import Case, load_decoder, load_transformers
from tests.cpu.paging import Pool, Request, prompt_logits

RATIO = {torch.float32: 1.5, torch.bfloat16: 1.0, torch.float16: 0.01}
"""fp16 is computed in fp32 on a CPU, so its error is a small part of theirs."""

CHUNKS = (1, 2, 60, 37)
NUM_TOKENS = sum(CHUNKS)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.fixture(params=(*CASES, *HYBRIDS), ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.mark.sampled(keep=36)
@pytest.mark.parametrize("dtype", RATIO)
def test_logits_are_as_near_to_fp64_as_transformers_own(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    case.save(tmp_path, dtype)
    ids = torch.randint(0, 211, (NUM_TOKENS,))
    # A CPU computes float16 checkpoints in float32.
    chosen = torch.float32 if dtype is torch.float16 else dtype
    ours = prompt_logits(load_decoder(tmp_path, chosen, {}, case.max_positions), ids.tolist(), CHUNKS)
    broken = prompt_logits(load_decoder(tmp_path, chosen, case.broken, case.max_positions), ids.tolist(), CHUNKS)
    theirs = load_transformers(tmp_path, dtype)(ids[None]).logits[0]
    exact = load_transformers(tmp_path, torch.float64)(ids[None]).logits[0]
    allowed = RATIO[dtype] * rms(theirs - exact)
    assert rms(ours - exact) < allowed
    assert rms(broken - exact) > 2 * allowed


@pytest.mark.sampled(keep=16)
def test_logits_keep_the_sums_of_the_head(case: Case, tmp_path: Path) -> None:
    """Equal to transformers if its head is computed in fp32 from hidden states in bf16. Divided and capped, too."""
    case.save(tmp_path, torch.bfloat16)
    model = load_transformers(tmp_path, torch.bfloat16)
    hidden: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: (hidden.append(args[0][0]), (args[0].float(),))[1])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.float())
    theirs = model(torch.randint(0, 211, (1, NUM_TOKENS))).logits[0]
    ours = load_decoder(tmp_path, torch.bfloat16, {}, case.max_positions).logits(hidden[0])
    allowed = 8e-6 * rms(theirs)
    assert theirs.dtype == torch.float32 and rms(ours - theirs) < allowed
    assert rms(ours.bfloat16() - theirs) > 50 * allowed


@pytest.mark.sampled(keep=10)
def test_greedy_ids_equal_generate(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    prompt = torch.randint(0, 211, (19,)).tolist()
    expected = generate(load_transformers(tmp_path, torch.float32), prompt, num_tokens=64)
    decoder = load_decoder(tmp_path, torch.float32, {}, case.max_positions)
    request, pool = Request(list(prompt)), Pool(decoder, num_blocks=8)
    hidden = pool.step([(request, len(prompt))])[0]
    for _ in range(64):
        request.token_ids.append(int(decoder.logits(hidden[-1:]).argmax()))
        hidden = pool.step([(request, 1)])[0]
    assert request.token_ids == expected
    assert len(set(expected[len(prompt) :])) > 8, "the random model repeats itself: this proves little"


def generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[int] = output[0].tolist()
    return ids


TIE = 1e-5
"""Logits nearer to each other than this, which have no order: fp32 sums of several orders differ by 1e-6."""


def continues(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether greedy decoding continues the prompt with these ids. One pass computes what `generate` does in many."""
    assert len(ids)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    below = logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    assert logits.std() > 100 * TIE
    return bool((below < TIE).all())


def test_dynamic_rope_agrees_for_sequences_as_long_as_is_served(tmp_path: Path) -> None:
    """They disagree for sequences between the original context and the served length, because one base serves all
    sequences."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    case = Case("dynamic", "llama", {"head_dim": 16, "rope_parameters": rope, "max_position_embeddings": 64})
    case.save(tmp_path)
    ids = torch.randint(0, 211, (NUM_TOKENS,))
    theirs = load_transformers(tmp_path, torch.float32)(ids[None]).logits[0]
    served = load_decoder(tmp_path, torch.float32, max_positions=NUM_TOKENS)
    assert rms(prompt_logits(served, ids.tolist(), CHUNKS) - theirs) < 1e-5
    longer = load_decoder(tmp_path, torch.float32)
    assert longer.arch.max_positions == 128
    assert rms(prompt_logits(longer, ids.tolist(), CHUNKS) - theirs) > 0.01


def test_the_embedding_multiplier_of_gemma_is_rounded_first(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.model_type == "gemma2")
    case.save(tmp_path, torch.bfloat16)
    ids = torch.arange(211)
    embedding = load_transformers(tmp_path, torch.bfloat16).model.embed_tokens
    theirs = embedding(ids)
    assert torch.equal(load_decoder(tmp_path, torch.bfloat16).embed(ids), theirs)
    unrounded = (
        load_transformers(tmp_path, torch.bfloat16).model.embed_tokens.weight * case.config["hidden_size"] ** 0.5
    )
    assert not torch.equal(unrounded, theirs)


def test_a_decoder_without_qk_norm_is_far_off(tmp_path: Path) -> None:
    """The error if a whole operation is left out, which shows that the ratios above are tight."""
    case = next(case for case in CASES if case.model_type == "qwen3")
    case.save(tmp_path)
    ids = torch.randint(0, 211, (NUM_TOKENS,))
    decoder = load_decoder(tmp_path, torch.float32)
    for layer in decoder._layers:
        layer._attention._head_norms = None
    theirs = load_transformers(tmp_path, torch.float32)(ids[None]).logits[0]
    exact = load_transformers(tmp_path, torch.float64)(ids[None]).logits[0]
    assert rms(prompt_logits(decoder, ids.tolist(), CHUNKS) - exact) > 1000 * rms(theirs - exact)
