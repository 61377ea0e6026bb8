"""LlamaIndex's embeddings: by its class for compatible servers, and by that for text-embeddings-inference."""

from __future__ import annotations

from checks import BASE_URL, KEY, MODEL, URL, check, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

openai_like = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=KEY)
inference = TextEmbeddingsInference(model_name=MODEL, base_url=URL, auth_token=KEY)
TEXTS = ["a cat", "a dog", "What is inference?"]


@check
def both_classes_give_the_same_vectors() -> None:
    one, other = openai_like.get_text_embedding_batch(TEXTS), inference.get_text_embedding_batch(TEXTS)
    assert len(one) == len(other) == 3
    for vector, same in zip(one, other, strict=True):
        assert max(abs(a - b) for a, b in zip(vector, same, strict=True)) < 1e-6


@check
async def a_query_is_embedded_asynchronously() -> None:
    assert await openai_like.aget_query_embedding("a cat") == openai_like.get_query_embedding("a cat")
    assert len(await inference.aget_query_embedding("a cat")) == len(openai_like.get_query_embedding("a cat"))


run()
