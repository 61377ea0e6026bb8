"""Parameters of a request as plain numbers: how its tokens are drawn, and how it is scheduled. Both processes use them.

They know nothing of text, HTTP or tensors. The server builds them once, from a validated request. The engine calls
`check()` again before a number reaches a device, so that a bad value fails one request and never the engine.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from inferd.engine.api.wire.grammar_check import MAX_LARK_CHARS

MAX_SEED = 2**53 - 1
"""Largest seed that every JSON reader keeps without loss."""

MAX_LOGPROBS = 20
"""Most alternatives that a client may ask for at one position (OpenAI's bound)."""

PoolingKind = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weightedmean"]
"""The last token's state; the mean of all; the first token's; the largest of each component; the sum over the root of
the number of tokens; or the mean with the positions, counted from 1, as weights."""

PooledKind = Literal["embedding", "token_embeddings", "logits"]
"""One vector; a vector for each token, by which `how` means nothing; or the logits of the model's classifier."""


class ParamError(ValueError):
    """A value out of bounds. The message has the parameter, the rule and the value."""

    def __init__(self, param: str, value: object, rule: str) -> None:
        super().__init__(f"{param}: {rule}, but got {value!r}")
        self.param, self.value, self.rule = param, value, rule


class Pooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a prompt's final hidden states become an embedding, or what else is made of them."""

    how: PoolingKind = "last"
    num_components: int = 0
    """Number of leading components to keep; 0, or more than there are: all."""
    is_normalized: bool = True
    """Whether the kept components are scaled to length 1."""
    gives: PooledKind = "embedding"
    num_first: int = 0
    """Number of tokens of the first text of a pair; those behind it are of the second type. 0: it is one text."""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter that the engine has loaded."""

    index: int
    """Place of its weights, which another adapter gets once no request uses them."""
    digest: str
    """Hash of its content."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one choice are drawn and when it ends.

    They apply to a row of logits in this order: `grammar`, `allowed_token_ids`, `logit_bias`, repetition, presence and
    frequency penalty, `min_tokens`, `bad_words`, temperature, top-k, top-p, min-p. Last comes Gumbel-max with noise
    keyed by (seed, position, token id). Temperature 0 is argmax; ties go to the lowest id.
    """

    max_tokens: int
    """Most tokens to generate (>= 0); 0 asks for prompt logprobs, or a pooled state, alone."""
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Ids that may be drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that may not be completed."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids with which the model ends a generation (empty under `ignore_eos`)."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids with which the client wants a generation to end."""
    logprobs: int | None = None
    """None: no logprobs; 0: of the chosen token; k: of the chosen token and the k most likely ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each prompt token after the first. Such a request uses no prefix hit."""
    grammar: str = ""
    """The allowed outputs as a llguidance grammar; empty: any output. An id that ends the generation may be drawn
    whenever the grammar may end. If nothing may follow, the generation ends without such an id, whatever `min_tokens`
    says."""
    pooling: Pooling | None = None
    """If set, the request ends with a vector, and `max_tokens` must be 0."""
    adapter: Adapter | None = None
    """The adapter whose updates are added to the model's weights; None: none."""

    @property
    def needs_every_position(self) -> bool:
        """Whether every prompt position must be computed, so that a prefix hit is not possible."""
        pooling = self.pooling
        is_of_last = pooling is None or (pooling.how == "last" and pooling.gives != "token_embeddings")
        return self.prompt_logprobs is not None or not is_of_last

    def check_seed(self) -> None:
        """Raise `ParamError` for a seed out of bounds. Choices of one prompt differ in the seed only."""
        _check_int("seed", self.seed, 0, MAX_SEED)

    def check(self, vocab_size: int) -> None:
        """Raise `ParamError` for the first value out of bounds; `vocab_size` is the number of embedding rows."""
        self.check_seed()
        for name, low, high in _INT_BOUNDS:
            _check_int(name, getattr(self, name), low, high)
        for name, low_f, high_f in _FLOAT_BOUNDS:
            _check_float(name, getattr(self, name), low_f, high_f)
        if self.min_tokens > self.max_tokens:
            raise ParamError("min_tokens", self.min_tokens, f"must be at most max_tokens ({self.max_tokens})")
        for name in ("allowed_token_ids", "eos_token_ids", "stop_token_ids"):
            check_token_ids(name, getattr(self, name), vocab_size)
        check_token_ids("logit_bias", tuple(token_id for token_id, _ in self.logit_bias), vocab_size)
        for _, bias in self.logit_bias:
            _check_float("logit_bias", bias, -100.0, 100.0)
        if len(self.grammar) > MAX_LARK_CHARS:
            rule = f"must have at most {MAX_LARK_CHARS} characters"
            raise ParamError("grammar", f"{len(self.grammar)} characters", rule)
        if self.pooling is not None:
            _check_int("pooling.num_components", self.pooling.num_components, 0, None)
            _check_int("pooling.num_first", self.pooling.num_first, 0, None)
            if self.max_tokens:
                raise ParamError("max_tokens", self.max_tokens, "must be 0 if hidden states are pooled")
        for word in self.bad_words:
            if not word:
                raise ParamError("bad_words", word, "must not hold an empty word")
            check_token_ids("bad_words", word, vocab_size)


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request shares the engine with others. No field changes its tokens, only when they come."""

    arrival_s: float = 0.0
    """Time of this machine's monotonic clock at which the HTTP request arrived; 0: when the engine received it."""
    priority: int = 0
    """Lower numbers run first; ties go by arrival."""
    cache_salt: str = ""
    """Requests share prefix blocks only if they have the same salt."""
    tenant: str = ""
    """Name of the tenant. Tenants share the engine by weight, however much each of them asks for."""
    weight: float = 1.0
    """Weight of the tenant; above 0."""
    ttft_target_s: float | None = None
    """Seconds from arrival to the first token. A request that cannot make it is refused. None: no target."""
    tpot_target_s: float | None = None
    """Mean seconds per token after the first, which other requests' prompts may not delay; None: no target."""
    alone_until: int = 0
    """A replayed request that may have crashed the engine runs alone until this many positions are computed; 0: it is
    no suspect."""

    @property
    def has_target(self) -> bool:
        """Whether the request has a latency target."""
        return self.ttft_target_s is not None or self.tpot_target_s is not None

    def arrived_by(self, now: float) -> SchedulingParams:
        """A copy with `now` as the arrival, if the arrival is missing or later."""
        return self if 0.0 < self.arrival_s <= now else msgspec.structs.replace(self, arrival_s=now)

    def check(self) -> None:
        """Raise `ParamError` for a value that the scheduler cannot work with."""
        if not 0.0 < self.weight < math.inf:
            raise ParamError("weight", self.weight, "must be a number above 0")


NO_SCHEDULING = SchedulingParams()

_INT_BOUNDS: tuple[tuple[str, int, int | None], ...] = (
    ("max_tokens", 0, None),
    ("min_tokens", 0, None),
    ("top_k", 0, None),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_FLOAT_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def _check_int(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None and name in ("logprobs", "prompt_logprobs"):
        return
    if type(value) is not int or value < low or (high is not None and value > high):
        rule = f"must be a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
        raise ParamError(name, value, rule)


def _check_float(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise ParamError(name, value, f"must be a finite number from {low} to {high}")


def check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise `ParamError` for the first id that is not a row of the embedding."""
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ParamError(name, token_id, f"token ids must be from 0 to {vocab_size - 1}")
