"""Fills the tables of docs/api.md and docs/metrics.md from the tables that the server itself is made of: `make docs`.

The prose of the pages is written by hand. Tables between `<!-- table: NAME -->` and `<!-- end -->` are written here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from inferd.server.endpoints import routes
from inferd.server.endpoints.schema_words import fields_within, options_of, rule_of
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.errors import table
from inferd.server.observability.metrics import Metrics
from inferd.server.schema import (
    anthropic_blocks,
    anthropic_parts,
    anthropic_tools,
    chat,
    chat_messages,
    notices,
    request_model,
    response_items,
    response_options,
    response_parts,
    response_tools,
    strict_json,
    structured,
    tool_choice,
    unread,
)
from inferd.server.schema.answers.infill import Infill
from inferd.server.schema.answers.scores import Prediction, Rank, Reranked
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.chat import TOOL_WITHOUT_EFFECT, ChatRequest
from inferd.server.schema.classes import ClassifyRequest, PredictRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.embeddings import EmbeddingRequest
from inferd.server.schema.generation import OUTPUT, PROMPT, REQUEST, SAMPLING, STOPPING, TOOLS
from inferd.server.schema.infill import InfillRequest
from inferd.server.schema.json_schema import Schema, inlined, schema_of, schemas_of_answers
from inferd.server.schema.request_model import RequestModel
from inferd.server.schema.responses import InputItemsQuery, ResponsesRequest, RetrieveQuery
from inferd.server.schema.scores import RerankRequest, ScoreRequest
from inferd.server.schema.sleep import SleepingQuery, SleepQuery, WakeQuery
from inferd.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

PAGES = (Path("docs/api.md"), Path("docs/metrics.md"))

_MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_GENERATING: dict[str, type[RequestModel]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "infill": InfillRequest,
    "responses": ResponsesRequest,
}
_ANTHROPIC: dict[str, type[RequestModel]] = {"messages": MessagesRequest, "count_tokens": CountTokensRequest}
_BLOCKS = {
    "`user`": anthropic_blocks.USER_BLOCKS,
    "`assistant`": anthropic_blocks.ASSISTANT_BLOCKS,
    "`system`": anthropic_blocks.SYSTEM_BLOCKS,
    "`tool_result`": anthropic_blocks.RESULT_BLOCKS,
}
_TYPES = {
    "`source`": anthropic_blocks.SOURCES,
    "`tool` of `tool_addition`, `tool_removal`": anthropic_blocks.TOOL_CHANGES,
    "`tool_choice`": anthropic_tools.CHOICES,
    "`thinking`": anthropic_parts.THINKING,
    "`context_management.edits`": anthropic_parts.EDITS,
}
_EMBEDDING: dict[str, type[RequestModel]] = {"embeddings": EmbeddingRequest}
_JUDGING: dict[str, type[RequestModel]] = {
    "rerank": RerankRequest, "score": ScoreRequest, "classify": ClassifyRequest, "predict": PredictRequest
}  # fmt: skip
_READING: dict[str, type[RequestModel]] = {"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
_QUERIES: dict[str, type[RequestModel]] = {"/v1/responses/{id}": RetrieveQuery, "input_items": InputItemsQuery}
_SLEEPS: dict[str, type[RequestModel]] = {"/sleep": SleepQuery, "/wake_up": WakeQuery, "/is_sleeping": SleepingQuery}
_NESTED_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "messages[]": chat_messages.MESSAGE_WITHOUT_EFFECT,
    "messages[].content[]": chat_messages.PART_WITHOUT_EFFECT,
    "messages[].tool_calls[]": chat_messages.CALL_WITHOUT_EFFECT,
    "messages[].tool_calls[].function": chat_messages.CALLED_FUNCTION_WITHOUT_EFFECT,
    "tools[]": TOOL_WITHOUT_EFFECT,
    "input[]": response_parts.ITEM_WITHOUT_EFFECT,
    "input[].content[]": chat_messages.PART_WITHOUT_EFFECT,
}
_ANSWERS: dict[str, Any] = {
    "chat": routes.CHAT.answer, "chat stream": routes.CHAT.events, "completions": routes.COMPLETIONS.answer,
    "completions stream": routes.COMPLETIONS.events, "infill": Infill,
    "infill stream": routes.INFILL.events, "/props": routes.PROPS.answer, "responses": routes.RESPONSES.answer,
    "messages": routes.MESSAGES.answer, "embeddings": routes.EMBEDDINGS.answer, "rerank": Reranked, "TEI rerank": Rank,
    "score": routes.SCORES[0].answer, "classify": routes.CLASSIFIES[0].answer, "predict": Prediction,
    "/tokenize": routes.TOKENIZE.answer,
    "/v1/models": routes.MODELS.answer, "/state": routes.STATE.answer,
}  # fmt: skip
_Abouts = Mapping[str, str]
_COLUMNS = ("Field", "Type and bounds", "Default", "What it does", "APIs")


def fill(page: str) -> str:
    """`page` with every marked table written again. Raises `KeyError` if a mark names no table."""
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", page)


# --- The tables -------------------------------------------------------------------------------------------------------


def _routes() -> str:
    rows = []
    for route in routes.ROUTES:
        about = f"Not served (501). {route.missing}" if route.missing else route.about
        rows.append((f"`{route.method}`", f"`{route.path.replace(':path}', '}')}`", route.access.value, about))
    return _table(("Method", "Path", "Access", "What it does"), rows)


def _area(area: str) -> Callable[[], str]:
    return lambda: _table(_COLUMNS, _rows(_GENERATING, lambda field: field["x-has-effect"] and field["x-area"] == area))


def _rows(types: dict[str, type[RequestModel]], is_wanted: Callable[[Schema], bool]) -> Iterator[tuple[str, ...]]:
    """One row for a field, or one for each of the types that declare it differently."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for api, fields in types.items():
        schema = schema_of(fields)
        for name in fields.names:
            field = schema["properties"][name]
            if is_wanted(field):
                unset = "required" if name in schema["required"] else field["x-unset"]
                rows.setdefault((f"`{name}`", rule_of(field), unset, field["description"]), []).append(api)
    names = list(dict.fromkeys(row[0] for row in rows))
    for row, apis in sorted(rows.items(), key=lambda item: (item[0][2] != "required", names.index(item[0][0]))):
        yield (*row, ", ".join(apis))


def _answers() -> str:
    """Fields of answers that have a description."""
    schemas, objects = schemas_of_answers(list(_ANSWERS.values()), "{model}")
    rows: dict[tuple[str, str, str], list[str]] = {}
    for api, schema in zip(_ANSWERS, schemas, strict=True):
        for path, field in fields_within(inlined(schema, objects), ""):
            if "description" in field:
                about = " ".join(field["description"].split())
                row = (f"`{path}`", " or ".join(map(rule_of, options_of(field))), about)
                rows.setdefault(row, []).append(api)
    return _table(("Field", "Type", "What it is", "Answers"), ((*row, ", ".join(apis)) for row, apis in rows.items()))


def _embeddings() -> str:
    rows = _rows(_EMBEDDING, lambda field: field["x-has-effect"])
    return _table(_COLUMNS[:-1], (row[:-1] for row in rows))


def _without_effect(types: dict[str, type[RequestModel]]) -> str:
    rows = _rows(types, lambda field: not field["x-has-effect"])
    return _table(
        ("Field", "Type and bounds", "Note", "APIs"), ((name, rule, about, api) for name, rule, _, about, api in rows)
    )


def _nested_without_effect() -> str:
    rows = ((f"`{where}`", ", ".join(f"`{key}`" for key in keys)) for where, keys in _NESTED_WITHOUT_EFFECT.items())
    return _table(("Object", "Keys"), rows)


def _names(column: str, types: dict[str, type[RequestModel]], about_of: Callable[[type[RequestModel]], _Abouts]) -> str:
    """One row for a name that is no field of its own, or one for each of the types that say another thing of it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for api, fields in types.items():
        for name, about in about_of(fields).items():
            rows.setdefault((f"`{name}`", about), []).append(api)
    return _table(("Field", column, "APIs"), ((*row, ", ".join(apis)) for row, apis in rows.items()))


def _refused(types: dict[str, type[RequestModel]]) -> str:
    return _names("Way out", types, lambda fields: fields.refused)


def _offered(types: dict[str, type[RequestModel]]) -> str:
    return _names("Note", types, lambda fields: {name: f"Not used: {about}." for name, about in fields.offered.items()})


def _of_kinds(name: str, rows: Mapping[str, request_model.Row]) -> str:
    return _table((name, "Kind", "What the server does"), ((f"`{t}`", row.kind, row.about) for t, row in rows.items()))


def _by_place(column: str, places: Mapping[str, Mapping[str, request_model.Row]]) -> str:
    """One row for a type, or one for each of the places that take it differently."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for place, types in places.items():
        for name, row in types.items():
            rows.setdefault((f"`{name}`", row.kind, row.about), []).append(place)
    names = list(dict.fromkeys(name for name, _, _ in rows))
    ordered = sorted(rows.items(), key=lambda item: names.index(item[0][0]))
    cells = ((name, ", ".join(places), kind, about) for (name, kind, about), places in ordered)
    return _table(("Type", column, "Kind", "What the server does"), cells)


_CHAT_PLACES: Mapping[str, Mapping[str, request_model.Row]] = {
    "`tools`": chat.TOOLS_TAKEN,
    "`format` of a custom tool": chat.TEXT_FORMATS,
    "`tool_choice`": tool_choice.CHOICES,
    "`response_format`": structured.FORMATS,
    "`tool_calls` of a message": chat_messages.CALLS,
}


_RESPONSE_PLACES: Mapping[str, Mapping[str, request_model.Row]] = {
    "`environment` of `shell`": response_tools.ENVIRONMENTS,
    "`format` of a custom tool": chat.TEXT_FORMATS,
    "`tool_choice`": response_options.CHOICES,
    "`text.format`": response_options.FORMATS,
    "`include`": response_options.INCLUDES,
    **response_parts.PARTS,
    "an item": response_items.WITHIN,
}


def _aliases() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for api, fields in (_GENERATING | _JUDGING).items():
        for alias, name in fields.aliases.items():
            rows.setdefault((f"`{alias}`", f"`{name}`"), []).append(api)
    return _table(("Name", "Is another name of", "APIs"), ((*row, ", ".join(apis)) for row, apis in rows.items()))


def _errors() -> str:
    rows = sorted(
        (str(row.status), f"`{row.type}`", f"`{row.wire_code}`" if row.wire_code else "null", row.about)
        for row in table.ROWS.values()
    )
    return _table(("HTTP", "`type`", "`code`", "When"), rows)


def _messages_errors() -> str:
    """The statuses of the table of errors, with what Anthropic makes of them."""
    seen = {
        anthropic_errors.OVERLOADED if status == 503 else status: kind
        for status, kind in anthropic_errors.TYPES.items()
    }
    return _table(("HTTP", "`type`"), ((str(status), f"`{kind}`") for status, kind in seen.items()))


def _limits() -> str:
    rows = (
        ("Depth", strict_json.MAX_DEPTH, "levels of nested arrays and objects"),
        ("Arrays", strict_json.MAX_ARRAYS, ""),
        ("Objects", strict_json.MAX_OBJECTS, ""),
        ("Keys", strict_json.MAX_KEYS, "in all objects together"),
        ("Strings", strict_json.MAX_STRINGS, "including keys; only the size of the body bounds their length"),
        ("Values", strict_json.MAX_VALUES, "such as the token ids of prompts"),
        ("Escapes", strict_json.MAX_ESCAPES, "such as `\\n` and `\\u00e9`"),
    )
    return _table(("In one body", "At most", ""), ((name, f"{limit:,}", note) for name, limit, note in rows))


def _notices() -> str:
    return _table(("Notice", "What it says"), ((f"`{name}`", about) for name, about in notices.ABOUT.items()))


def _metrics() -> str:
    """The metrics of a server that has not served anything yet."""
    page = Metrics(model_name="").render()[0].decode()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE))
    metrics = re.findall(r"^# HELP (inferd_\w+) (.+)$", page, re.MULTILINE)
    return _table(
        ("Metric", "Type", "What it measures"), ((f"`{name}`", types[name], about) for name, about in metrics)
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "routes": _routes,
    "request": _area(REQUEST),
    "prompt": _area(PROMPT),
    "sampling": _area(SAMPLING),
    "stopping": _area(STOPPING),
    "output": _area(OUTPUT),
    "tools": _area(TOOLS),
    "embeddings": _embeddings,
    "scores": lambda: _table(_COLUMNS, _rows(_JUDGING, lambda field: field["x-has-effect"])),
    "responses-query": lambda: _table(_COLUMNS, _rows(_QUERIES, lambda field: True)),
    "sleep-query": lambda: _table(_COLUMNS, _rows(_SLEEPS, lambda field: True)),
    "tokens": lambda: _table(_COLUMNS, _rows(_READING, lambda field: True)),
    "messages": lambda: _table(_COLUMNS, _rows(_ANTHROPIC, lambda field: field["x-has-effect"])),
    "messages-without-effect": lambda: _without_effect(_ANTHROPIC),
    "messages-refused": lambda: _refused(_ANTHROPIC),
    "messages-offered": lambda: _offered(_ANTHROPIC),
    "messages-tools": lambda: _of_kinds("Type of tool", anthropic_tools.TOOLS),
    "messages-blocks": lambda: _by_place("In", _BLOCKS),
    "messages-types": lambda: _by_place("Of", _TYPES),
    "messages-errors": _messages_errors,
    "without-effect": lambda: _without_effect(_GENERATING | _EMBEDDING | _JUDGING),
    "nested-without-effect": _nested_without_effect,
    "refused": lambda: _refused(_GENERATING | _EMBEDDING | _JUDGING),
    "offered": lambda: _offered(_GENERATING | _EMBEDDING),
    "kinds": lambda: _table(("Kind", "What it means"), ((kind, about) for kind, about in request_model.ABOUT.items())),
    "response-tools": lambda: _of_kinds("Type of tool", response_tools.TOOLS),
    "response-items": lambda: _of_kinds("Type of item", response_items.ITEMS),
    "response-types": lambda: _by_place("Place", _RESPONSE_PLACES),
    "chat-types": lambda: _by_place("Place", _CHAT_PLACES),
    "chat-parts": lambda: _by_place("Role of the message", unread.CHAT_PARTS),
    "aliases": _aliases,
    "answers": _answers,
    "errors": _errors,
    "notices": _notices,
    "limits": _limits,
    "metrics": _metrics,
}


def main() -> int:
    """Rewrites the pages, or those whose paths are given."""
    for page in map(Path, sys.argv[1:] or PAGES):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
