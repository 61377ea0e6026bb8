"""Prompts by which generating models judge pairs: the ids that transformers makes of the same template."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, TypeVar

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from inferd.server.text.pair_template import PairTemplates, answers_of, qwen3_templates, templates_of
from inferd.server.text.pairs import JoinedPair
from inferd.server.text.template import ChatTemplate
from inferd.server.text.tokenizer import Tokenizer
from tests.unit.test_pairs import byte_level

T = TypeVar("T")

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
MOST = 2**20
HEAD = "<|im_start|>system\nJudge the Document by the Query.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
FLAT = (
    HEAD + "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('Find answers') }}\n<Query>: {{ messages | selectattr('role', 'eq', 'query') "
    "| map(attribute='content') | first }}\n<Document>: {{ messages | selectattr('role', 'eq', 'document') "
    "| map(attribute='content') | first }}" + TAIL
)
LISTED = re.sub(
    r"map\(attribute='content'\) \| first(?! \}\}<)|map\(attribute='content'\) \| first",
    "map(attribute='content') | map('first') | map(attribute='text') | map('trim') | first",
    FLAT,
)
PAIRS = [
    ("what runs north?", "The river runs past seven houses."),
    ("ä\n", "  two lines\nand blanks  "),
    ("a", ""),
    ("", "b"),
    ("why {{ messages }} zqx", "<Document>: again"),
]


def made_backend() -> Backend:
    backend = byte_level([])
    backend.add_tokens([AddedToken(mark, special="im" in mark, normalized=False) for mark in MARKS])
    return backend


@pytest.fixture(scope="module")
def backend() -> Backend:
    return made_backend()


@pytest.fixture(scope="module", params=["flat", "listed"])
def read(request: pytest.FixtureRequest, backend: Backend) -> tuple[str, Tokenizer, PairTemplates]:
    """(the template, the tokenizer, what is derived from them)."""
    source = FLAT if request.param == "flat" else LISTED
    tokenizer, template = Tokenizer(backend, {}, None), ChatTemplate(source, {})
    found = templates_of(template, tokenizer)
    template.close()
    assert found is not None
    return source, tokenizer, found


def run(reading: Generator[int, None, T]) -> T:
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


def theirs(backend: Backend, source: str, query: str, document: str, instruction: str | None) -> list[int]:
    texts = {"system": instruction, "query": query, "document": document}
    as_list = source == LISTED
    messages: list[Any] = [
        {"role": role, "content": [{"type": "text", "text": text}] if as_list else text}
        for role, text in texts.items()
        if text is not None
    ]
    tokenizer = TokenizersBackend(tokenizer_object=backend, chat_template=source)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def joined(found: PairTemplates, query: str, document: str, instruction: str | None = None) -> JoinedPair:
    template = found.of(instruction)
    assert template is not None
    return run(run(template.open(query, instruction, MOST)).join(document, MOST))


@pytest.mark.parametrize(("query", "document"), PAIRS)
def test_a_pair_has_the_ids_of_the_rendered_template(
    backend: Backend, read: tuple[str, Tokenizer, PairTemplates], query: str, document: str
) -> None:
    source, _, found = read
    assert list(joined(found, query, document).token_ids) == theirs(backend, source, query, document, None)


def test_an_instruction_is_the_system_message(backend: Backend, read: tuple[str, Tokenizer, PairTemplates]) -> None:
    source, _, found = read
    ours = joined(found, "a b", "c d", "Find the houses")
    assert list(ours.token_ids) == theirs(backend, source, "a b", "c d", "Find the houses")


def test_the_document_alone_is_cut(read: tuple[str, Tokenizer, PairTemplates]) -> None:
    _, tokenizer, found = read
    document = "The river runs past seven houses and turns north."
    whole, empty = joined(found, "what runs?", document), joined(found, "what runs?", "")
    tail = tokenizer.encode(TAIL.removesuffix("\n"), False)  # jinja drops the last line break
    for most in range(len(empty), len(whole) + 1):
        ids = whole.cut(most).token_ids
        assert ids == (*whole.token_ids[: most - len(tail)], *tail)
    assert whole.cut(3).second == () and len(whole.cut(3)) >= len(empty) - 1
    assert tokenizer.decode(whole.with_second_cut(2).second, False) != tokenizer.decode(whole.second, False)


def test_control_tokens_in_the_texts_are_text(read: tuple[str, Tokenizer, PairTemplates]) -> None:
    _, tokenizer, found = read
    ids = joined(found, "a<|im_end|>b", "c<think>d</think>").token_ids
    plain = joined(found, "a", "c").token_ids
    for mark in MARKS:
        token_id = tokenizer.added_tokens[mark]
        assert ids.count(token_id) == plain.count(token_id)
    assert "a<|im_end|>b" in tokenizer.decode(ids, False)


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
        "query and document: {{ messages[0].content }}",
        FLAT + FLAT,
        FLAT.replace("<Query>", "<Query>{{ messages | map(attribute='content') | join }}"),
        "{{ raise_exception('no query or document') }}",
        "{{ messages[1].content }} document, query {{ messages[0].content }} behind",
    ],
    ids=["a chat", "one text", "twice", "mixed", "refuses", "not at the end"],
)
def test_a_template_without_a_place_for_both_is_none(backend: Backend, source: str) -> None:
    template = ChatTemplate(source, {})
    found = templates_of(template, Tokenizer(backend, {}, None))
    template.close()
    assert found is None


def test_a_tokenizer_whose_parts_are_not_those_of_the_whole_is_none() -> None:
    """One whose added tokens take the blanks behind them."""
    backend = byte_level([])
    backend.add_tokens([AddedToken(mark, rstrip=True, normalized=False) for mark in MARKS])
    template = ChatTemplate(FLAT, {})
    assert templates_of(template, Tokenizer(backend, {}, None)) is None
    template.close()


def test_qwen3_reranker_without_a_template(backend: Backend) -> None:
    tokenizer = Tokenizer(backend, {}, None)
    found = qwen3_templates(tokenizer)
    assert found is not None
    text = tokenizer.decode(joined(found, "q", "d").token_ids, False)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query")
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    assert f"<|im_start|>user\n<Instruct>: {instruction}\n<Query>: q\n<Document>: d{TAIL}" in text
    assert "<Instruct>: other\n" in tokenizer.decode(joined(found, "q", "d", "other").token_ids, False)
    assert qwen3_templates(Tokenizer(byte_level([]), {}, None)) is None
    assert answers_of(tokenizer) is None, "it has no words for an answer"


def test_the_tokens_of_an_answer() -> None:
    backend = Backend(models.WordLevel({"yes": 3, "no": 5, "x": 0}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = byte_level([]).decoder
    found = answers_of(Tokenizer(backend, {}, None))
    assert found is not None and (found.true_id, found.false_id) == (3, 5)
