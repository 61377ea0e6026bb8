"""Vectors of published encoders equal those of transformers, for real texts: the mean of all tokens, normalised.

A test of a model whose folder is not there is skipped, and says so: `make real` fetches it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.encoder_registry import describe_encoder
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.loader import load, recipe_of
from tests.conftest import ROOT
from tests.real_models.files import ENCODERS, RealEncoder

LOSSES = {(torch.float32, "none"): 1e-10, (torch.bfloat16, "none"): 3e-4, (torch.float32, "int8"): 2e-3}
"""Largest 1 - cosine of a text's vector with that of transformers in fp32."""


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda model: model.name)
def folder(request: pytest.FixtureRequest) -> Path:
    model: RealEncoder = request.param
    if not model.path.exists():
        pytest.skip(f"{model.path} is not there: make real fetches it")
    return model.path


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Paragraphs of our documentation: 1 to some 400 tokens."""
    page = (ROOT / "docs" / "design.md").read_text()
    paragraphs = [own.strip() for own in page.split("\n\n") if own.strip()]
    return ["a", *paragraphs[:40], "\n".join(paragraphs[40:46])]


@pytest.fixture(scope="module")
def ids(folder: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    return [own.ids for own in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def theirs(folder: Path, ids: list[list[int]]) -> Tensor:
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.stack([vector_of(model(torch.tensor([own])).last_hidden_state[0]) for own in ids])


def vector_of(hidden: Tensor) -> Tensor:
    return torch.nn.functional.normalize(hidden.double().mean(0), dim=0)


@pytest.mark.parametrize(("dtype", "quantization"), LOSSES)
def test_vectors_are_those_of_transformers(
    folder: Path, ids: list[list[int]], theirs: Tensor, dtype: torch.dtype, quantization: str
) -> None:
    checkpoint = Checkpoint.read(folder)
    arch = describe_encoder(checkpoint.config)
    encoder = Encoder(arch, dtype, "cpu", recipe=recipe_of(arch, quantization, dtype))
    load(encoder, checkpoint.tensors_of(arch))
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0).to(torch.int32)
    hidden = encoder.forward(torch.tensor([token for own in ids for token in own]), starts)
    ours = torch.stack([vector_of(own) for own in hidden.split([len(own) for own in ids])])
    losses = 1 - (ours * theirs).sum(1)
    most, mean = float(losses.max()), float(losses.mean())
    print(f"{dtype} {quantization}: 1 - cosine is at most {most:.1e}, on average {mean:.1e}")
    assert losses.max() < LOSSES[dtype, quantization]
    others = (ours @ theirs.T).fill_diagonal_(0.0)
    assert others.max() < 0.999, "two texts have nearly one vector"
