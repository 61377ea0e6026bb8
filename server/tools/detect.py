"""Finds a checkpoint's format: the one that it declares, else the one that its chat template and special tokens show.

A setting overrides both. Two formats that do not fit together are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from inferd.engine.api.errors import ModelError
from inferd.server.tools.builtin import (
    CALLS,
    HARMONY,
    NONE,
    PLAIN,
    PLAIN_SYNTAX,
    REASONING,
    START_ANCHORS,
    CallFormat,
    Field,
    ReasoningFormat,
)
from inferd.server.tools.format import DERIVED, OWN, CallSyntax, Format, ReasoningSyntax


@dataclass(frozen=True, slots=True)
class Derived:
    """Formats derived from a template, as far as it shows them."""

    calls: CallFormat | None = None
    why_no_calls: str = ""
    """Why there is no format of calls; empty if there is one."""
    readable: frozenset[str] | None = None
    """Names of the formats written by hand that read the template's calls; None if it shows none, or if theirs was
    derived."""
    reasoning: ReasoningFormat | None = None
    why_no_reasoning: str = ""
    """Fault of the format of reasoning that was found; empty if it has none."""
    others: Mapping[str, Field] = field(default_factory=dict)
    """Fields of the content, if it has markers, and of the end of a turn."""
    anchors: tuple[str, ...] = ()
    """Texts that begin an assistant's turn."""
    num_rendered: int = 0


NOTHING = Derived()


AUTO = "auto"
"""Setting that takes the format from the checkpoint."""

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_FROM_OWN, _FROM_TEMPLATE, _FROM_SETTINGS = "the checkpoint's response_template", "the chat template", "settings"


@dataclass(frozen=True, slots=True)
class Clues:
    """Properties of a checkpoint that show its format."""

    chat_template: str = ""
    """Text of all its templates."""
    tokens: Collection[str] = ()
    """Texts of its added tokens."""
    model_type: str = ""
    response_template: Mapping[str, object] | None = None
    shows_tools: bool = True
    """Whether the chat template shows tools. Otherwise the server shows them in the way of Hermes models."""
    derived: Derived = NOTHING
    """The format that was derived from the chat template."""

    def has(self, *texts: str) -> bool:
        return all(text in self.chat_template for text in texts)


_MISTRAL = ("mistral", "ministral")
_Rule = tuple[Callable[[Clues], bool], str]

_CALL_RULES: tuple[_Rule, ...] = (
    (lambda clues: clues.has("<|tool_call>call:"), "gemma4"),
    (lambda clues: clues.has("<|channel|>", "<|call|>"), HARMONY),
    (lambda clues: clues.has("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"), "deepseek_v3"),
    (lambda clues: clues.has("<\uff5ctool\u2581call\u2581begin\uff5c>"), "deepseek_v31"),
    (lambda clues: clues.has("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (lambda clues: clues.has("[TOOL_CALLS]"), "mistral"),
    (lambda clues: clues.has("<seed:tool_call>", "<function="), "seed_oss"),
    (lambda clues: clues.has("<function=", "<parameter="), "qwen3_coder"),
    (lambda clues: clues.has("</arg_key><arg_value>"), "glm47"),
    (lambda clues: clues.has("<arg_key>", "<arg_value>"), "glm45"),
    (lambda clues: clues.has("<|tool_call_argument_begin|>"), "kimi_k2"),
    (lambda clues: clues.has("[func_name1("), "pythonic"),
    (lambda clues: clues.has("<function_calls>") and not clues.has("<invoke"), "olmo3"),
    (lambda clues: clues.has("functools["), "functools"),
    (lambda clues: clues.has("<tool_call>"), "hermes"),
    (lambda clues: clues.has("<|tool_call|>", "<|/tool_call|>"), "phi4"),
    (lambda clues: clues.has("<|tool_call|>"), "granite"),
    (lambda clues: clues.has("<|tool_call_start|>") or "<|tool_call_start|>" in clues.tokens, "lfm2"),
    (lambda clues: clues.has("<|python_tag|>") or clues.has('"name": function name', '"parameters"'), "llama3_json"),
    # The server shows the tools, in the way of Hermes models.
    (lambda clues: not clues.shows_tools, "hermes"),
    # The template shows no calls, but the family writes them with a special token.
    (lambda clues: clues.model_type.startswith(_MISTRAL) and "[ARGS]" in clues.tokens, "mistral_args"),
    (lambda clues: clues.model_type.startswith(_MISTRAL) and "[TOOL_CALLS]" in clues.tokens, "mistral"),
    (lambda clues: "<|tool_call_argument_begin|>" in clues.tokens, "kimi_k2"),
    (lambda clues: clues.model_type.startswith("qwen") and "<tool_call>" in clues.tokens, "hermes"),
    (lambda clues: clues.model_type.startswith("granite") and "<|tool_call|>" in clues.tokens, "granite"),
)

_REASONING_RULES: tuple[_Rule, ...] = (
    (lambda clues: clues.has("<|channel>"), "gemma4"),
    (lambda clues: clues.has("<|channel|>", "analysis"), HARMONY),
    (lambda clues: clues.has("[THINK]"), "mistral"),
    (lambda clues: clues.has("seed:think>"), "seed_oss"),
    (lambda clues: clues.has("Here is my thought process:", "Here is my response:"), "granite"),
    (lambda clues: clues.has("think>"), "think"),
    (lambda clues: "[THINK]" in clues.tokens and "[/THINK]" in clues.tokens, "mistral"),
    (lambda clues: "<think>" in clues.tokens and "</think>" in clues.tokens, "think"),
)


def detect(clues: Clues, tool_format: str = AUTO, reasoning_format: str = AUTO) -> Format:
    """The format of a checkpoint. Raises `ModelError` for an invalid response template, and for unknown names."""
    own = clues.response_template
    own_fields = (own or {}).get("fields", {})
    if not isinstance(own_fields, Mapping):
        kind = type(own_fields).__name__
        raise ModelError(f"tokenizer_config.json: response_template.fields must be an object, but is a {kind}")
    declared = frozenset(own_fields)
    has_calls, has_reasoning = "tool_calls" in declared, not declared.isdisjoint(_REASONING_FIELDS)
    derived = clues.derived
    tools = _chosen("tool_format", tool_format, CALLS, _CALL_RULES, clues, is_own=has_calls)
    if tool_format == AUTO and derived.calls is not None and not has_calls and tools != HARMONY:
        tools = DERIVED
    elif tool_format == AUTO and tools in CALLS and not _may_be(tools, derived):
        tools = NONE
    reasoning = _chosen("reasoning_format", reasoning_format, REASONING, _REASONING_RULES, clues, is_own=has_reasoning)
    by_hand = REASONING.get(reasoning)
    knows_more = reasoning == HARMONY or (by_hand is not None and by_hand.knows_more)
    if reasoning_format == AUTO and derived.reasoning is not None and not (has_reasoning or knows_more):
        reasoning = DERIVED
    if (HARMONY in (tools, reasoning) and not {tools, reasoning} <= {HARMONY, NONE, OWN}) or (
        tools == HARMONY and reasoning == NONE
    ):
        raise ModelError(
            f"--tool-format {tools} and --reasoning-format {reasoning} do not go together: calls and reasoning of "
            f"{HARMONY} are parts of one format; choose {HARMONY} for both, or none for the calls"
        )
    source = _FROM_SETTINGS if {tool_format, reasoning_format} != {AUTO} else _FROM_OWN if own else _FROM_TEMPLATE
    return _composed(own or {}, tools, reasoning, source, derived)


def composed(derived: Derived) -> Format:
    """The format that was derived, without anything written by hand."""
    tools = NONE if derived.calls is None else DERIVED
    reasoning = NONE if derived.reasoning is None else DERIVED
    return _composed({}, tools, reasoning, _FROM_TEMPLATE, derived)


def _may_be(name: str, derived: Derived) -> bool:
    """Whether the template's calls, if it shows any, are of this format. A wrong format is worse than none."""
    return name == HARMONY or CALLS[name].knows_more or derived.readable is None or name in derived.readable


def _chosen(
    setting: str, name: str, known: Mapping[str, object], rules: tuple[_Rule, ...], clues: Clues, *, is_own: bool
) -> str:
    if name == AUTO:
        return OWN if is_own else next((found for shows, found in rules if shows(clues)), NONE)
    if name != NONE and name not in known:
        flag = "--" + setting.replace("_", "-")
        raise ModelError(f"{flag} {name} is not known: expected {AUTO}, {NONE} or one of {', '.join(sorted(known))}")
    return name


def _composed(own: Mapping[str, object], tools: str, reasoning: str, source: str, derived: Derived) -> Format:
    """A format that combines the chosen formats of calls and of reasoning."""
    own_fields = own.get("fields", {})
    assert isinstance(own_fields, Mapping)
    is_whole = OWN in (tools, reasoning)
    fields: dict[str, object] = dict(own_fields) if is_whole else {"content": {"content": "text"}}
    calls = CALLS.get(tools, CallFormat(None))
    if tools == DERIVED:
        assert derived.calls is not None
        calls = derived.calls
    thoughts = derived.reasoning if reasoning == DERIVED else REASONING.get(reasoning)
    if tools != OWN:
        fields.pop("tool_calls", None)
        fields |= {} if calls.field is None else {"tool_calls": calls.field}
    if reasoning != OWN:
        for name in _REASONING_FIELDS:
            fields.pop(name, None)
        fields |= {} if thoughts is None else thoughts.fields
    if not is_whole and HARMONY not in (tools, reasoning):
        fields |= derived.others
    anchors = derived.anchors or START_ANCHORS
    spec = {**own, "fields": fields} if is_whole else {"start_anchor": list(anchors), "fields": fields}
    found = Format.of_template(spec, tools, reasoning, source, calls.keys)
    regions = tuple(replace(region, is_bare=calls.is_bare and region.is_python) for region in found.regions)
    return replace(
        found,
        regions=regions,
        tool_name=tools if found.reads_calls or calls.is_bare else NONE,
        reasoning_name=reasoning if found.reads_reasoning else NONE,
        is_bare=calls.is_bare,
        bare_keys=calls.keys,
        call_syntax=_own_calls(own_fields.get("tool_calls")) if tools == OWN else calls.syntax,
        reasoning_syntax=_own_reasoning(own_fields) if reasoning == OWN else thoughts.syntax if thoughts else None,
        has_short_ids=calls.has_short_ids,
        why_not_derived=derived.why_no_calls,
        ends=calls.ends,
    )


def _own_calls(field: object) -> CallSyntax | None:
    """The call syntax of a template's own `tool_calls` field; None unless its markers are literals around JSON."""
    if not isinstance(field, Mapping) or field.get("content") != "json" or field.get("content_args"):
        return None
    begin, end = field.get("open"), field.get("close", "")
    if not (isinstance(begin, str) and isinstance(end, str)):
        return None
    # All published templates of this kind spell a call between the markers like this.
    return CallSyntax(begin, f'{begin}\n{{"name": "', '", "arguments": ', f"}}\n{end}" if end else "}")


def _own_reasoning(fields: Mapping[str, object]) -> ReasoningSyntax | None:
    for name in _REASONING_FIELDS:
        field = fields.get(name)
        if isinstance(field, Mapping):
            begin, end = field.get("open"), field.get("close")
            return ReasoningSyntax(begin, end) if isinstance(begin, str) and isinstance(end, str) else None
    return None


NO_FORMAT = Format(NONE, NONE, _FROM_TEMPLATE)
PLAIN_CALLS = replace(NO_FORMAT, tool_name=PLAIN, is_bare=True, call_syntax=PLAIN_SYNTAX)
