"""The files with which sentence-transformers says how a model's states become an embedding.

`modules.json` lists what follows the model: a pooling, dense layers, a normalisation. Its other files have the prompts
that texts begin with, and the longest text. `SentenceFolder` is what they say, and what of it cannot be done here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

from inferd.engine.api.checkpoint import read_json
from inferd.engine.api.errors import ModelError
from inferd.engine.api.files import read_regular
from inferd.engine.api.gguf import GgufFile
from inferd.engine.api.pinned_files import exists
from inferd.engine.api.sentence_heads import CONFIG, KINDS, NEUTRAL, SCALES, WEIGHTS, Head, UnsupportedHead, read_heads
from inferd.engine.api.wire.params import PoolingKind
from inferd.engine.arch.encoder_registry import is_encoder
from inferd.engine.arch.gguf import metadata
from inferd.engine.arch.shown import shown

MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_LENGTHS = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)  # fmt: skip
"""Names that the file with the longest text has had."""
_MAX_BYTES = 2**20
_MAX_PROMPTS = 64
_MAX_PROMPT_CHARS = 4096
_MAX_MODULES = 16
_MAX_WHOLE = 2**31 - 1
_MODES: Mapping[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Field of a pooling's config -> how it pools."""
_NEW_MODES = {
    "lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens", "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}  # fmt: skip
"""Values of `pooling_mode`, which newer files have."""

_GGUF_POOLINGS: Mapping[Any, PoolingKind] = {1: "mean", 2: "cls", 3: "last"}
"""Values of `pooling_type` in GGUF files."""


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """How a folder's model embeds texts."""

    pooling: PoolingKind = "last"
    heads: tuple[Head, ...] = ()
    """Modules that change the pooled vector before it is scaled, in order."""
    normalizes: bool = False
    """Whether vectors are scaled to length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> the text that comes before each text."""
    default_prompt: str | None = None
    """Name of the prompt of a request that names none."""
    max_tokens: int | None = None
    """Most tokens of a text that the model was made for; None: as many as it has positions."""
    num_components: int | None = None
    """Leading components that are kept by default; None: all."""
    lowercases: bool = False
    """Whether texts are written in lower case before they are tokenized."""
    unsupported: str = ""
    """Why this model's vectors cannot be computed here; empty if they can."""

    @classmethod
    def read(cls, path: Path, gguf: GgufFile | None = None) -> Self | None:
        """None if the folder is not of sentence-transformers, or the GGUF file does not say how it pools. Raises
        `ModelError` for files that cannot be read or are wrong."""
        if gguf is not None:
            return cls._of_gguf(gguf)
        if not exists(path / MODULES):
            return None
        modules = modules_of(path / MODULES)
        settings = read_json(path / _SETTINGS, _MAX_BYTES) if exists(path / _SETTINGS) else {}
        lengths = next((read_json(path / name, _MAX_BYTES) for name in _LENGTHS if exists(path / name)), {})
        pooling, heads, normalizes, unsupported = _computed(path, modules)
        modalities = lengths.get("modality_config")
        if isinstance(modalities, dict) and "message" in modalities:
            unsupported = unsupported or "its texts are written by a chat template (message in modality_config)"
        prompts = _prompts(settings)
        default = settings.get("default_prompt_name")
        if default is not None and not (isinstance(default, str) and default in prompts):
            rule = "default_prompt_name must be the name of one of its prompts"
            raise ModelError(f"{path / _SETTINGS}: {rule}, but is {shown(default)}")
        return cls(
            pooling=pooling,
            heads=heads,
            normalizes=normalizes,
            prompts=prompts,
            default_prompt=default,
            max_tokens=_whole(lengths, "max_seq_length"),
            num_components=_whole(settings, "truncate_dim"),
            lowercases=lengths.get("do_lower_case") is True,
            unsupported=unsupported,
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of the heads' weights in fp32."""
        return sum(4 * prod(shape) for head in self.heads for shape in head.tensors.values())

    @property
    def num_outputs(self) -> int | None:
        """Number of components of a vector behind the heads; None: as many as the model's hidden states have."""
        return self.heads[-1].num_outputs if self.heads else None

    @classmethod
    def _of_gguf(cls, gguf: GgufFile) -> Self | None:
        """Vectors have length 1, as llama.cpp gives them by default."""
        match gguf.pooling_type:
            case None | 0:
                return None
            case metadata.RANKS:
                return cls(unsupported="the file is a reranker: its pooling_type is 4, which gives scores")
            case int(kind) if kind in _GGUF_POOLINGS:
                return cls(_GGUF_POOLINGS[kind], normalizes=True)
            case kind:
                raise ModelError(f"{gguf.path}: pooling_type must be a whole number from 0 to 4, but is {shown(kind)}")


PLAIN = SentenceFolder(normalizes=True)
"""A model whose folder says nothing: the last token's state, of length 1, as OpenAI's vectors are."""
PLAIN_ENCODER = SentenceFolder(pooling="mean", normalizes=True)
"""An encoder whose folder says nothing: the mean, as sentence-transformers takes it, of length 1."""


def sentences_of(path: Path, config: Mapping[str, Any], gguf: GgufFile | None = None) -> SentenceFolder:
    """How the model at `path` embeds; `config`: its config.json, `gguf`: the file's content if it is one. Raises
    `ModelError` as `SentenceFolder.read` does."""
    return SentenceFolder.read(path, gguf) or (PLAIN_ENCODER if is_encoder(config) else PLAIN)


def sentence_files(path: Path) -> list[Path]:
    """The files that may say how a folder's model embeds, and the weights of its heads. Raises `ModelError` if
    modules.json cannot be read or is wrong."""
    if not exists(path / MODULES):
        return []
    own = [path / folder / name for kind, folder in modules_of(path / MODULES) for name in _FILES_OF.get(kind, ())]
    return [path / MODULES, path / _SETTINGS, *(path / name for name in _LENGTHS), *own]


_FILES_OF = dict.fromkeys(("Pooling", "LogitScore", SCALES), (CONFIG,)) | dict.fromkeys(KINDS, (CONFIG, WEIGHTS))
"""Class of a module -> its files that are read."""


def modules_of(file: Path) -> list[tuple[str, str]]:
    """(class, folder) of each module, in order."""
    try:
        listed: Any = json.loads(read_regular(file, _MAX_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_MODULES:
        raise ModelError(f"{file} must be a list of 1 to {_MAX_MODULES} modules, but is {shown(listed)}")
    found: list[tuple[str, str]] = []
    for module in listed:
        match module:
            case {"type": str(kind), "path": str(folder)} if ".." not in folder and not folder.startswith("/"):
                found.append((kind.rpartition(".")[2], folder))
            case _:
                raise ModelError(f"{file}: a module must have a type and a folder inside this one, not {shown(module)}")
    return found


def _computed(path: Path, modules: Sequence[tuple[str, str]]) -> tuple[PoolingKind, tuple[Head, ...], bool, str]:
    """(the pooling, the heads, whether vectors have length 1, why they cannot be computed here)."""
    try:
        _check_order([kind for kind, _ in modules])
        pooling, size = _pooling(path / modules[1][1] / CONFIG)
        heads, normalizes = read_heads(path, modules[2:])
    except UnsupportedHead as error:
        return "last", (), any(kind == SCALES for kind, _ in modules), str(error)
    for head in heads:
        if size is not None and head.num_inputs != size:
            raise ModelError(f"{path / head.folder}: it takes {head.num_inputs} components, but gets {size}")
        size = head.num_outputs
    return pooling, heads, normalizes, ""


def _check_order(kinds: Sequence[str]) -> None:
    """Raises `UnsupportedHead` for other modules than Transformer, Pooling and heads, or another order."""
    if "Pooling" not in kinds and "Dense" in kinds:
        why = "its modules have no Pooling: it gives a vector for each token through a Dense, as ColBERT does"
        raise UnsupportedHead(f"{why}, which inferd does not compute")
    others = sorted({kind for kind in kinds if kind not in ("Transformer", "Pooling", SCALES, *KINDS, *NEUTRAL)})
    if others:
        raise UnsupportedHead(f"modules.json has {', '.join(others)}, which inferd does not compute")
    if list(kinds[:2]) != ["Transformer", "Pooling"] or kinds.count("Pooling") != 1:
        raise UnsupportedHead(f"modules.json must begin with Transformer and Pooling, but has {', '.join(kinds)}")


def _pooling(file: Path) -> tuple[PoolingKind, int | None]:
    """(the pooling, number of components if the file says it). Raises `UnsupportedHead`."""
    config = read_json(file, _MAX_BYTES)
    named = config.get("pooling_mode")
    modes = [mode for mode in _MODES if config.get(mode) is True]
    if not modes and isinstance(named, str):
        modes = [_NEW_MODES.get(named, named)]
    how = _MODES.get(modes[0]) if len(modes) == 1 else None
    if how is None:
        named = " and ".join(modes) or ("none" if named is None else shown(named))
        raise UnsupportedHead(f"its pooling is {named}, which inferd does not compute")
    if how != "last" and config.get("include_prompt") is False:
        raise UnsupportedHead(f"its pooling, {how}, leaves the prompt out, which inferd does not compute")
    return how, _whole(config, "embedding_dimension") or _whole(config, "word_embedding_dimension")


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    prompts = settings.get("prompts") or {}
    is_right = isinstance(prompts, dict) and len(prompts) <= _MAX_PROMPTS
    if not is_right or not all(isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARS for text in prompts.values()):
        raise ModelError(
            f"{_SETTINGS}: prompts must be at most {_MAX_PROMPTS} texts by name, of at most {_MAX_PROMPT_CHARS} "
            f"characters each, but is {shown(prompts)}"
        )
    return dict(prompts)


def _whole(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if value is None or (type(value) is int and 0 < value <= _MAX_WHOLE):
        return value
    raise ModelError(f"{name} must be a whole number from 1 to {_MAX_WHOLE}, but is {shown(value)}")
