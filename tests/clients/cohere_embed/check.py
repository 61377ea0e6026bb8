"""Cohere's client: embeddings of every type, by both versions of its API."""

from __future__ import annotations

import base64
import struct

import cohere
from checks import KEY, MODEL, URL, check, raised, run

TEXTS = ["a cat", "a dog"]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
first, second = cohere.Client(api_key=KEY, base_url=URL), cohere.ClientV2(api_key=KEY, base_url=URL)


@check
def floats_of_both_versions_are_equal() -> None:
    plain = first.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    typed = second.embed(texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=["float"])
    assert sorted(plain.embeddings) == sorted(typed.embeddings.float_)
    assert (plain.response_type, typed.meta.billed_units.input_tokens > 0) == ("embeddings_floats", True)


@check
def every_type_comes_at_once() -> None:
    found = second.embed(texts=TEXTS, model=MODEL, input_type="search_query", embedding_types=TYPES).embeddings
    for i, vector in enumerate(found.float_):
        assert base64.b64decode(found.base64[i]) == struct.pack(f"<{len(vector)}f", *vector)
        assert [value + 128 for value in found.int8[i]] == found.uint8[i]
        assert [value + 128 for value in found.binary[i]] == found.ubinary[i]
        bits = "".join(f"{byte:08b}" for byte in found.ubinary[i])
        assert [bit == "1" for bit in bits[: len(vector)]] == [value > 0 for value in vector]


@check
def long_texts_are_cut_or_refused() -> None:
    asked = {"texts": ["word " * 5_000], "model": MODEL, "input_type": "search_document"}
    assert second.embed(**asked, truncate="START", embedding_types=["int8"]).embeddings.int8
    raised(cohere.errors.BadRequestError, lambda: second.embed(**asked, truncate="NONE"))


run()
