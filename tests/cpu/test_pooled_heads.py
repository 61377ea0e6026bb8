"""The heads behind a pooling equal torch's modules, and those of sentence-transformers. A row's bits are its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inferd.engine.api.errors import ModelError
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.models.pooled_heads import PooledHeads
from inferd.engine.quant.checkpoints.reader import CheckpointError
from tests.cpu.sentence_modules import Module, Residual, Unit, write_modules

HIDDEN = 48


def dense(num_inputs: int, num_outputs: int, activation: nn.Module, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, num_outputs, bias=bias), activation)


def norm(size: int) -> nn.LayerNorm:
    made = nn.LayerNorm(size)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def two_dense() -> list[nn.Sequential | nn.LayerNorm]:
    """As EmbeddingGemma has them."""
    return [dense(HIDDEN, 192, nn.Identity(), bias=False), dense(192, HIDDEN, nn.Identity(), bias=False)]


CASES: dict[str, list[nn.Module]] = {
    "two without bias": two_dense(),
    "tanh": [dense(HIDDEN, 31, nn.Tanh())],
    "norm and relu": [norm(HIDDEN), dense(HIDDEN, 7, nn.ReLU()), norm(7)],
    "gelu": [dense(HIDDEN, 16, nn.GELU())],
    "residuals": [
        Residual(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()),
        Residual(nn.Linear(HIDDEN, 12, bias=False), nn.Identity()),
    ],
    "scaled between, dropouts": [nn.Dropout(0.5), Unit(), dense(HIDDEN, 16, nn.Tanh()), nn.Dropout(0.5)],
}


def loaded(path: Path, modules: Sequence[Any]) -> PooledHeads:
    listed: list[Module] = ["mean", *modules, "Normalize"]
    write_modules(path, listed)
    found = SentenceFolder.read(path)
    assert found is not None and not found.unsupported and found.normalizes
    assert len(found.heads) == sum(not isinstance(module, nn.Dropout) for module in modules)
    return PooledHeads.of(path, found, HIDDEN, "cpu")


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_heads_equal_torchs_modules(name: str, tmp_path: Path) -> None:
    modules, x = [module.eval() for module in CASES[name]], torch.randn(9, HIDDEN)
    heads = loaded(tmp_path, modules)
    exact: Tensor = nn.Sequential(*modules).double()(x.double())
    nn.Sequential(*modules).float()
    ours = heads.apply(x.clone())
    assert ours.dtype == torch.float32 and heads.num_outputs == exact.shape[1] == ours.shape[1]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    alone = torch.cat([heads.apply(row[None].clone()) for row in x])
    assert torch.equal(alone, ours), "a row's bits depend on the other rows"
    counting = [module for module in modules if not isinstance(module, nn.Dropout)]
    assert float((nn.Sequential(*counting[:-1])(x).sum() - ours.sum()).abs()) > 1e-3, "a head less shows"
    if isinstance(counting[0], Unit):
        assert float((nn.Sequential(*counting[1:])(x) - ours).abs().max()) > 1e-3, "a scaling less shows"


@torch.inference_mode()
def test_heads_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    made = [
        theirs.Dense(HIDDEN, 20), theirs.LayerNorm(20), theirs.Dense(20, 20, use_residual=True), theirs.Normalize(),
        theirs.Dense(20, 5, activation_function=nn.Identity(), use_residual=True),
    ]  # fmt: skip
    listed = [dense(HIDDEN, 20, nn.Tanh()), norm(20), dense(20, 20, nn.Tanh()), Unit(), dense(20, 5, nn.Identity())]
    write_modules(tmp_path, ["mean", *listed])
    for number, module in enumerate(made, start=2):
        module.save(str(tmp_path / f"{number}_{type(module).__name__}"))
    found = SentenceFolder.read(tmp_path)
    assert found is not None and found.num_outputs == 5
    x = torch.randn(6, HIDDEN)
    features = {"sentence_embedding": x}
    for module in made:
        features = module(features)
    ours = PooledHeads.of(tmp_path, found, HIDDEN, "cpu").apply(x.clone())
    torch.testing.assert_close(ours, features["sentence_embedding"], rtol=1e-5, atol=1e-6)


def test_heads_of_another_size_and_of_no_numbers_are_refused(tmp_path: Path) -> None:
    modules = two_dense()
    loaded(tmp_path, modules)
    found = SentenceFolder.read(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match=r"2_Dense takes vectors of 48 components, but .* 64"):
        PooledHeads.of(tmp_path, found, 64, "cpu")
    modules[1] = dense(192, HIDDEN, nn.Identity(), bias=False)
    modules[1][0].weight.data[3, 4] = torch.nan
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"linear\.weight must hold finite numbers"):
        loaded(tmp_path / "other", modules)


def test_weights_that_contradict_their_config_are_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, ["mean", dense(HIDDEN, 20, nn.Tanh())])
    config = tmp_path / "2_Dense" / "config.json"
    config.write_text(config.read_text().replace("20", "21"))
    with pytest.raises(ModelError, match=r"contradict config\.json"):
        SentenceFolder.read(tmp_path)
