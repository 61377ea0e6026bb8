"""Our logits beside transformers' on random checkpoints, and 64 greedy ids equal to `generate()`.

The measure is the error against transformers in fp64 on the same rounded weights. Ours may be at most `RATIO` times
that of transformers' own run in the checkpoint's dtype; with one field of the config changed it must be far above.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.checkpoints import CASES, Case, load_decoder, load_transformers
from tests.cpu.paging import Pool, Request, prompt_logits

RATIO = {torch.float32: 1.5, torch.bfloat16: 1.0, torch.float16: 0.01}
"""fp16 is computed in fp32 on a CPU, so its error is a small part of theirs."""

CHUNKS = (1, 2, 60, 37)
NUM_TOKENS = sum(CHUNKS)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.mark.parametrize("dtype", RATIO)
def test_logits_are_as_near_to_fp64_as_transformers_own(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    case.save(tmp_path, dtype)
    ids = torch.randint(0, 211, (NUM_TOKENS,))
    # A CPU computes float16 checkpoints in float32.
    chosen = torch.float32 if dtype is torch.float16 else dtype
    ours = prompt_logits(load_decoder(tmp_path, chosen), ids.tolist(), CHUNKS)
    broken = prompt_logits(load_decoder(tmp_path, chosen, case.broken), ids.tolist(), CHUNKS)
    theirs = load_transformers(tmp_path, dtype)(ids[None]).logits[0]
    exact = load_transformers(tmp_path, torch.float64)(ids[None]).logits[0]
    allowed = RATIO[dtype] * rms(theirs - exact)
    assert rms(ours - exact) < allowed
    assert rms(broken - exact) > 2 * allowed


def test_greedy_ids_equal_generate(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    prompt = torch.randint(0, 211, (19,)).tolist()
    expected = generate(load_transformers(tmp_path, torch.float32), prompt, num_tokens=64)
    decoder = load_decoder(tmp_path, torch.float32)
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


def test_a_decoder_without_qk_norm_is_far_off(tmp_path: Path) -> None:
    """The error of leaving a whole operation out, by which the ratios above are tight."""
    case = next(case for case in CASES if case.model_type == "qwen3")
    case.save(tmp_path)
    ids = torch.randint(0, 211, (NUM_TOKENS,))
    decoder = load_decoder(tmp_path, torch.float32)
    for layer in decoder._layers:
        layer._attention._q_norm = layer._attention._k_norm = None
    theirs = load_transformers(tmp_path, torch.float32)(ids[None]).logits[0]
    exact = load_transformers(tmp_path, torch.float64)(ids[None]).logits[0]
    assert rms(prompt_logits(decoder, ids.tolist(), CHUNKS) - exact) > 1000 * rms(theirs - exact)
