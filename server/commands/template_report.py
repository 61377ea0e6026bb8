"""`inferd doctor --template FILE`: what a chat template shows, and the format that is derived from it."""

from __future__ import annotations

import json
from pathlib import Path

from inferd.engine.api.errors import ConfigError
from inferd.server.text.template import ChatTemplate
from inferd.server.tools.detect import Clues, Derived, detect
from inferd.server.tools.fallback import ToolSupport
from inferd.server.tools.format import DERIVED, Format


def run(path: Path, *, as_json: bool) -> int:
    """Print the report. Raises `ConfigError` for a file that cannot be read, `ModelError` and `RenderError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        way_out = "give the file of a chat template, such as chat_template.jinja"
        raise ConfigError(f"--template {path}: {error}; {way_out}") from None
    template = ChatTemplate(text, {})
    try:
        support = template.probe()
        derived = template.derive(support)
    finally:
        template.close()
    found = detect(Clues(chat_template=text, shows_tools=support.tools, derived=derived))
    lines = dict(_lines(support, derived, found))
    if as_json:
        print(json.dumps(lines, indent=2))
    else:
        print("\n".join(f"{name:<10} {value}" for name, value in lines.items()))
    return 0


def _lines(support: ToolSupport, derived: Derived, found: Format) -> list[tuple[str, str]]:
    parts = {"tools": support.tools, "calls": support.calls, "results": support.results, "system": support.system}
    shown = ", ".join(name for name, is_shown in parts.items() if is_shown) or "no part of tool use"
    lines = [("shows", shown)]
    if found.tool_name == DERIVED:
        lines.append(("calls", f"derived: {found.written_call}"))
    else:
        lines.append(("calls", f"{found.tool_name}; none derived: {derived.why_no_calls}"))
    if found.reasoning_name == DERIVED:
        lines.append(("reasoning", f"derived: {found.written_reasoning}"))
    else:
        why = f"; none derived: {derived.why_no_reasoning}" if derived.why_no_reasoning else ""
        lines.append(("reasoning", f"{found.reasoning_name}{why}"))
    lines.append(("turns", f"begin behind {' or '.join(map(json.dumps, derived.anchors)) or 'an unknown text'}"))
    lines.append(("probes", f"{derived.num_rendered} renderings"))
    return lines
