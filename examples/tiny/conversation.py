"""Conversations as text: the message types, the chat template, and the same template in Python.

The Jinja template is shipped and served. `render` writes the same text fast enough for training; train.py asserts on a
sample that both agree. This module knows nothing about the content of conversations, nor about token ids.
"""

import json
from dataclasses import dataclass

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
TOOLS_RULE = f"To use a tool, answer with:\n{CALL}\n" + '{"name": ..., "arguments": {...}}' + f"\n{CALL_END}"


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]  # (name, JSON type)

    def schema(self) -> dict[str, object]:
        """The tool as an OpenAI client sends it."""
        properties = {name: {"type": kind} for name, kind in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()

    def schema(self) -> dict[str, object]:
        """The message as an OpenAI client sends it."""
        message: dict[str, object] = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def render(conversation: Conversation) -> list[tuple[str, str]]:
    """Pairs (header, body). Joined in order, they are the chat template's text of the conversation.

    The model must learn the body of an assistant's pair, up to and including END.
    """
    messages = conversation.messages
    pairs: list[tuple[str, str]] = []
    if conversation.tools:
        system = messages[0].content + "\n\n" if messages[0].role == "system" else ""
        messages = messages[1:] if system else messages
        pairs.append((f"{START}system\n", f"{system}{_tools_text(conversation.tools)}{END}"))
    return pairs + [(f"{START}{message.role}\n", f"{_body(message)}{END}") for message in messages]


def _tools_text(tools: tuple[Tool, ...]) -> str:
    lines = [
        f"- {tool.name}({', '.join(f'{name}: {kind}' for name, kind in tool.parameters)}): {tool.description}\n"
        for tool in tools
    ]
    return "Tools:\n" + "".join(lines) + TOOLS_RULE


def _body(message: Message) -> str:
    blocks = [message.content] if message.content else []
    for call in message.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        blocks.append(f'{CALL}\n{{"name": "{call.name}", "arguments": {arguments}}}\n{CALL_END}')
    return "\n".join(blocks)


CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- elif part.text is defined -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set rest = messages -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0].role in ('system', 'developer') -%}
{{- text(messages[0].content) + '\\n\\n' -}}
{%- set rest = messages[1:] -%}
{%- endif -%}
{{- 'Tools:\\n' -}}
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{- '- ' + function.name + '(' -}}
{%- if function.parameters and function.parameters.properties -%}
{%- for name, parameter in function.parameters.properties.items() -%}
{{- name + ': ' + (parameter.type if parameter.type is string else 'any') -}}
{{- ', ' if not loop.last else '' -}}
{%- endfor -%}
{%- endif -%}
{{- '): ' + (function.description or '') + '\\n' -}}
{%- endfor -%}
{{- 'To use a tool, answer with:\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{{- '<|im_start|>' + role + '\\n' + text(message.content) -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function is defined else call -%}
{{- '\\n' if not loop.first or text(message.content) else '' -}}
{{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

RESPONSE_TEMPLATE = {
    "start_anchor": f"{START}assistant\n",
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close": CALL_END,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}
"""The format of an answer, for transformers' `ResponseParser`."""
