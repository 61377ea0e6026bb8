"""Haystack: embedders of texts and documents, by OpenAI's interface."""

from __future__ import annotations

from checks import BASE_URL, KEY, MODEL, check, run
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret

KNOWN = {"api_key": Secret.from_token(KEY), "api_base_url": BASE_URL, "model": MODEL}


@check
def a_text_and_a_document_get_one_vector() -> None:
    text = OpenAITextEmbedder(**KNOWN).run("a cat")
    found = OpenAIDocumentEmbedder(**KNOWN, progress_bar=False).run(
        [Document(content="a cat"), Document(content="a dog")]
    )
    first, second = (document.embedding for document in found["documents"])
    assert text["embedding"] == first != second
    assert text["meta"]["usage"]["prompt_tokens"] > 0


@check
def leading_components_alone() -> None:
    assert len(OpenAITextEmbedder(**KNOWN, dimensions=8).run("a cat")["embedding"]) == 8


run()
