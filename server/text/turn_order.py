"""Other forms of a conversation, for a chat template that refuses the order of its messages or leaves some out.

Many templates want the user and the assistant to alternate, or one system message at the start. Agents send reminders
in the middle, and two messages in a row. Each form joins or moves messages and drops none. Knows no templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Message = Mapping[str, object]

ABOUT_FORMS: Mapping[str, str] = {
    "joined": "neighbours of one role were joined",
    "late_system_as_user": "late system messages became the user's",
    "no_system": "system messages became the user's",
    "alternating": "late system messages became the user's, and texts beside calls and results were joined",
}
"""Name of a form -> what was done, for the caller."""

_SYSTEM = ("system", "developer")


def forms_of(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """(name, messages) of each form that differs from those before it, the least change first."""
    seen = [list(messages)]
    joined = _joined(messages)
    late_as_user = _joined(_with_role(joined, 1, "user"))
    for name, made in (
        ("joined", joined),
        ("late_system_as_user", late_as_user),
        ("no_system", _joined(_with_role(joined, 0, "user"))),
        ("alternating", _alternating(late_as_user)),
    ):
        if made not in seen:
            seen.append(made)
            yield name, made


def late_system_texts(messages: Sequence[Message]) -> list[str]:
    """The text of each system message, if one of them is behind another message. Some templates show the first or the
    last one alone."""
    if not any(message["role"] in _SYSTEM for message in messages[1:]):
        return []
    texts = (message.get("content") for message in messages if message["role"] in _SYSTEM)
    return [text.strip() for text in texts if isinstance(text, str)]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, except those with calls and results."""
    result: list[Message] = []
    for message in messages:
        if result and _is_text(message) and _is_text(result[-1]) and _role(message) == _role(result[-1]):
            result[-1] = _joint(result[-1], message)
        else:
            result.append(message)
    return result


def _joint(first: Message, second: Message) -> Message:
    both: dict[str, object] = {**first, **second, "role": first["role"]}
    for name in ("content", "reasoning", "reasoning_content"):
        texts = [str(text) for text in (first.get(name), second.get(name)) if text]
        if texts:
            both[name] = "\n".join(texts)
    return both


def _with_role(messages: Sequence[Message], start: int, role: str) -> list[Message]:
    """System messages from the index `start` on get another role."""
    return [
        {**message, "role": role} if i >= start and message["role"] in _SYSTEM else message
        for i, message in enumerate(messages)
    ]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Templates that want alternation do not count calls and results. So the user's text behind results becomes a part
    of the last one, and of the assistant's texts between two of the user's only the last place is kept."""
    result: list[Message] = []
    last: int | None = None
    """Index of the last text of the user or the assistant."""
    for message in messages:
        if not _is_text(message) or _role(message) == "system":
            result.append(message)
            continue
        earlier = result[last] if last is not None else None
        if earlier is None or earlier["role"] != message["role"]:
            last = len(result)
            result.append(message)
        elif message["role"] == "user" and result[-1]["role"] == "tool":
            result[-1] = {**_joint(result[-1], {"content": message["content"]})}
        else:
            assert last is not None
            del result[last]
            last = len(result)
            result.append(_joint(earlier, message))
    return result


def _is_text(message: Message) -> bool:
    return (
        message["role"] in ("user", "assistant", *_SYSTEM)
        and not message.get("tool_calls")
        and isinstance(message.get("content") or "", str)
    )


def _role(message: Message) -> object:
    return "system" if message["role"] in _SYSTEM else message["role"]
