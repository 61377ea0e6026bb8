"""The requests for embeddings of vLLM's /pooling, Cohere, text-embeddings-inference, Ollama and llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from inferd.server.schema.completions import Prompt, prompts
from inferd.server.schema.embeddings import VectorFields
from inferd.server.schema.generation import MAX_PROMPTS
from inferd.server.schema.request_model import Part, RequestModel, option, required
from inferd.server.schema.values import Flag, JsonObject, Many, Only, Text, Whole

_MODEL = "The name of the served model; any other is a 404."
_Prompts = Annotated[tuple[Prompt, ...], prompts(1)]
_Texts = Annotated[tuple[Annotated[Text, Field(min_length=1)], ...], Many(1, MAX_PROMPTS)]

CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class PoolingRequest(VectorFields):
    """The body of vLLM's /pooling: that of /v1/embeddings, and a task."""

    task: Literal["embed", "token_embed", "classify"] | None = option(
        "`embed`: one vector for each input. `token_embed`: a vector for each of its tokens. `classify`: a number for "
        "each label of a classifier: `use_activation` false gives the logits, and fields of vectors are refused.",
        unset="`classify` for a model with a classifier, else `embed`",
    )

    aliases: ClassVar[Mapping[str, str]] = {**VectorFields.aliases, "use_activation": "normalize"}


class _TextPart(Part):
    type: Literal["text"]
    text: Annotated[Text, Field(min_length=1)]


class CohereInput(Part):
    """A text in the form of a message's content. Images are not embedded."""

    content: Annotated[tuple[_TextPart, ...], Many(1, 1)]


class CohereEmbedRequest(RequestModel):
    """The body of Cohere's /v1/embed and /v2/embed."""

    model: Text | None = option(_MODEL, unset="the served model")
    texts: _Texts | None = option("Texts to embed. Give either these or `inputs`.")
    inputs: Annotated[tuple[CohereInput, ...], Many(1, MAX_PROMPTS)] | None = option(
        "Texts to embed, each as an object with its `content`."
    )
    input_type: Text | None = option("As in /v1/embeddings.", unset="the model's default prompt")
    embedding_types: Annotated[tuple[CohereType, ...], Many(1, 6)] | None = option(
        "Types of components, as `output_dtype` of /v1/embeddings. `base64`: the bytes of the 32-bit floats.",
        unset="`float`",
    )
    output_dimension: Whole | None = option("`dimensions` of /v1/embeddings.", unset="all of the model", ge=1)
    truncate: Literal["NONE", "START", "END"] | None = option(
        "The part of a text that is cut if it has more tokens than the model takes, or than `max_tokens`. With `NONE` "
        "it is refused.",
        unset="`END`",
    )
    max_tokens: Whole | None = option(
        "Most tokens that are kept of a text. Not with `NONE`.", unset="those that the model takes", ge=1
    )
    priority: Whole | None = option("Callers are scheduled fairly.", has_effect=False)

    refused: ClassVar[Mapping[str, str]] = {"images": "This server embeds texts: send 'texts'."}


class TeiEmbedRequest(RequestModel):
    """The body of text-embeddings-inference's /embed and /embed_all."""

    inputs: _Prompts = required("`input` of /v1/embeddings.")
    model: Text | None = option("The name of the served model, which that server lacks.", unset="the served model")
    normalize: Flag | None = option(
        "Scale every vector to length 1.", unset="true for `/embed`, false for `/embed_all`"
    )
    prompt_name: Text | None = option("As in /v1/embeddings.", unset="the model's default prompt")
    dimensions: Whole | None = option("As in /v1/embeddings.", unset="all of the model", ge=1)
    truncate: Flag | None = option("Cut inputs that have more tokens than the model takes.", unset="they are refused")
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = option(
        "The side that is cut.", unset="`right`"
    )


class _OllamaRequest(RequestModel):
    model: Text | None = option(_MODEL, unset="the served model")
    keep_alive: object = option("Models are loaded and unloaded by their own routes.", has_effect=False)
    options: JsonObject | None = option("Sampling and memory, which have no part in a vector.", has_effect=False)


class OllamaEmbedRequest(_OllamaRequest):
    """The body of Ollama's /api/embed."""

    input: _Prompts = required("As in /v1/embeddings.")
    truncate: Flag | None = option("Cut inputs that have more tokens than the model takes.", unset="true")
    dimensions: Whole | None = option("As in /v1/embeddings.", unset="all of the model", ge=1)


class OllamaEmbeddingsRequest(_OllamaRequest):
    """The body of Ollama's older /api/embeddings."""

    prompt: Annotated[Text, Field(min_length=1)] = required("A text.")


class OllamaShowRequest(RequestModel):
    """The body of Ollama's /api/show."""

    model: Text | None = option(_MODEL, unset="the first model that embeds")
    verbose: Flag | None = option("The answer has everything.", has_effect=False)
    system: Text | None = option("Templates are the model's own.", has_effect=False)
    options: JsonObject | None = option("The model's settings are the server's.", has_effect=False)

    aliases: ClassVar[Mapping[str, str]] = {"name": "model"}


class LlamaCppEmbeddingRequest(RequestModel):
    """The body of /embedding of llama.cpp's server."""

    content: _Prompts = required("`input` of /v1/embeddings.")
    model: Text | None = option(_MODEL, unset="the served model")
    embd_normalize: (
        Annotated[int, Only((-1, 2), "Use 2 for vectors of length 1, or -1 for vectors as they are.")] | None
    ) = option("2: scale every vector to length 1. -1: leave it as it is.", unset="as the model's folder says")

    aliases: ClassVar[Mapping[str, str]] = {"input": "content"}
