"""The request of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from inferd.server.schema.completions import Prompt, prompts
from inferd.server.schema.generation import MAX_PRIORITY
from inferd.server.schema.latency import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from inferd.server.schema.request_model import RequestModel, option, required
from inferd.server.schema.values import Besides, Flag, Number, Text, Whole


class EmbeddingRequest(RequestModel):
    """Texts and how to turn them into vectors."""

    input: Annotated[tuple[Prompt, ...], prompts(1)] = required(
        "A text, a list of texts, a list of token ids, or a list of such lists; at most 1,048,576 tokens in all."
    )
    model: Text | None = option("The name of the served model; any other is a 404.", unset="the served model")
    encoding_format: Literal["float", "base64"] | None = option(
        "`float`: a list of numbers, each exactly the 32-bit one. `base64`: the same numbers, 4 bytes each, "
        "little-endian.",
        unset="`float`",
    )
    dimensions: Whole | None = option(
        "Number of leading components to keep. The vector is scaled again. More than the model's hidden size is "
        "refused.",
        unset="those that the model's `truncate_dim` says, else its hidden size",
        ge=1,
    )
    prompt_name: Text | None = option(
        "Begin each text with the prompt that the model's `config_sentence_transformers.json` has under this name.",
        unset="the model's `default_prompt_name`",
    )
    input_type: Text | None = option(
        "`query`, `search_query`, `document`, `passage` or `search_document`: begin each text with the prompt that the "
        "model has for such texts. A model without prompts embeds both alike.",
        unset="as `prompt_name` says",
    )
    pooling: Literal["last", "mean"] | None = option(
        "Of the hidden states behind the final norm: `last` takes the last token's, `mean` the mean of all. `mean` "
        "takes no prefix hit.",
        unset="as the model's `modules.json` says, else `last`",
    )
    normalize: Flag | None = option(
        "Scale every vector to length 1.", unset="as the model's `modules.json` says, else true"
    )
    add_special_tokens: Flag | None = option(
        "Add the special tokens that the tokenizer adds to every text.", unset="true"
    )
    truncate_prompt_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, -1)] = option(
        "Keep only this many tokens at the end of each input; -1 keeps as many as the context holds. If not given, the "
        "server refuses an input that is too long and never cuts it.",
        unset="never cut",
    )
    priority: Whole | None = option(
        "A lower value is scheduled earlier. One level counts as 10 s of waiting.",
        unset="0",
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
    )
    timeout: Number | None = option(
        "Seconds from the request's arrival to its answer. After them the server aborts it with 408 "
        "`deadline_exceeded`. The header `X-Request-Timeout` has the same meaning, and the shorter time counts.",
        unset="no limit",
        ge=MIN_TIMEOUT_S,
        le=MAX_TIMEOUT_S,
    )
    user: Text | None = option("Clients are identified by their key.", has_effect=False)

    refused: ClassVar[Mapping[str, str]] = {
        "messages": "Send the token ids that /v1/chat/completions/render gives as 'input'.",
        "embed_dtype": "Vectors are 32-bit numbers; 'encoding_format' says how they are written.",
        "endianness": "'base64' is little-endian.",
    }
