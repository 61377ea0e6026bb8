"""Whether the inputs of custom tools follow their grammars: calls of a small real model at temperature 1.

    python -P benchmarks/custom_tool_calls.py [--calls 100] [--tokens 400] [--model smollm2] [--tool-format auto]
        [--tool apply_patch] [--speculative ngram] [--kill-every 20]

It starts the server, and asks for calls of one tool: with its grammar, and with the same grammar only described. The
judges are written here, apart from the server's code and from llguidance. A call that `max_tokens` has cut is counted
apart if its text is the beginning of a right one, and is wrong otherwise. `--kill-every` kills the engine at that
interval in seconds: requests go on with the next engine.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import regex  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.daemon import Daemon

_NUM_AT_ONCE = 8
_DRAFTS = ("inferd_draft_tokens_total", "inferd_accepted_draft_tokens_total")
_READY_WITHIN_S = 300.0
_ENGINE = "inferd.engine.process.boot"
"""A part of an engine's command line."""

PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
"""The grammar of Codex CLI's tool `apply_patch`."""
_LINE = r"[^\n]*\n"
_CHANGE = rf"(?:(?:@@(?: [^\n]+)?\n|[+\- ]{_LINE})+(?:\*\*\* End of File\n)?)?"
_HUNKS = (
    rf"\*\*\* Add File: [^\n]+\n(?:\+{_LINE})+",
    r"\*\*\* Delete File: [^\n]+\n",
    rf"\*\*\* Update File: [^\n]+\n(?:\*\*\* Move to: [^\n]+\n)?{_CHANGE}",
)
_PATCHES = regex.compile(rf"\*\*\* Begin Patch\n(?:{'|'.join(_HUNKS)})+\*\*\* End Patch\n?")

TIMESTAMP = r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01]) (?:[01]\d|2[0-3]):[0-5]\d$"
_TIMESTAMPS = regex.compile(r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01]) ([01][0-9]|2[0-3]):[0-5][0-9]")

SUM = r"""start: expr "\n"
expr: term (("+" | "-") term)*
term: factor (("*" | "/") factor)*
factor: INT | "(" expr ")"
%import common (INT, WS_INLINE)
%ignore WS_INLINE
"""


def is_sum(text: str) -> bool:
    """Whether a text is a line of arithmetic: brackets are taken out from the inside."""
    line, end = text[:-1], text[-1:]
    if end != "\n" or re.search(r"[^0-9+\-*/() \t]|\d[ \t]+\d", line):
        return False
    line, num_taken = re.sub(r"[ \t]", "", line), 1
    while num_taken:
        line, num_taken = re.subn(r"(?<![\d)])\(\d+(?:[+\-*/]\d+)*\)(?![\d(])", "0", line)
    return re.fullmatch(r"\d+(?:[+\-*/]\d+)*", line) is not None


def begins_sum(text: str) -> bool:
    """Whether a text is the beginning of a line of arithmetic: with a number and brackets it is one."""
    end = ")" * (text.count("(") - text.count(")")) + "\n"
    return is_sum(text + end) or is_sum(f"{text}1{end}")


@dataclass(frozen=True, slots=True)
class Case:
    """One tool, a question that should lead to its call, and the judge of its input."""

    name: str
    question: str
    grammar: Mapping[str, str]
    is_right: Callable[[str], bool]
    is_beginning: Callable[[str], bool]
    """Whether a text is the beginning of a right one."""


CASES = (
    Case(
        "apply_patch",
        "Add a file hello.py that prints hello, by a patch.",
        {"syntax": "lark", "definition": PATCH},
        lambda text: _PATCHES.fullmatch(text) is not None,
        lambda text: _PATCHES.fullmatch(text, partial=True) is not None,
    ),
    Case(
        "timestamp",
        "Save the timestamp of August 7th 2025 at 10 in the morning.",
        {"syntax": "regex", "definition": TIMESTAMP},
        lambda text: _TIMESTAMPS.fullmatch(text) is not None,
        lambda text: _TIMESTAMPS.fullmatch(text, partial=True) is not None,
    ),
    Case(
        "sum", "Add four and five, then double the result.", {"syntax": "lark", "definition": SUM}, is_sum, begins_sum
    ),
)


def called(url: str, case: Case, seed: int, max_tokens: int, *, is_enforced: bool) -> str:
    """The outcome of one call: "right", "wrong", or "cut"."""
    tool: dict[str, Any] = {
        "name": case.name,
        "description": f"Takes a text of this grammar:\n{case.grammar['definition']}",
    }
    if is_enforced:
        tool |= {"description": "Takes a text.", "format": {"type": "grammar", "grammar": dict(case.grammar)}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": case.question}],
        "tools": [{"type": "custom", "custom": tool}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": seed,
        "max_completion_tokens": max_tokens,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600.0)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] == "length":
        return "cut" if all(case.is_beginning(call["custom"]["input"]) for call in calls) else "wrong"
    return "right" if len(calls) == 1 and case.is_right(calls[0]["custom"]["input"]) else "wrong"


class Killer:
    """Kills the server's engine again and again, until the block ends."""

    def __init__(self, server: int, every_s: float | None) -> None:
        self.num_kills = 0
        self._server, self._every_s = psutil.Process(server), every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while self._every_s is not None and not self._is_over.wait(self._every_s):
            for child in self._server.children():
                if any(_ENGINE in word for word in child.cmdline()):
                    child.kill()
                    self.num_kills += 1


def _drafts(url: str) -> str:
    """The lines of the server's metrics that count drafts."""
    lines = httpx.get(f"{url}/metrics", timeout=60.0).text.splitlines()
    return "\n".join(line for line in lines if line.startswith(_DRAFTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls of each tool, in each way")
    parser.add_argument("--tokens", type=int, default=400, help="most tokens of one answer")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tool-format", default="auto")
    parser.add_argument("--tool", choices=[case.name for case in CASES], help="this tool alone")
    parser.add_argument("--speculative", help="the server's option of that name")
    parser.add_argument("--kill-every", type=float, metavar="SECONDS")
    args = parser.parse_args()
    command = ["-m", "inferd.server.cli", "serve", args.model, "--served-model-name", "m"]
    command += ["--tool-format", args.tool_format]
    command += ["--speculative", args.speculative] if args.speculative else []
    cases = [case for case in CASES if args.tool in {None, case.name}]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon((sys.executable, *command), Path(folder) / "server.log", _READY_WITHIN_S)
        try:
            for case in cases:
                for is_enforced in (True, False):

                    def ask(seed: int, case: Case = case, is_enforced: bool = is_enforced) -> str:
                        return called(daemon.url, case, seed, args.tokens, is_enforced=is_enforced)

                    with Killer(daemon.pid, args.kill_every) as killer, ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
                        found: Counter[str] = Counter()
                        for outcome in pool.map(ask, range(args.calls)):
                            found[outcome] += 1
                            print(f"{case.name} {dict(found)}, {killer.num_kills} kills", end="\r", file=sys.stderr)
                    way = "enforced" if is_enforced else "described"
                    counts = [str(found[outcome]) for outcome in ("right", "wrong", "cut")]
                    rows.append((case.name, way, *counts, str(killer.num_kills)))
                    print(*rows[-1], flush=True)
        finally:
            print(_drafts(daemon.url))
            daemon.stop()
    print(tables.markdown(("tool", "grammar", "right", "wrong", "cut", "kills"), rows))


if __name__ == "__main__":
    main()
