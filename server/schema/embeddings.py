"""The wire type of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.wire.params import PoolingKind
from inferd.server.schema.completions import Prompt, Prompts
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.generation import MAX_PRIORITY
from inferd.server.schema.kinds import Boolean, Choice, Integer, Text
from inferd.server.schema.timeouts import TIMEOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(RequestFields):
    """Texts to be turned into vectors."""

    input: tuple[Prompt, ...] = wire(
        Prompts(min_chars=1),
        "A text, a list of texts, a list of token ids, or a list of such lists; at most 1,048,576 tokens in all.",
        required=True,
    )
    model: str | None = wire(Text(), "The name of the served model; any other is a 404.", unset="the served model")
    encoding_format: str | None = wire(
        Choice(("float", "base64")),
        "`float`: a list of numbers, each exactly the 32-bit one. `base64`: the same numbers, 4 bytes each, "
        "little-endian.",
        unset="`float`",
    )
    dimensions: int | None = wire(
        Integer(1),
        "Only so many leading components, scaled anew. More than the model's hidden size is refused.",
        unset="the model's hidden size",
    )
    pooling: PoolingKind | None = wire(  # noqa: RUF009  # it makes a dataclass field
        Choice(("last", "mean")),
        "Of the hidden states behind the final norm: `last` takes the last token's, `mean` the mean of all. `mean` "
        "takes no prefix hit.",
        unset="`last`",
    )
    normalize: bool | None = wire(Boolean(), "Scale every vector to length 1.", unset="true")
    add_special_tokens: bool | None = wire(
        Boolean(), "Begin and end a text as the tokenizer does with every text.", unset="true"
    )
    truncate_prompt_tokens: int | None = wire(
        Integer(1, also=(-1,)),
        "Keep only this many tokens at the end of each input; -1 keeps as many as the context holds. If not given, the "
        "server refuses an input that is too long and never cuts it.",
        unset="never cut",
    )
    priority: int | None = wire(
        Integer(-MAX_PRIORITY, MAX_PRIORITY), "Lower goes first. One level is worth 10 s of waiting.", unset="0"
    )
    timeout: float | None = wire(
        TIMEOUT,
        "Seconds from the request's arrival to its answer. Then it is aborted: 408 `deadline_exceeded`. The header "
        "`X-Request-Timeout` says the same; of the two the shorter holds.",
        unset="no limit",
    )
    user: str | None = wire(Text(), "Callers are told apart by their key.", has_effect=False)

    refused: ClassVar[Mapping[str, str]] = {
        "messages": "Send the token ids that /v1/chat/completions/render gives as 'input'.",
        "embed_dtype": "Vectors are 32-bit numbers; 'encoding_format' says how they are written.",
        "endianness": "'base64' is little-endian.",
    }
