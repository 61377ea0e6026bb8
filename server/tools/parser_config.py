"""The rules by which the answers of one request are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inferd.server.tools.format import Format
from inferd.server.tools.pieces import Piece
from inferd.server.tools.second_look import Offer


class Parser(Protocol):
    """A parser of one answer (`answer_parser`)."""

    num_calls: int
    num_strays: int

    @property
    def is_in_call(self) -> bool: ...

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]: ...

    def copy(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """How the answers of one request are parsed."""

    format: Format
    with_calls: bool
    """Whether to look for calls."""
    tools: tuple[Mapping[str, object], ...] = ()
    prefill: str = ""
    """Beginning of the answer that is already in the prompt."""
    text_tools: frozenset[str] = frozenset()
    """Names of the tools that take a text instead of arguments."""
    max_calls: int | None = None
    """Number of calls after which the answer ends; None: no bound."""
    shows_reasoning: bool = True
    stops_reasoning: bool = False
    """Whether stop strings and stop tokens also work inside reasoning."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the parser must see."""
    names_function: bool = False
    """Whether `tool_choice` names the function to call."""
    only_calls: bool = False
    """Whether a grammar allows nothing but calls behind the reasoning. All other text belongs to a call then."""
    content_is_last: bool = False
    """Whether a grammar lets nothing follow the content, in which all markers are text then."""
    call_ends_reasoning: bool = True
    """Whether a call inside reasoning ends it. A grammar that has reasoning ends it by its marker alone."""
    offer: Offer | None = None
    """The tools whose calls are also read if the model writes them in another way than its own; None: none."""
    begun: Parser | None = field(default=None, compare=False, repr=False)
    """A parser that has read `prefill`, which `AnswerParser.of` copies."""

    @property
    def tool_names(self) -> frozenset[str]:
        functions = (tool.get("function") for tool in self.tools)
        return frozenset(str(function.get("name")) for function in functions if isinstance(function, Mapping))
