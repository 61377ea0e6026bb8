"""Rerankers of LangChain, LlamaIndex, Haystack and LiteLLM."""

from __future__ import annotations

import litellm
from checks import KEY, check, check_each, run
from haystack import Document as HaystackDocument
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from langchain_cohere import CohereRerank as LangChainRerank
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank as LlamaIndexRerank
from rerank_checks import DOCUMENTS, NAME, QUERY, URL, ranks


def texts(num: int) -> list[tuple[str, float]]:
    return [(DOCUMENTS[i], score) for i, score in ranks(num)]


@check
def langchain_compresses_documents() -> None:
    reranker = LangChainRerank(model=NAME, base_url=URL, cohere_api_key=KEY, top_n=2)
    found = reranker.compress_documents([Document(page_content=text) for text in DOCUMENTS], QUERY)
    assert [(one.page_content, one.metadata["relevance_score"]) for one in found] == texts(2)


@check
def llama_index_postprocesses_nodes() -> None:
    reranker = LlamaIndexRerank(model=NAME, base_url=URL, api_key=KEY, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    found = reranker.postprocess_nodes(nodes, query_str=QUERY)
    assert [(one.node.text, one.score) for one in found] == texts(2)


@check
def haystack_ranks_documents() -> None:
    ranker = CohereRanker(model=NAME, api_base_url=URL, api_key=Secret.from_token(KEY), top_k=2)
    found = ranker.run(query=QUERY, documents=[HaystackDocument(content=text) for text in DOCUMENTS])["documents"]
    assert [(one.content, one.score) for one in found] == texts(2)


@check_each(["cohere", "jina_ai", "hosted_vllm", "huggingface"])
def litellm_ranks(provider: str) -> None:
    """LiteLLM ranks, as its provider's API says."""
    asked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "api_base": URL, "api_key": KEY}
    found = litellm.rerank(model=f"{provider}/{NAME}", **asked).results
    assert [(one["index"], one["relevance_score"]) for one in found] == ranks(2)


run()
