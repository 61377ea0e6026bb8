"""The files that say how a model judges texts: the names of its labels, and what is made of its logits.

config.json has the labels. sentence-transformers adds an activation, a prompt, and for a generating model the two
tokens whose logits it compares. `ClassifierFolder` is what they say, and what of it cannot be done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from inferd.engine.api.checkpoint import read_json
from inferd.engine.api.errors import ModelError
from inferd.engine.api.pinned_files import exists
from inferd.engine.api.sentence_folder import MODULES, modules_of
from inferd.engine.arch.encoder_base import MAX_LABELS
from inferd.engine.arch.shown import shown

Activation = Literal["sigmoid", "softmax", "identity"]

_SETTINGS, _LENGTHS = "config_sentence_transformers.json", "sentence_bert_config.json"
_MAX_BYTES = 2**20
_UNBOUNDED = 2**30
_MAX_CHARS = 4096
"""Most characters of a prompt, and of a label's name."""
_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
"""torch's class -> the activation."""


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A generating model's score: the logit of one token less that of another, at the answer's first token."""

    true_id: int
    false_id: int


@dataclass(frozen=True, slots=True)
class ClassifierFolder:
    """How a folder's model judges texts."""

    labels: Mapping[int, str] = field(default_factory=dict)
    """Index of a logit -> the label's name. Some may be missing."""
    activation: Activation | None = None
    """Activation that the folder names for its logits; None: it names none."""
    problem: str = ""
    """`problem_type` of config.json: `single_label_classification`, `multi_label_classification`, `regression`, or
    nothing."""
    tokens: TokenPair | None = None
    """The tokens that a generating model's score compares; None: its answers are no scores."""
    compares_labels: bool = False
    """Whether the first of two labels less the second is a pair's score: they are the logits of such tokens."""
    prompt: str = ""
    """Text that comes before each first text of a pair; for a chat template, its system message."""
    max_tokens: int | None = None
    """Most tokens of a pair that the model was made for; None: as many as it has positions."""
    lowercases: bool = False
    """Whether texts are written in lower case before they are tokenized."""
    unsupported: str = ""
    """Why this model's scores cannot be computed here; empty if they can."""

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """`config`: the content of config.json. Raises `ModelError` for files that cannot be read or are wrong."""
        labels, problem = _labels(config), str(config.get("problem_type") or "")[:_MAX_CHARS]
        if not path.is_dir():
            return cls(labels, problem=problem, compares_labels=config.get("compares_labels") is True)
        settings = _read(path / _SETTINGS)
        modules = modules_of(path / MODULES) if exists(path / MODULES) else []
        activation, unsupported = _activation(config, settings)
        tokens = None
        for kind, folder in modules:
            if kind == "LogitScore":
                tokens, unsupported = _tokens(read_json(path / folder / "config.json", _MAX_BYTES), unsupported)
        # The prompt and the length of a model that embeds texts are not about pairs.
        is_embedding = any(kind == "Pooling" for kind, _ in modules)
        lengths = {} if is_embedding else _read(path / _LENGTHS)
        return cls(
            labels,
            activation,
            problem,
            tokens,
            prompt="" if is_embedding else _prompt(settings),
            max_tokens=_whole(lengths, "max_seq_length"),
            lowercases=lengths.get("do_lower_case") is True,
            unsupported=unsupported,
        )

    def bounded(self, longest: object) -> Self:
        """`longest`: most tokens of a text by the tokenizer's files, which count if no other file says so. Some say a
        number beyond all lengths."""
        if self.max_tokens is None and isinstance(longest, int) and 0 < longest < _UNBOUNDED:
            return replace(self, max_tokens=longest)
        return self

    def scores_by_labels(self, num_labels: int) -> bool:
        """Whether the labels give a pair one score: a single label does, and so do two that are compared."""
        return num_labels == 1 or self.compares_labels

    def gives_scores(self, num_labels: int) -> bool:
        """Whether a pair gets one score. A classifier of several labels gives classes and no score."""
        return self.tokens is not None or self.scores_by_labels(num_labels)

    def activation_for(self, num_labels: int, *, wanted: bool | None = None) -> Activation:
        """The activation behind the logits. `wanted` true: to probabilities, even if the folder says none; false: none.
        It counts only if `unsupported_for` has no reason against it."""
        if wanted is False:
            return "identity"
        if self.activation is not None and not (wanted and self.activation == "identity"):
            return self.activation
        if num_labels == 1:
            return "sigmoid"
        if self.problem == "regression" and not wanted:
            return "identity"
        return "sigmoid" if self.problem == "multi_label_classification" else "softmax"

    def unsupported_for(self, num_labels: int, *, wanted: bool | None = None) -> str:
        """Why the numbers behind the activation cannot be given; empty if they can. `wanted` as for
        `activation_for`."""
        if wanted is False:
            return ""
        if num_labels == 1 and self.activation == "softmax":
            return "its activation is Softmax, which makes 1 of every logit of a model with one label"
        return self.unsupported if wanted is None else ""

    def label(self, index: int) -> str:
        """The name of a label, or the one that transformers gives it."""
        return self.labels.get(index, f"LABEL_{index}")

    def label_bytes(self, num_labels: int) -> int:
        """Bytes of the names of all labels in UTF-8."""
        return sum(len(self.label(i).encode("utf-8", "replace")) for i in range(num_labels))


NO_JUDGE = ClassifierFolder()
"""A model whose folder says nothing."""


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, _MAX_BYTES) if exists(file) else {}


def _labels(config: Mapping[str, Any]) -> dict[int, str]:
    given = config.get("id2label") or ({"0": "LABEL_0"} if config.get("num_labels") == 1 else {})
    if not isinstance(given, dict) or len(given) > MAX_LABELS:
        raise ModelError(f"config.json: id2label must be at most {MAX_LABELS} names by number, but is {shown(given)}")
    labels: dict[int, str] = {}
    for key, name in given.items():
        index = str(key)
        if not (index.isascii() and index.isdigit() and len(index) < 10 and len(str(name)) <= _MAX_CHARS):
            raise ModelError(f"config.json: id2label must have names by number, but has {shown(key)}: {shown(name)}")
        labels[int(index)] = str(name)
    return labels


def _activation(config: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Activation | None, str]:
    """(the activation, why the scores cannot be computed here). Newer files have it beside config.json, older ones in
    it."""
    own = config.get("sentence_transformers")
    named = (own if isinstance(own, dict) else {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function") or settings.get("activation_fn")
    if named is None:
        return None, ""
    found = _ACTIVATIONS.get(str(named).rpartition(".")[2])
    return found, "" if found else f"its activation is {shown(named)}, which inferd does not compute"


def _tokens(config: Mapping[str, Any], unsupported: str) -> tuple[TokenPair | None, str]:
    true_id, false_id = (_token_id(config, name) for name in ("true_token_id", "false_token_id"))
    if true_id is None or false_id is None:
        return None, unsupported or "its score is the logit of one token alone, which inferd does not give"
    return TokenPair(true_id, false_id), unsupported


def _token_id(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is None or (type(value) is int and 0 <= value < 2**31):
        return value
    raise ModelError(f"LogitScore: {name} must be a token id, but is {shown(value)}")


def _prompt(settings: Mapping[str, Any]) -> str:
    prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if name is None:
        return ""
    text = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        rule = f"default_prompt_name must name a prompt of at most {_MAX_CHARS} characters"
        raise ModelError(f"{_SETTINGS}: {rule}, but is {shown(name)}")
    return text


def _whole(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if value is None or (type(value) is int and value > 0):
        return value
    raise ModelError(f"{_LENGTHS}: {name} must be a whole number above 0, but is {shown(value)}")
