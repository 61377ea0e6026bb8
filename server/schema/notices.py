"""Notices: what a request asks for that the server accepts and does not do, or does otherwise than asked.

Every answer names its notices in a header, its line in the log names them, and a counter counts them. A request is
refused instead if leaving a part out would break what the caller relies on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Name = Literal[
    "unknown_parameter",
    "hosted_tool",
    "no_effect",
    "tools_as_text",
    "omitted_content",
    "lone_result",
    "max_tokens",
    "schema_keyword",
    "schema_not_enforced",
    "template_order",
    "second_bos",
    "control_tokens",
    "not_trained_to_embed",
]

ABOUT: Mapping[Name, str] = {
    "unknown_parameter": "A field that the API does not have was ignored (`--unknown-fields warn`).",
    "hosted_tool": "The request offers a tool, or a part of one, that only the API's own servers run. The model is not "
    "shown it.",
    "no_effect": "A field has no effect with this model.",
    "tools_as_text": "The chat template shows no tools, so the prompt lists them as text.",
    "omitted_content": "Content that the model cannot read is left out of a tool's result or of the conversation so "
    "far: an image, a file, what only another server reads. In place of an image or a file the model reads that.",
    "lone_result": "A tool's result answers no call before it. The model reads it as it is.",
    "max_tokens": "The context holds fewer tokens behind the prompt than the request allows for the answer.",
    "schema_keyword": "A keyword of a schema is not enforced, because the schema is not strict and the keyword has no "
    "grammar.",
    "schema_not_enforced": "A schema is not enforced at all, because it is not strict and has no grammar.",
    "template_order": "Messages were merged, moved or split, because the chat template refuses their order.",
    "second_bos": "The prompt begins with the token that begins every prompt. It was not added a second time.",
    "control_tokens": "The texts of control tokens in messages, tools or documents are text to the model, not control "
    "tokens.",
    "not_trained_to_embed": "The model was trained to generate or to judge, and its vectors compare texts poorly.",
}
"""Name -> what it says, for the documentation and the counter."""

assert tuple(ABOUT) == get_args(Name)

MAX_HEADER = 1_000
"""Characters of the header."""


@dataclass(frozen=True, slots=True)
class Notice:
    name: Name
    text: str
    """A sentence without a full stop. It says which part of the request is meant, and what was done instead."""


def header_of(notices: Sequence[Notice]) -> str:
    """All texts, each once, in ASCII; shortened if they are long. A request may have thousands of notices, of which no
    more are read than the header holds."""
    texts: dict[str, str] = {}
    length = 0
    for notice in notices:
        if notice.text not in texts:
            texts[notice.text] = text = notice.text[:MAX_HEADER].encode("unicode_escape").decode("ascii")
            length += len(text)
        if length > MAX_HEADER:
            break
    header = "; ".join(texts.values())
    return header if len(header) <= MAX_HEADER else header[: MAX_HEADER - 3] + "..."


def names_of(notices: Sequence[Notice]) -> list[Name]:
    """The names of all notices, each once."""
    return list(dict.fromkeys(notice.name for notice in notices))
