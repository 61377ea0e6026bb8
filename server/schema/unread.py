"""Content that no model served here reads: images, audio, files, video.

A caller whose newest message has some relies on it, so that the request is refused. In the rest of a conversation the
model reads that it was left out, and a notice says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import ValidationInfo

from inferd.server.schema.request_model import Part, Row

NOUNS: Mapping[str, str] = {
    "image_url": "image", "input_image": "image", "image": "image",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "file": "file", "input_file": "file",
    "video_url": "video", "input_video": "video", "video": "video",
}  # fmt: skip
"""Type of a part of a message or of a result -> what it is."""

SAY_IT = "This server reads text alone: say as a text what it shows."

_TEXTS: Mapping[str, Row] = {
    "text": Row("enforced", "The model reads it."),
    "refusal": Row("enforced", "The model reads it as text."),
}
_DEMANDS = dict.fromkeys(NOUNS, Row("demand", SAY_IT))
_OFFERS = dict.fromkeys(NOUNS, Row("offer", "The model reads that it was left out."))

CHAT_PARTS: Mapping[str, Mapping[str, Row]] = {
    "system": {**_TEXTS, **_DEMANDS},
    "developer": {**_TEXTS, **_DEMANDS},
    "user": {**_TEXTS, **_DEMANDS},
    "user with an answer behind it": {**_TEXTS, **_OFFERS},
    "assistant": {**_TEXTS, **_OFFERS},
    "tool": {**_TEXTS, **_OFFERS},
    "function": {**_TEXTS, **_OFFERS},
}
"""Role of a chat message -> type of a part of its content -> what is done with it."""


class UnreadPart(Part):
    """Its other keys are not read."""

    type: Literal[tuple(NOUNS)]  # type: ignore[valid-type]

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        return super().given({"type": value["type"]}, info)


def part_tag(value: object) -> str | None:
    """The tag of a part in a union: its `type`, or `<unread>`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return "<unread>" if kind in NOUNS else f"<{kind}>"


def omitted(what: str) -> str:
    """The text that a model reads in place of content."""
    return f"[{what} omitted: this model reads text alone]"


def left_out(found: Iterable[str]) -> str:
    """The text of a notice. `found`: what each part was."""
    listed = ", ".join(f"{count} {what}" for what, count in Counter(found).items())
    return f"content of older messages and of results is left out ({listed}): the model reads text alone"
