"""The result of deriving a format from a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.server.tools.builtin import CallFormat, Field, ReasoningFormat


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
