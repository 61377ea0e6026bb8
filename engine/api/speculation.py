"""Which speculation a device gets, which draft models suit a model, and for which requests nothing is guessed.

Speculation: tokens are guessed, and one step verifies several of them. It changes no token.
"""

from __future__ import annotations

from typing import Literal

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.memory.activations import RULE_PREFIX, RULE_WORDS
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.arch.description import Arch, ArchError, DraftHeadParts
from inferd.engine.arch.draft_heads import layers_read_by

Speculative = Literal["none", "ngram", "suffix", "auto", "model"]
"""Source of guessed tokens: none, what a request repeats of itself (ngram), that and recent answers (suffix), or what
suits the device (auto). With a draft model or a draft head (model), its drafts beside those of suffix."""


def check_served(arch: Arch) -> None:
    """Raises a `ConfigError` if this is no model that can be served."""
    if arch.draft_head is not None:
        raise ConfigError(
            f"{arch.architecture} is a draft head, which drafts for another model; give the model that it was trained "
            "for, and the head as --speculative"
        )


def check_draft(arch: Arch, draft: Arch, num_ranks: int) -> None:
    """Raises a `ConfigError` if `draft` cannot draft for a model shared by so many ranks."""
    what = _kind_of(draft)
    if draft.draft_head is not None:
        _check_head(arch, draft, draft.draft_head)
    if draft.vocab_size != arch.vocab_size:
        raise ConfigError(
            f"the {what} must have the vocabulary of the served model, {arch.vocab_size} tokens, but has "
            f"{draft.vocab_size}; give a {what} of the same family, or --speculative suffix"
        )
    if draft.recurrent is not None:
        raise ConfigError(
            "the draft model must have attention in all layers: recurrent layers cannot take back a draft that was "
            "rejected; give another draft model, or --speculative suffix"
        )
    # The plan counts the activations of the served model, which then suffice for both.
    for width in ("hidden_size", "intermediate_size", "qkv_size"):
        own, most = getattr(draft, width), getattr(arch, width)
        if own > most and draft.draft_head is None:
            raise ConfigError(
                f"the draft model must be no wider than the served model, but its {width} is {own} and not at most "
                f"{most}; give a smaller draft model, or --speculative suffix"
            )
    if num_ranks > 1:
        raise ConfigError(
            f"a {what} runs in one process, but tensor_parallel_size is {num_ranks}; give "
            "--tensor-parallel-size 1, or --speculative suffix"
        )


def _kind_of(draft: Arch) -> str:
    return "draft model" if draft.draft_head is None else "draft head"


def _check_head(arch: Arch, draft: Arch, head: DraftHeadParts) -> None:
    """Raises a `ConfigError` if the head was trained for another model, or cannot read hidden states of this one."""
    if not arch.is_native:
        raise ConfigError(
            f"a draft head reads hidden states of inferd's own decoder, but transformers' own code computes "
            f"{arch.architecture}; give a draft model, or --speculative suffix"
        )
    if head.state_size != arch.hidden_size:
        raise ConfigError(
            f"the draft head reads hidden states of {head.state_size} numbers, but those of the served model have "
            f"{arch.hidden_size}; give a head for this model, or --speculative suffix"
        )
    if not head.has_embedding and draft.hidden_size != arch.hidden_size:
        raise ConfigError(
            f"a draft head without an embedding must have the hidden size of the served model, {arch.hidden_size}, but "
            f"has {draft.hidden_size}; give a head for this model, or --speculative suffix"
        )
    try:
        layers_read_by(head, arch.num_layers)
    except ArchError as error:
        raise ConfigError(f"{error}; give a head for this model, or --speculative suffix") from error


def check_draft_length(arch: Arch, draft: Arch, max_model_len: int) -> None:
    """Raises a `ConfigError` if `draft` cannot draft for all positions of a sequence. The positions in a draft head's
    config are no limit: heads are trained on short texts, and draft in longer ones."""
    if draft.draft_head is None and draft.max_positions < max_model_len:
        raise ConfigError(
            f"the draft model must have at least max_model_len positions, {max_model_len}, but has "
            f"{draft.max_positions}; give --max-model-len {draft.max_positions}, or another draft model"
        )
    if len(draft.cache_groups) > 1:
        raise ConfigError(
            "all layers of the draft model must see the same positions, but some have a window; give another draft "
            "model, or --speculative suffix"
        )
    # The served model's first cache group sees most: its block tables are those of the draft model.
    for name, model in (("served model", arch), (_kind_of(draft), draft)):
        window = model.cache_groups[0].window
        if window is not None and window < max_model_len:
            raise ConfigError(
                f"no layer of the {name} sees more than {window} positions, so with a {_kind_of(draft)} max_model_len "
                f"can be at most {window}, but is {max_model_len}; give --max-model-len {window}, or --speculative "
                "suffix"
            )


def check_speculative(asked: Speculative, device: Literal["cpu", "cuda"], arch: Arch) -> None:
    """Raises a `ConfigError` if tokens of this model cannot be guessed on a device."""
    if arch.recurrent is not None and device == "cuda":
        raise ConfigError(
            f"speculative {asked} was asked for, but on a GPU recurrent layers verify no guesses; "
            "give --speculative none, or --device cpu"
        )


def speculative_on(device: Literal["cpu", "cuda"]) -> tuple[Speculative, str]:
    """Meaning of "auto" on a device, and the reason."""
    if device == "cpu":
        return "suffix", "tokens that repeat earlier ones are verified many at a time"
    return "none", "no GPU has shown yet what it gains there"


def reason_against(params: SamplingParams) -> str | None:
    """Why nothing is guessed for such a request; None if it is."""
    if params.pooling is not None or params.max_tokens < 2:
        return "it draws no more than one token"
    words = [word for word in params.bad_words if len(word) > 1]
    if len(words) > RULE_WORDS or any(len(word) > RULE_PREFIX + 1 for word in words):
        return (
            f"it has more than {RULE_WORDS} bad words of several tokens, or one of more than {RULE_PREFIX + 1} tokens"
        )
    return None
