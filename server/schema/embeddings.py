"""The request of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inferd.engine.api.wire.params import PoolingKind
from inferd.server.errors import messages as errors
from inferd.server.schema.completions import Prompt, prompts, read_prompts
from inferd.server.schema.generation import MAX_PROMPTS
from inferd.server.schema.latency import priority_option, timeout_option
from inferd.server.schema.request_model import Part, RequestModel, option, required
from inferd.server.schema.values import Besides, Flag, Many, Number, ReadBy, Text, Whole

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary"]
"""Type of a vector's components."""
Side = Literal["left", "right"]
"""Side of a text that is cut: its beginning or its end."""


class _TextObject(Part):
    """A text in Jina's form. Images are not embedded."""

    text: Annotated[Text, Field(min_length=1)]


def _inputs(value: Any, where: str) -> tuple[Prompt, ...]:
    """As `read_prompts`, with texts that are objects."""
    if isinstance(value, dict):
        value = _text_of(value, where)
    elif isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS and isinstance(value[0], str | dict):
        value = [_text_of(item, f"{where}[{i}]") if isinstance(item, dict) else item for i, item in enumerate(value)]
    return read_prompts(value, where, 1)


def _text_of(value: dict[str, Any], where: str) -> str:
    """Raises `RequestError` for an object that has no text, or anything beside it."""
    for key, item in value.items():
        if key != "text" and item is not None:
            raise errors.unsupported_parameter(f"{where}.{errors.clip(key, 64)}", "This server embeds texts.")
    text = value.get("text")
    if text is None:
        raise errors.missing(f"{where}.text")
    if not isinstance(text, str):
        raise errors.invalid_type(f"{where}.text", "a string", text)
    if not text:
        raise errors.empty_string(f"{where}.text")
    return text


_Inputs = (
    prompts(1).sent | _TextObject | Annotated[list[Text | _TextObject], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class VectorFields(RequestModel):
    """Texts and how to turn them into vectors: the fields that /v1/embeddings and vLLM's /pooling share."""

    input: Annotated[tuple[Prompt, ...], ReadBy(_inputs, _Inputs)] = required(
        "A text, a list of texts, a list of token ids, or a list of such lists; at most 1,048,576 tokens in all. A "
        'text may be an object: `{"text": ...}`.'
    )
    model: Text | None = option("The name of the served model; any other is a 404.", unset="the served model")
    encoding_format: Literal["float", "base64"] | None = option(
        "`float`: a list of numbers, each exactly the one of `output_dtype`. `base64`: the bytes of the same numbers, "
        "little-endian.",
        unset="`float`",
    )
    output_dtype: VectorType | None = option(
        "Type of the components. `float`: 32 bits. `int8`: 127 times each component of the vector scaled to length 1, "
        "rounded. `uint8`: that plus 128. `ubinary`: one bit for each component, 1 if it is above 0, eight to a byte, "
        "the first in the highest bit. `binary`: those bytes less 128.",
        unset="`float`",
    )
    embedding_types: Annotated[tuple[VectorType, ...], Many(1, 1)] | None = option(
        "`output_dtype` as a list of one. `/v2/embed` gives several types at once.", unset="as `output_dtype` says"
    )
    return_multivector: Flag | None = option(
        "Give a vector for each token, special tokens included, as late interaction compares them. They come as "
        "`embeddings`. With `base64` they are one string, one vector after another.",
        unset="false",
    )
    dimensions: Whole | None = option(
        "Number of leading components to keep. The vector is scaled again. More than the model's hidden size is "
        "refused, and so is any other than those that its config.json lists as `matryoshka_dimensions`.",
        unset="those that the model's `truncate_dim` says, else its hidden size",
        ge=1,
    )
    prompt_name: Text | None = option(
        "Begin each text with the prompt that the model's `config_sentence_transformers.json` has under this name.",
        unset="the model's `default_prompt_name`",
    )
    input_type: Text | None = option(
        "`query`, `search_query`, `document`, `passage`, `search_document`, `classification`, `clustering`, one of "
        "Jina's `retrieval.query`, `retrieval.passage`, `text-matching`, `separation`, `code.query` and "
        "`code.passage`, or the name of a prompt: begin each text with the prompt that the model has for such texts. A "
        "model without such a prompt embeds the text alone.",
        unset="as `prompt_name` says",
    )
    pooling: PoolingKind | None = option(
        "Of the hidden states behind the final norm, `last` takes the last token's and `cls` the first token's. `mean` "
        "is the mean of all, and `max` the largest of each component. `mean_sqrt_len` is their sum over the root of "
        "their number. `weightedmean` has the positions, counted from 1, as weights. One that the model's engine lacks "
        "is refused. All but `last` take no prefix hit.",
        unset="as the model's `modules.json` says, else `last`",
    )
    normalize: Flag | None = option(
        "Scale every vector to length 1.", unset="as the model's `modules.json` says, else true"
    )
    add_special_tokens: Flag | None = option(
        "Add the special tokens that the tokenizer adds to every text.", unset="true"
    )
    truncate_prompt_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, -1)] = option(
        "Keep only this many tokens of each input, and never more than the model takes; -1 keeps those. Tokens that "
        "the tokenizer adds around a text stay. If not given, the server refuses an input that is too long and never "
        "cuts it.",
        unset="never cut",
    )
    truncation_side: Side | None = option(
        "The side that `truncate_prompt_tokens` cuts: `right` keeps the beginning of each input, `left` its end.",
        unset="as the tokenizer says, else `right`, for a model that embeds; `left` for one that generates",
    )
    priority: Whole | None = priority_option()
    timeout: Number | None = timeout_option()
    user: Text | None = option("Clients are identified by their key.", has_effect=False)

    aliases: ClassVar[Mapping[str, str]] = {"output_dimension": "dimensions", "embedding_type": "output_dtype"}

    refused: ClassVar[Mapping[str, str]] = {
        "messages": "Send the token ids that /v1/chat/completions/render gives as 'input'.",
        "embed_dtype": "Components have 32 bits, 8 bits or one bit, as 'output_dtype' says.",
        "endianness": "'base64' is little-endian.",
        "late_chunking": "Each input is embedded alone.",
    }

    keeps_spelling: ClassVar[bool] = True

    @property
    def most_kept(self) -> int | None:
        """Most tokens that are kept of an input; -1: as many as the model takes; None: longer inputs are refused."""
        return self.truncate_prompt_tokens

    @property
    def way_to_cut(self) -> str:
        """The way to have an input cut that is too long, as an imperative."""
        return "set 'truncate_prompt_tokens' to -1"


class EmbeddingRequest(VectorFields):
    """The body of /v1/embeddings: that of OpenAI, with fields of vLLM, Jina, Voyage and Mistral."""

    truncate: Flag | None = option("True is -1 for `truncate_prompt_tokens`.", unset="false")

    aliases: ClassVar[Mapping[str, str]] = {
        **VectorFields.aliases,
        "normalized": "normalize",
        "task": "input_type",
        "truncation": "truncate",
    }

    @property
    def most_kept(self) -> int | None:
        return -1 if self.truncate and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens

    @property
    def way_to_cut(self) -> str:
        return super().way_to_cut if self.truncate is None else f"set '{self.spelt('truncate')}' to true"
