"""Cohere's client: rerank by both versions of its API, and its mapping of errors."""

from __future__ import annotations

import cohere
from checks import KEY, check, raised, run
from rerank_checks import DOCUMENTS, NAME, QUERY, URL, ranks

first = cohere.Client(api_key=KEY, base_url=URL)
second = cohere.ClientV2(api_key=KEY, base_url=URL)
ASKED = {"model": NAME, "query": QUERY, "documents": DOCUMENTS}


@check
def the_first_version_ranks_and_returns_documents() -> None:
    answer = first.rerank(**ASKED, top_n=2, return_documents=True, max_chunks_per_doc=10)
    assert [(result.index, result.relevance_score) for result in answer.results] == ranks(2)
    assert [result.document.text for result in answer.results] == [DOCUMENTS[i] for i, _ in ranks(2)]
    assert answer.id and answer.meta.billed_units.search_units == 1 and answer.meta.tokens.input_tokens > 0
    objects = [{"text": text} for text in DOCUMENTS]
    answer = first.rerank(model=NAME, query=QUERY, documents=objects, return_documents=False)
    assert [(result.index, result.document) for result in answer.results] == [(i, None) for i, _ in ranks(3)]


@check
def the_second_version_ranks() -> None:
    answer = second.rerank(**ASKED, top_n=2, max_tokens_per_doc=512, priority=1)
    assert [(result.index, result.relevance_score) for result in answer.results] == ranks(2)


@check
def errors_are_mapped() -> None:
    lost = raised(cohere.errors.NotFoundError, lambda: second.rerank(**{**ASKED, "model": "none"}))
    assert lost.body["error"]["code"] == "model_not_found"
    empty = raised(cohere.errors.BadRequestError, lambda: second.rerank(**{**ASKED, "documents": []}))
    assert empty.body["error"]["param"] == "documents"
    raised(cohere.errors.UnauthorizedError, lambda: cohere.ClientV2(api_key="wrong", base_url=URL).rerank(**ASKED))


run()
