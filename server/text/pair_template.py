"""The prompt by which a generating model judges a pair: a chat template with the roles `query` and `document`.

Such a template says the same around the two texts whatever they are. So it is rendered once, with words in their
places, and the texts are put between its parts. Its control tokens are tokens, and those in the texts are text. Knows
no requests.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from inferd.engine.api.classifier_folder import TokenPair
from inferd.server.text.pairs import Ids, JoinedPair
from inferd.server.text.template import ChatTemplate
from inferd.server.text.tokenizer import Tokenizer

_WORDS = {"system": "zqxinstructionzqx", "query": "zqxqueryzqx", "document": "zqxdocumentzqx"}
"""Role -> the word in place of its text."""
_WORD = re.compile("|".join(_WORDS.values()))
_ROLE_OF = {word: role for role, word in _WORDS.items()}

_NAMED = tuple(re.compile(rf"""["']{role}["']""") for role in ("query", "document"))

QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {system}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, whose first folders had no template for it (Zhang et al. 2025, arXiv:2506.05176)."""
_QWEN3_STATED = _QWEN3.replace("{system}", QWEN3_INSTRUCTION)
"""The same in its GGUF files."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text without control tokens: literal pieces, and at odd places the roles whose texts come between them."""

    pieces: tuple[str, ...]

    def filled(self, texts: Mapping[str, str]) -> str:
        return "".join(texts[piece] if i % 2 else piece for i, piece in enumerate(self.pieces))

    @property
    def ends_with_document(self) -> bool:
        return self.pieces[-2:] == ("document", "")


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The parts of the prompt: token ids, and texts to be filled. One of the texts has the document, at its end."""

    parts: tuple[Ids | _Text, ...]
    literal: Tokenizer
    """Tokenizer to which control tokens are text."""
    default: str = ""
    """Instruction of a request that has none, if the prompt has a place for one."""
    strips: bool = False
    """Whether the template takes the texts without blanks around them."""

    @classmethod
    def of(cls, rendered: str, tokenizer: Tokenizer, default: str = "", *, strips: bool = False) -> Self | None:
        """`rendered`: the prompt with words in place of the texts. None if it lacks the query, or if the document is
        not at the end of its turn."""
        literal = tokenizer.literal(list(tokenizer.added_tokens.values()))
        added = sorted(filter(None, tokenizer.added_tokens), key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, added))})", rendered) if added else [rendered]
        parts: list[Ids | _Text] = []
        for i, text in enumerate(split):
            if i % 2:
                parts.append((tokenizer.added_tokens[text],))
            elif _WORD.search(text):
                parts.append(_Text(tuple(_ROLE_OF.get(piece, piece) for piece in re.split(f"({_WORD.pattern})", text))))
            elif text:
                parts.append(literal.encode(text, False))
        roles = [role for part in parts if isinstance(part, _Text) for role in part.pieces[1::2]]
        ends = sum(isinstance(part, _Text) and part.ends_with_document for part in parts)
        if sorted(set(roles) - {"system"}) != ["document", "query"] or len(set(roles)) != len(roles) or ends != 1:
            return None
        made = cls(tuple(parts), literal, default, strips)
        # A tokenizer that writes something before each text would write it before each part.
        return made if made._whole(_WORDS) == tokenizer.encode(rendered, False) else None

    @property
    def takes_instruction(self) -> bool:
        return any(isinstance(part, _Text) and "system" in part.pieces[1::2] for part in self.parts)

    def open(self, query: str, instruction: str | None, most: int) -> Generator[int, None, OpenPrompt]:
        """The prompt of a query, without a document. Yields as `encode_in_parts`, and raises the same."""
        texts = {"query": query, "document": "", "system": self.default if instruction is None else instruction}
        texts = {role: text.strip() for role, text in texts.items()} if self.strips else texts
        before: list[int] = []
        behind: list[int] = []
        head, num_head, ids = "", 0, before
        for part in self.parts:
            if not isinstance(part, _Text):
                ids += part
                continue
            found = yield from self.literal.encode_in_parts(part.filled(texts), False, most)
            if part.ends_with_document:
                head, num_head, ids = part.filled(texts), len(found), behind
            else:
                ids += found
        return OpenPrompt(tuple(before), head, num_head, tuple(behind), self.literal, self.strips)

    def _whole(self, texts: Mapping[str, str]) -> Ids:
        found: list[int] = []
        for part in self.parts:
            found += self.literal.encode(part.filled(texts), False) if isinstance(part, _Text) else part
        return tuple(found)


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    """The prompt of a query, which each of its documents completes."""

    before: Ids
    head: str
    """Text before the document that is tokenized with it."""
    num_head: int
    """Number of its tokens."""
    behind: Ids
    literal: Tokenizer
    strips: bool

    def join(self, document: str, most: int) -> Generator[int, None, JoinedPair]:
        """The prompt with a document, which alone may be cut. Yields as `encode_in_parts`, and raises the same."""
        text = self.head + (document.strip() if self.strips else document)
        ids = yield from self.literal.encode_in_parts(text, False, most)
        # The document's first token may have taken what stands before it.
        return JoinedPair((*self.before, *ids[: self.num_head]), (), (), ids[self.num_head :], self.behind)


@dataclass(frozen=True, slots=True)
class PairTemplates:
    """The prompts of a model, with an instruction of the request's own and without."""

    plain: PairTemplate
    with_instruction: PairTemplate | None

    def of(self, instruction: str | None) -> PairTemplate | None:
        """None if the model takes no instruction, and one is given."""
        return self.plain if instruction is None else self.with_instruction


def templates_of(template: ChatTemplate | None, tokenizer: Tokenizer) -> PairTemplates | None:
    """The prompts that a checkpoint's chat template makes of a pair; None if it has no place for one. Raises
    `RenderError`."""
    if template is None or not all(role.search(template.source) for role in _NAMED):
        return None  # a template of chats may show any role, and means no pair
    plain = _derived(template, tokenizer, ("query", "document"))
    if plain is None:
        return None
    return PairTemplates(plain, _derived(template, tokenizer, ("system", "query", "document")))


def _derived(template: ChatTemplate, tokenizer: Tokenizer, roles: Sequence[str]) -> PairTemplate | None:
    texts = {role: f"\t{_WORDS[role]}\t" for role in roles}
    for is_flat in (True, False):  # some templates read a text, others a list of parts
        contents = {role: text if is_flat else [{"type": "text", "text": text}] for role, text in texts.items()}
        rendered = template.prompt([{"role": role, "content": contents[role]} for role in roles])
        if rendered is None or "'type': 'text'" in rendered:  # a list where it reads a text
            continue
        strips = not all(text in rendered for text in texts.values())
        for role, text in texts.items():
            rendered = rendered.replace(text, _WORDS[role])
        found = PairTemplate.of(rendered, tokenizer, strips=strips)
        if found is not None and found.takes_instruction == ("system" in roles):
            return found
    return None


def qwen3_templates(tokenizer: Tokenizer) -> PairTemplates | None:
    """Those of Qwen3-Reranker, for a folder that has none; None for another tokenizer."""
    if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.added_tokens.keys():
        return None
    found = PairTemplate.of(_QWEN3.format(**_WORDS), tokenizer, QWEN3_INSTRUCTION)
    return None if found is None else PairTemplates(found, found)


def stated_templates(template: str, tokenizer: Tokenizer) -> PairTemplates | None:
    """The prompt that a GGUF file states, in which {query} and {document} stand for the texts; None if it has no place
    for them that can be filled. That of Qwen3-Reranker has a place for an instruction, too."""
    places = template.replace(QWEN3_INSTRUCTION, "{system}") if template == _QWEN3_STATED else template
    for role, word in _WORDS.items():
        places = places.replace(f"{{{role}}}", word)
    found = PairTemplate.of(places, tokenizer, QWEN3_INSTRUCTION)
    return None if found is None else PairTemplates(found, found if found.takes_instruction else None)


def answers_of(tokenizer: Tokenizer) -> TokenPair | None:
    """The tokens "yes" and "no"; None for a tokenizer that has none."""
    ids = [tokenizer.encode(word, False) for word in ("yes", "no")]
    return TokenPair(ids[0][0], ids[1][0]) if [len(each) for each in ids] == [1, 1] else None
