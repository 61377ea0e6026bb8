"""Tools, calls and their results as text, for chat templates that do not show them.

`probe` finds out once what a template shows, by rendering test messages. `Fallback` writes the rest into the messages
before they are rendered: tools as a system text, calls into the assistant's content, results into the user's. Knows no
templates and no requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inferd.server.tools.format import ID, INDEX, KEY, NAME, CallSyntax, Tags

Message = Mapping[str, object]
Tool = Mapping[str, object]
Empty = Literal["text", "null", "absent"]
"""How missing content is given to a template: "", None, or no key."""

Render = Callable[[Sequence[Message], Sequence[Tool] | None], str | None]
"""(messages, tools) -> the prompt; None: the template refuses them."""

_CONTENT: dict[Empty, dict[str, object]] = {"text": {"content": ""}, "null": {"content": None}, "absent": {}}


SPLIT_TEXT = "a text beside calls became a turn of its own"
SPLIT_CALLS = "several calls of one turn became turns of their own, each with its result"


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """The parts of tool use that a chat template shows."""

    tools: bool = True
    calls: bool = True
    """Whether it shows calls of an assistant's earlier turns."""
    results: bool = True
    """Whether it shows messages of role `tool`."""
    system: bool = True
    """Whether it shows system messages."""
    empty: Empty = "text"
    """How missing content of a message with calls must be given so that the template shows the calls."""
    content_beside_calls: bool = True
    """Whether it shows both content and calls of one message."""
    several_calls: bool = True
    """Whether it shows several calls of one message."""


_NAME, _CITY, _OTHER_CITY = "probe_weather_7f3", "Paris-7f3", "Rome-7f3"
_RESULT, _SYSTEM, _SAID = "result-7f3", "system-7f3", "said-7f3"
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
# Some templates accept only ids of nine letters and digits.
_CALL: Message = {"type": "function", "id": "probe7f3a", "function": {"name": _NAME, "arguments": {"city": _CITY}}}
_OTHER_CALL: Message = {
    "type": "function",
    "id": "probe7f3b",
    "function": {"name": _NAME, "arguments": {"city": _OTHER_CITY}},
}
_RESULT_MESSAGE: Message = {"role": "tool", "tool_call_id": "probe7f3a", "name": _NAME, "content": _RESULT}

_OTHER_RESULT_MESSAGE: Message = {**_RESULT_MESSAGE, "tool_call_id": "probe7f3b"}


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_USER, _ANSWER = _said("user", "Hello."), _said("assistant", "Hello!")


def probe(render: Render) -> ToolSupport:
    """Find out what the template behind `render` shows. If it refuses every probe of a part, that part counts as
    shown."""
    has_system = _SYSTEM in (render([_said("system", _SYSTEM), _USER], None) or "")
    has_tools = _shows_tools(render)
    prompts = {
        empty: render([_USER, {"role": "assistant", **content, "tool_calls": [_CALL]}, _RESULT_MESSAGE], [_PROBE_TOOL])
        for empty, content in _CONTENT.items()
    }
    # The tool's description has the name, but no city.
    showing = {empty: prompt for empty, prompt in prompts.items() if prompt is not None and _CITY in prompt}
    if not showing:
        if not has_tools:
            return ToolSupport(tools=False, calls=False, results=False, system=has_system)
        prompt = render([_USER, _ANSWER, _RESULT_MESSAGE], [_PROBE_TOOL]) or ""
        return ToolSupport(calls=False, results=_RESULT in prompt, system=has_system)
    # The shortest prompt adds nothing for the missing content: neither "None" nor an empty turn.
    empty = min(showing, key=lambda empty: len(showing[empty]))
    both = render([_USER, {**_said("assistant", _SAID), "tool_calls": [_CALL]}, _RESULT_MESSAGE], [_PROBE_TOOL]) or ""
    calls = {"role": "assistant", **_CONTENT[empty], "tool_calls": [_CALL, _OTHER_CALL]}
    several = render([_USER, calls, _RESULT_MESSAGE, _OTHER_RESULT_MESSAGE], [_PROBE_TOOL]) or ""
    return ToolSupport(
        tools=has_tools,
        results=_RESULT in showing[empty],
        system=has_system,
        empty=empty,
        content_beside_calls=_SAID in both and _CITY in both,
        several_calls=_CITY in several and _OTHER_CITY in several,
    )


def _shows_tools(render: Render) -> bool:
    """Whether every prompt with tools shows them: some templates show them only in one branch."""
    talks = ([_USER], [_said("system", _SYSTEM), _USER], [_USER, _ANSWER, _USER])
    rendered = (talk for talk in talks if render(talk, None) is not None)
    return all(_NAME in (render(talk, [_PROBE_TOOL]) or "") for talk in rendered)


@dataclass(frozen=True, slots=True)
class Fallback:
    """Writes into messages what a template does not show."""

    support: ToolSupport
    syntax: CallSyntax
    """Syntax that the prompt asks the model to use, and in which it shows earlier calls."""

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """The messages for the template, including the tools if it does not show them."""
        rewritten: list[Message] = []
        results: list[str] = []
        for message in messages if self._keeps_turns else self._split(messages):
            if message["role"] == "tool" and not self.support.results:
                results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            elif results and message["role"] == "user":
                # Templates without results do not take two user messages in a row either.
                rewritten.append({**message, "content": "\n".join((*results, str(message["content"])))})
                results = []
            else:
                rewritten += [_said("user", "\n".join(results))] if results else []
                rewritten.append(self._written(message))
                results = []
        rewritten += [_said("user", "\n".join(results))] if results else []
        return self._with_tools(rewritten, tools) if tools and not self.support.tools else rewritten

    def splits(self, messages: Sequence[Message]) -> list[str]:
        """Words for the caller about turns with calls that are split. Calls that are written as text stay together."""
        if self._keeps_turns:
            return []
        calling = [message for message in messages if message.get("tool_calls")]
        found = {
            SPLIT_TEXT: not self.support.content_beside_calls and any(message.get("content") for message in calling),
            SPLIT_CALLS: not self.support.several_calls and any(len(_calls_of(message)) > 1 for message in calling),
        }
        return [about for about, is_split in found.items() if is_split]

    @property
    def _keeps_turns(self) -> bool:
        return not self.support.calls or (self.support.content_beside_calls and self.support.several_calls)

    def _split(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Split an assistant's turn into several that the template can show, with each call's results behind it."""
        at = 0
        while at < len(messages):
            message, calls = messages[at], _calls_of(messages[at])
            at += 1
            if not calls:
                yield message
                continue
            results: list[Message] = []
            while at < len(messages) and messages[at]["role"] == "tool":
                results.append(messages[at])
                at += 1
            if message.get("content") and not self.support.content_beside_calls:
                yield {key: value for key, value in message.items() if key != "tool_calls"}
                message = {key: value for key, value in message.items() if key != "content"}
            if self.support.several_calls or len(calls) == 1:
                yield from (message, *results)
            else:
                yield from _one_by_one(message, calls, results)

    def _written(self, message: Message) -> Message:
        """The message with its calls written into its content, or with missing content as the template takes it."""
        calls = _calls_of(message)
        if not calls:
            return message
        content = message.get("content") or ""
        if not self.support.calls:
            written = written_calls(self.syntax, calls)
            text = f"{content}\n{written}" if content else written
            return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
        if content:
            return message
        return {**{key: value for key, value in message.items() if key != "content"}, **_CONTENT[self.support.empty]}

    def _with_tools(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        """Add the text of the tools: to the first system message, as a new one, or before the first user message."""
        text = tools_text(self.syntax, tools)
        first = messages[0] if messages else _said("user", "")
        if first["role"] in ("system", "developer"):
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        if self.support.system:
            return [_said("system", text), *messages]
        if first["role"] == "user":
            return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
        return [_said("user", text), *messages]


def _calls_of(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _one_by_one(message: Message, calls: list[Message], results: list[Message]) -> Iterator[Message]:
    """Each call in a message of its own with its results behind it; results without a call come last."""
    by_call: dict[object, list[Message]] = {}
    for result in results:
        by_call.setdefault(result.get("tool_call_id"), []).append(result)
    for i, call in enumerate(calls):
        kept = message if i == 0 else {"role": message["role"]}
        yield {**kept, "tool_calls": [call]}
        yield from by_call.pop(call.get("id"), ())
    for rest in by_call.values():
        yield from rest


def tools_text(syntax: CallSyntax, tools: Sequence[Tool]) -> str:
    """Tells the model which tools there are and how to call them, in the words of Hermes models."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    arguments = "<arguments>" if syntax.tags is not None else "<arguments as a JSON object>"
    form = _written_call(syntax, "<name of the function>", arguments)
    return (
        "# Tools\n\n"
        "You may call one or more of these functions to help with what the user asks. Each line within <tools></tools> "
        "is one function, with its parameters as a JSON schema:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, answer with exactly this form, once for each call:\n"
        f"{syntax.before_all.replace(INDEX, '1')}{form}{syntax.after_all}\n"
        "Each call's result then comes back within <tool_response></tool_response>."
    )


def written_calls(syntax: CallSyntax, calls: Iterable[Mapping[str, object]]) -> str:
    """Calls as the model would have written them."""
    texts: list[str] = []
    for i, call in enumerate(calls):
        function = call["function"]
        assert isinstance(function, Mapping)
        name, arguments = str(function["name"]), _arguments(syntax, function["arguments"])
        texts.append(_written_call(syntax, name, arguments, i, str(call.get("id", ""))))
    before_all = syntax.before_all.replace(INDEX, str(len(texts)))  # some templates count the calls there
    return before_all + syntax.separator.join(texts) + syntax.after_all


def _written_call(syntax: CallSyntax, name: str, arguments: str, index: int = 0, call_id: str = "") -> str:
    text = f"{syntax.begin}{NAME}{syntax.between}{arguments}{syntax.end}"
    return text.replace(NAME, name).replace(INDEX, str(index)).replace(ID, call_id)


def _arguments(syntax: CallSyntax, arguments: object) -> str:
    """Arguments that are no JSON object are a text, which stays as it is."""
    tags = syntax.tags
    if isinstance(arguments, str):
        return arguments
    if tags is None or not isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    keys = sorted(arguments, key=lambda key: str(key).lower()) if tags.is_sorted else arguments
    return tags.separator.join(_in_tags(tags, str(key), arguments[key]) for key in keys)


def _in_tags(tags: Tags, key: str, value: object) -> str:
    is_text = isinstance(value, str) and tags.is_raw
    between = dict(tags.betweens).get(_kind_of(value), tags.between)
    end = tags.string_end if is_text and tags.string_end else tags.end
    return f"{tags.before}{key}{between}{value if is_text else _value(tags, value)}{end.replace(KEY, key)}"


def _value(tags: Tags, value: object) -> str:
    """A value that is not written as it is: JSON, unless the format has tags or quotes of its own there."""
    if tags.item and isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else ((tags.item, part) for part in value)
        return "".join(_in_tags(tags, key, part) for key, part in pairs)
    quote = tags.string_quote
    if not quote:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        keys = sorted(value, key=str.lower) if tags.is_sorted else value
        return f"{{{','.join(f'{key}:{_value(tags, value[key])}' for key in keys)}}}"
    if isinstance(value, list):
        return f"[{','.join(_value(tags, part) for part in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def _kind_of(value: object) -> str:
    """The JSON type of a value."""
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")
