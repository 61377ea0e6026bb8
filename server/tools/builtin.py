"""Formats of published models whose checkpoints declare none: response templates by name.

The markers are those of the families' chat templates. A new format is one entry here, one rule in `detect` and one
sample in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.tools.format import INDEX, USUAL_KEYS, CallSyntax, JsonKeys, ReasoningSyntax, Tags

Field = Mapping[str, object]
"""One field of a response template: its markers, its kind of content, and how a call is made from that content."""

NONE = "none"
HARMONY = "harmony"
PLAIN = "json"
"""Calls as JSON without a marker: used if a call is required of a model whose format is not known."""

START_ANCHORS = (
    "<|im_start|>assistant<|im_sep|>",
    "<|im_start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<start_of_turn>model",
    "<|turn>model",
    "<|start|>assistant",
    "<|assistant|>",
    "<\uff5cAssistant\uff5c>",
    "<seed:bos>assistant",
    "[|assistant|]",
    "[/INST]",
)
"""Texts that begin an assistant's turn."""

_OBJECT = {"type": "function", "function": "{content}"}
"""A call from JSON that holds its name and its arguments."""
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call from JSON that holds its arguments only. The name is in the marker before it."""
_NAME = r"(?P<name>[\w.\-]{1,128})"
_MISTRAL = rf"(?:\[TOOL_CALLS\]\s*){{1,4}}(?:{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\]|(?=\{{))|(?=\[\s*\{{|\{{))"
"""Models leave out the list around a single call, or the marker between name and arguments."""
_TO = r" ?to=(?:assistant|user)"
_HEADER = rf"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary{_TO}(?=<\|channel\|>)|{_TO})?"
"""Beginning of a message of gpt-oss to its caller. It may name the recipient."""
_KIND = r"(?: ?(?:<\|constrain\|>)?\w{1,32})?<\|message\|>"
_CHANNEL = r"(?:<\|channel\|>\w{1,32})?"
_TO_TOOL = rf"(?:<\|start\|>assistant)?{_CHANNEL} ?to=(?!(?:assistant|user)\b)"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls."""

    field: Field | None
    """None: calls have no markers."""
    syntax: CallSyntax | None = None
    """None: no grammar can describe it, so a required call is written as `PLAIN`."""
    is_bare: bool = False
    """Whether calls without a marker may begin an answer."""
    has_short_ids: bool = False
    """Whether the template accepts only call ids of nine letters and digits."""
    ends: tuple[str, ...] = ()
    """As in `Format`."""
    keys: JsonKeys = USUAL_KEYS
    """Keys of calls as JSON."""
    knows_more: bool = False
    """Whether models of the family write calls that their templates do not show."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its reasoning, and the rest of its answer if that has markers too."""

    fields: Mapping[str, Field]
    syntax: ReasoningSyntax | None = None
    knows_more: bool = False
    """Whether models of the family also write markers that their templates do not show."""


def _json(open_: str, close: str | None = None) -> Field:
    ends = {} if close is None else {"close": close}
    return {"open": open_, **ends, "repeats": True, "content": "json", "transform": _OBJECT}


def _named(open_pattern: str, **ends: object) -> Field:
    return {"open_pattern": open_pattern, **ends, "repeats": True, "content": "json", "transform": _NAMED}


def _functions(begin: str, end: str, line_end: str) -> CallFormat:
    """Calls whose arguments have tags, with `line_end` beside each value. The models sometimes forget the outer tag, or
    the end of an argument."""
    edge = f"{line_end}?" if line_end else ""
    field = {
        "open_pattern": rf"(?:{begin}\s*)?<function=(?P<name>[^>\n]{{1,128}})>",
        "close_pattern": rf"</function>(?:\s*{end})?",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": rf"<parameter=(?P<key>[^>\n]+)>{edge}(?P<value>.*?){edge}"
            r"(?:</parameter>|(?=<parameter=)|\Z)"
        },
        "transform": _NAMED,
    }
    tags = Tags("<parameter=", f">{line_end}", f"{line_end}</parameter>\n")
    return CallFormat(field, CallSyntax(begin, f"{begin}\n<function=", ">\n", f"</function>\n{end}", tags=tags))


def _pairs(line_end: str) -> CallFormat:
    """Calls whose arguments are pairs of a key and a value, each in a tag, with `line_end` behind it."""
    field = {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<>{]{1,128})\s*(?=<arg_key>|</tool_call>)",
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
        "transform": _NAMED,
    }
    tags = Tags("<arg_key>", f"</arg_key>{line_end}<arg_value>", f"</arg_value>{line_end}")
    return CallFormat(field, CallSyntax("<tool_call>", "<tool_call>", line_end, "</tool_call>", tags=tags))


def _python(begin: str, end: str) -> Field:
    return {"open": begin, "close": end, "repeats": True, "content": "text"}


def _python_syntax(before_all: str, after_all: str, separator: str) -> CallSyntax:
    """Calls in Python. Values may also be written as in JSON."""
    tags = Tags("", "=", "", ", ", is_raw=False, is_python=True)
    trigger = before_all.removesuffix("[")
    return CallSyntax(trigger, "", "(", ")", separator, before_all, after_all, tags)


def _tagged(begin: str, end: str) -> ReasoningFormat:
    field = {"open": begin, "close": end, "content": "text", "repeats": True, "join": "\n"}
    return ReasoningFormat({"reasoning_content": field}, ReasoningSyntax(begin, end))


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"

PLAIN_SYNTAX = CallSyntax("", '{"name": "', '", "arguments": ', "}", ", ", "[", "]")

CALLS: dict[str, CallFormat] = {
    # Qwen 2.5 and 3, Hermes 2 and 3, SmolLM3, Granite 4.
    "hermes": CallFormat(
        _json("<tool_call>", "</tool_call>"),
        CallSyntax("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    ),
    # Qwen3-Coder, Qwen 3.5.
    "qwen3_coder": _functions("<tool_call>", "</tool_call>", "\n"),
    # Seed-OSS.
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", ""),
    # GLM-4.5 and 4.6, and GLM-4.7.
    "glm45": _pairs("\n"),
    "glm47": _pairs(""),
    # Llama 3.1, 3.2, 3.3.
    "llama3_json": CallFormat(
        _json("<|python_tag|>"),
        CallSyntax("", '{"name": "', '", "parameters": ', "}", separator="; "),
        is_bare=True,
        knows_more=True,
    ),
    # Mistral: a list of calls; since the eleventh tokenizer, the name before its arguments.
    "mistral": CallFormat(
        _named(_MISTRAL),
        CallSyntax("[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
        has_short_ids=True,
    ),
    "mistral_args": CallFormat(
        _named(_MISTRAL),
        CallSyntax("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", separator=""),
        has_short_ids=True,
    ),
    # DeepSeek V3 and R1, with their distilled models.
    "deepseek_v3": CallFormat(
        _named(
            rf"(?:{_DEEPSEEK_BEGIN}\s*)?{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}{_NAME}\n```json\n",
            close_pattern=rf"\n?```{_DEEPSEEK_CALL_END}(?:\s*{_DEEPSEEK_END})?",
        ),
        CallSyntax(
            _DEEPSEEK_BEGIN,
            f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}",
            "\n```json\n",
            f"\n```{_DEEPSEEK_CALL_END}",
            before_all=_DEEPSEEK_BEGIN,
            after_all=_DEEPSEEK_END,
        ),
    ),
    "deepseek_v31": CallFormat(
        _named(
            rf"(?:{_DEEPSEEK_BEGIN}\s*)?{_DEEPSEEK_CALL}{_NAME}{_DEEPSEEK_SEP}",
            close_pattern=rf"{_DEEPSEEK_CALL_END}(?:\s*{_DEEPSEEK_END})?",
        ),
        CallSyntax(
            _DEEPSEEK_BEGIN,
            _DEEPSEEK_CALL,
            _DEEPSEEK_SEP,
            _DEEPSEEK_CALL_END,
            separator="",
            before_all=_DEEPSEEK_BEGIN,
            after_all=_DEEPSEEK_END,
        ),
    ),
    "gemma4": CallFormat(
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w{1,128})",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": _NAMED,
        }
    ),
    # Phi-4-mini.
    "phi4": CallFormat(
        _json("<|tool_call|>", "<|/tool_call|>"),
        CallSyntax("<|tool_call|>", '{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    ),
    # Granite 3.
    "granite": CallFormat(
        _json("<|tool_call|>"),
        CallSyntax("<|tool_call|>", '{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]"),
    ),
    # LFM2: a list of calls in Python.
    "lfm2": CallFormat(
        _python("<|tool_call_start|>", "<|tool_call_end|>"),
        _python_syntax("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
        knows_more=True,
    ),
    # OLMo 3: a call in Python on each line.
    "olmo3": CallFormat(
        _python("<function_calls>", "</function_calls>"), _python_syntax("<function_calls>", "</function_calls>", "\n")
    ),
    # Llama 3.2 and 4, Gemma 3, ToolACE: a list of calls in Python and nothing else.
    "pythonic": CallFormat(
        {
            "open_pattern": r"(?:<\|python_start\|>)?\[(?=\s*[\w.]{1,128}\s*\()",
            "close": "<|python_end|>",
            "repeats": True,
            "content": "text",
        },
        _python_syntax("[", "]", ", "),
        is_bare=True,
        knows_more=True,
    ),
    # Kimi K2: the templates need methods of lists that the sandbox forbids.
    "kimi_k2": CallFormat(
        _named(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
            rf"{_NAME}:[0-9]{{1,4}}\s*<\|tool_call_argument_begin\|>",
            close_pattern=r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        ),
        CallSyntax(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.",
            f":{INDEX}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            separator="",
            before_all="<|tool_calls_section_begin|>",
            after_all="<|tool_calls_section_end|>",
        ),
    ),
    # Phi-4-mini by another template, Firefunction 2: a list of calls as JSON.
    "functools": CallFormat(
        {"open_pattern": r"functools(?=\s*\[)", "repeats": True, "content": "json", "transform": _OBJECT},
        CallSyntax("functools", '{"name": "', '", "arguments": ', "}", ", ", "functools[", "]"),
        knows_more=True,
    ),
    # gpt-oss.
    HARMONY: CallFormat(
        _named(
            rf"{_TO_TOOL}(?P<qualified>functions\.)?{_NAME}{_CHANNEL}{_KIND}",
            close_pattern=r"<\|call\|>",
        ),
        CallSyntax(
            "<|channel|>commentary to=",
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "",
            is_single=True,
        ),
        ends=("<|return|>", "<|call|>"),
    ),
    PLAIN: CallFormat(None, PLAIN_SYNTAX, is_bare=True),
}  # fmt: skip

REASONING: dict[str, ReasoningFormat] = {
    # DeepSeek R1, Qwen 3, QwQ, GLM-4.5, SmolLM3, Phi-4-reasoning.
    "think": _tagged("<think>", "</think>"),
    # Magistral and its successors.
    "mistral": _tagged("[THINK]", "[/THINK]"),
    "seed_oss": _tagged("<seed:think>", "</seed:think>"),
    # Granite 3.2 and 3.3.
    "granite": _tagged("Here is my thought process:", "Here is my response:"),
    # Gemma 4 sometimes leaves out the name of the channel.
    "gemma4": ReasoningFormat(
        {
            "reasoning_content": {
                "open_pattern": r"<\|channel>(?:thought(?=\s|<channel\|>))?",
                "close": "<channel|>",
                "content": "text",
                "repeats": True,
                "join": "\n",
            }
        },
        ReasoningSyntax("<|channel>thought\n", "<channel|>"),
        knows_more=True,
    ),
    # gpt-oss: text before a call is part of the answer.
    HARMONY: ReasoningFormat(
        {
            "reasoning_content": {
                "open_pattern": rf"{_HEADER}<\|channel\|>analysis(?:{_TO})?{_KIND}",
                "close": ["<|end|>", "<|return|>"],
                "content": "text",
                "repeats": True,
                "join": "\n",
            },
            "content": {
                "open_pattern": rf"{_HEADER}<\|channel\|>(?!analysis)\w{{1,32}}(?:{_TO})?{_KIND}",
                "close": ["<|end|>", "<|return|>"],
                "content": "text",
                "repeats": True,
                "join": "\n",
            },
            # Messages to tools that the request does not offer, such as the model's own `python`.
            "unshown": {
                "open_pattern": rf"{_TO_TOOL}[\w.\-]{{1,128}}{_CHANNEL}{_KIND}",
                "close": ["<|end|>", "<|return|>", "<|call|>"],
                "content": "text",
                "repeats": True,
            },
        },
        ReasoningSyntax("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    ),
}
