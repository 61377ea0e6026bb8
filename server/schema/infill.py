"""The request of /infill, by which editors ask llama.cpp's server for the code at the cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo

from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.generation import MAX_CHOICES, OUTPUT, PROMPT, REQUEST, SAMPLING, STOPPING, SharedFields
from inferd.server.schema.request_model import Kind, Part, option, tell
from inferd.server.schema.values import Besides, Converted, Flag, Many, Number, Only, Text, Whole

_TEMPERATURE = 0.8
"""llama.cpp's default."""

_MAX_FILES, _MAX_FIELDS = 4_096, 256

_ONE_PLACE = "Requests have no slots of their own: all share the memory."
_TIME = "An answer ends by its tokens alone. `timeout` bounds its time."
_OTHER_SAMPLER = "This sampler is not served, and `x-inferd-warning` says so."


_OFF: Mapping[str, float] = {"typical_p": 1, "top_n_sigma": -1}
"""Sampler -> the value that turns it off, if that is not 0."""


def _no_effect(value: object, info: ValidationInfo) -> object:
    """A sampler that is turned off asks for nothing."""
    if value != _OFF.get(str(info.field_name), 0):
        tell(info, "no_effect", f"'{info.field_name}' has no effect: this server has no such sampler")
    return value


def _named(value: Any, where: str) -> str | None:
    """llama.vim sends an empty name if its setting has none."""
    del where
    return value or None


_Unused = Annotated[object, AfterValidator(_no_effect)]


def _hint(about: str) -> Any:
    return option(about, has_effect=False)


def _sampler() -> Any:
    return option(_OTHER_SAMPLER, has_effect=False, kind="offer")


class ExtraFile(Part):
    """A part of another file."""

    text: Text = ""
    filename: Text | None = None
    time: Annotated[object, Field()] = None
    """When the editor took the text."""

    kinds: ClassVar[Mapping[str, Kind]] = {"time": "hint"}


class InfillRequest(SharedFields):
    """A gap in a file, and how to fill it. What llama.cpp's server reads, and the fields that all requests have."""

    model: Annotated[str | None, Converted(Text, _named)] | None = option(
        "The name of the served model; any other is a 404. An empty one is none.",
        unset="the served model",
        area=REQUEST,
    )
    input_prefix: Text | None = option("The text before the gap.", unset="empty", area=PROMPT)
    input_suffix: Text | None = option("The text behind the gap.", unset="empty", area=PROMPT)
    prompt: Text | None = option(
        "The text with which the gap begins: it is read behind `input_prefix`.", unset="empty", area=PROMPT
    )
    input_extra: Annotated[tuple[ExtraFile, ...], Many(max_length=_MAX_FILES)] | None = option(
        'Texts of further files, `{"text", "filename"}`, the most relevant last.', unset="none", area=PROMPT
    )
    n_predict: Annotated[Whole | None, Field(ge=0), Besides(-1, None)] = option(
        "Most tokens to generate; 0 only reads the prompt, so that its prefix is cached; -1 means all that the context "
        "holds.",
        unset="-1",
        area=STOPPING,
    )
    n_cmpl: Whole | None = option(
        "Number of answers. Several are a list; events of a stream have their `index`.",
        unset="1",
        area=REQUEST,
        ge=1,
        le=MAX_CHOICES,
    )
    temperature: Number | None = option(
        "0 always takes the likeliest token. A higher value makes the answer more random.",
        unset="0, but 0.8 for several answers",
        area=SAMPLING,
        ge=0,
        le=2,
    )
    truncate_prompt_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, None)] = option(
        "Most tokens of the prompt. A prompt that is too long is cut and never refused: further files lose their "
        "beginning, then the text before the gap loses its beginning and the text behind it its end.",
        unset="what the context holds",
        area=PROMPT,
    )
    response_fields: Annotated[tuple[Text, ...], Many(max_length=_MAX_FIELDS)] | None = option(
        "Only these fields of the answer, or of a stream's last event. `timings/prompt_n` is a field within another. "
        "Unknown names are left out.",
        unset="all",
        area=OUTPUT,
    )
    return_tokens: Flag | None = option("Fill `tokens` with the answer's ids.", unset="false", area=OUTPUT)
    id_slot: object = _hint(_ONE_PLACE)
    cache_prompt: object = _hint("Every prefix is cached until newer ones need its memory.")
    n_cache_reuse: object = _hint("Every prefix is cached until newer ones need its memory.")
    samplers: object = _hint("The samplers have one order.")
    n_indent: object = _hint("The model decides how lines are indented.")
    n_keep: object = _hint("No answer outgrows the context.")
    n_discard: object = _hint("No answer outgrows the context.")
    t_max_prompt_ms: object = _hint(_TIME)
    t_max_predict_ms: object = _hint(_TIME)
    timings_per_token: object = _hint("The last event of a stream has the timings.")
    post_sampling_probs: object = _hint("No answer has probabilities.")
    n_probs: Annotated[object, Only((0,), "Use /v1/completions with 'suffix' and 'logprobs'.")] | None = option(
        "Only 0 is accepted.", has_effect=False, kind="demand"
    )
    repeat_last_n: _Unused | None = _sampler()
    min_keep: _Unused | None = _sampler()
    typical_p: _Unused | None = _sampler()
    top_n_sigma: _Unused | None = _sampler()
    dynatemp_range: _Unused | None = _sampler()
    dynatemp_exponent: object = _hint("It belongs to `dynatemp_range`.")
    xtc_probability: _Unused | None = _sampler()
    xtc_threshold: object = _hint("It belongs to `xtc_probability`.")
    dry_multiplier: _Unused | None = _sampler()
    dry_base: object = _hint("It belongs to `dry_multiplier`.")
    dry_allowed_length: object = _hint("It belongs to `dry_multiplier`.")
    dry_penalty_last_n: object = _hint("It belongs to `dry_multiplier`.")
    dry_sequence_breakers: object = _hint("It belongs to `dry_multiplier`.")
    mirostat: _Unused | None = _sampler()
    mirostat_tau: object = _hint("It belongs to `mirostat`.")
    mirostat_eta: object = _hint("It belongs to `mirostat`.")

    aliases: ClassVar[Mapping[str, str]] = {
        **SharedFields.aliases,
        "max_tokens": "n_predict",
        "n": "n_cmpl",
        "repeat_penalty": "repetition_penalty",
        "grammar": "ebnf",
    }

    refused: ClassVar[Mapping[str, str]] = {
        **SharedFields.refused,
        "json_schema": "Use 'structured_outputs' with 'json' instead.",
        "lora": "Adapters are chosen by `model`.",
    }

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(name, text) of each further file. llama.cpp calls one without a name "tmp"."""
        return tuple((extra.filename or "tmp", extra.text) for extra in self.input_extra or ())

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has the prompt's text."""
        return not self.response_fields or "prompt" in self.response_fields

    def completion(self) -> CompletionRequest:
        """The request of /v1/completions with the same fields, without the prompt. One answer is the likeliest, and
        several differ, if no temperature is given."""
        shared = {name: getattr(self, name) for name in SharedFields.model_fields}
        if self.temperature is None:
            shared["temperature"] = 0.0 if (self.n_cmpl or 1) == 1 else _TEMPERATURE
        return CompletionRequest.model_construct(**shared, prompt=("",), n=self.n_cmpl)
