"""How a real model's tool calls end, and whether they are right: 30 questions about seven tools.

    python -P benchmarks/tool_questions.py [--model smollm2] [--way auto] [--way required] [--temperature 0]
        [--questions 30] [--tokens 160]

It starts the server and asks each question with `tool_choice` `auto` and `required`. Without `--temperature` the
model's default holds, with a fixed seed. The judges share no code with the server:

- `read`: the answer has a call. `unread`: it has none, but its text has JSON or Python that calls an offered tool.
- `ended`: the model ended the answer, not `max_tokens`.
- `number`, `tools`, `arguments`: as many calls as wanted, of the right tools, with the right arguments.
- `all`: the answer ended, and all of these are right.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.daemon import running

Matches = Callable[[object], bool]
_WAYS = ("auto", "required")
_COLUMNS = ("read", "unread", "ended", "number", "tools", "arguments", "all")


def _tool(name: str, description: str, *required: str, **properties: Mapping[str, object]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _text(description: str) -> Mapping[str, object]:
    return {"type": "string", "description": description}


TOOLS = (
    _tool(
        "get_weather",
        "Get the current weather of one city.",
        "city",
        city=_text("Name of the city"),
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    ),
    _tool("calculate", "Compute an arithmetic expression.", "expression", expression=_text("For example 3 * (4 + 5)")),
    _tool(
        "send_email",
        "Send an e-mail.",
        "to",
        "subject",
        "body",
        to=_text("Address of the recipient"),
        subject=_text("Subject line"),
        body=_text("Text of the e-mail"),
    ),
    _tool("search_web", "Search the web.", "query", query=_text("Words to search for")),
    _tool("read_file", "Read a text file.", "path", path=_text("Path of the file")),
    _tool("list_files", "List the files of a folder.", "path", path=_text("Path of the folder")),
    _tool("roll_die", "Roll one die, once.", "sides", sides={"type": "integer", "description": "Number of sides"}),
)
NAMES = tuple(tool["function"]["name"] for tool in TOOLS)


def like(pattern: str) -> Matches:
    """Whether a value holds a text of this pattern, in any case."""
    return lambda value: re.search(pattern, str(value), re.IGNORECASE) is not None


def equals(wanted: float) -> Matches:
    """Whether a value is an arithmetic expression with this result."""

    def matches(value: object) -> bool:
        try:
            return abs(_value(ast.parse(str(value).replace("^", "**").strip(), mode="eval").body) - wanted) < 0.01
        except (ValueError, SyntaxError, ZeroDivisionError, OverflowError):
            return False

    return matches


_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, power: float(base) ** power,
}


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no arithmetic")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One call that a question needs."""

    tool: str
    arguments: Mapping[str, Matches]


def weather(city: str, **others: Matches) -> Wanted:
    return Wanted("get_weather", {"city": like(city), **others})


def sum_of(result: float) -> Wanted:
    return Wanted("calculate", {"expression": equals(result)})


def mail(to: str, about: str) -> Wanted:
    return Wanted("send_email", {"to": like(re.escape(to)), "body": like(about)})


def search(words: str) -> Wanted:
    return Wanted("search_web", {"query": like(words)})


def path_of(tool: str, path: str) -> Wanted:
    return Wanted(tool, {"path": like(rf"^(\./)?{re.escape(path)}/?$")})


def die(sides: int) -> Wanted:
    return Wanted("roll_die", {"sides": lambda value: value == sides})


QUESTIONS: tuple[tuple[str, tuple[Wanted, ...]], ...] = (
    ("What is the weather in Paris?", (weather("paris"),)),
    ("Do I need an umbrella in Bergen right now?", (weather("bergen"),)),
    ("How warm is it in Chicago, in Fahrenheit?", (weather("chicago", unit=like("fahrenheit")),)),
    ("Is it snowing in Sapporo?", (weather("sapporo"),)),
    ("What is 17 times 23?", (sum_of(391),)),
    ("Compute (12.5 + 7.5) / 4 for me.", (sum_of(5),)),
    ("A ticket costs 48 euros. How much do 7 tickets cost?", (sum_of(336),)),
    ("How many seconds do 3 days have?", (sum_of(259_200),)),
    ("What is 15 percent of 260?", (sum_of(39),)),
    ("Subtract 389 from 1024.", (sum_of(635),)),
    ("Write an e-mail to ana@example.com: the meeting moves to Friday.", (mail("ana@example.com", "friday"),)),
    ("Tell bob@example.org by mail that the printer works again.", (mail("bob@example.org", "printer"),)),
    ("Invite kim@example.net to lunch at noon by e-mail.", (mail("kim@example.net", "lunch"),)),
    ("Mail sales@example.com and ask for the price of 20 chairs.", (mail("sales@example.com", "chairs"),)),
    ("Search the web for the population of Iceland.", (search("iceland"),)),
    ("Find pages about how to prune apple trees.", (search("apple"),)),
    ("Look up online who won the chess world championship in 1972.", (search("1972"),)),
    ("Google the opening hours of the Prado museum.", (search("prado"),)),
    ("Show me what is in the file notes.txt.", (path_of("read_file", "notes.txt"),)),
    ("Read src/main.py.", (path_of("read_file", "src/main.py"),)),
    ("Open /etc/hosts and tell me what it says.", (path_of("read_file", "/etc/hosts"),)),
    ("Which files are in the folder docs?", (path_of("list_files", "docs"),)),
    ("List everything in /var/log.", (path_of("list_files", "/var/log"),)),
    ("Roll a twenty-sided die.", (die(20),)),
    ("Throw a six-sided die for me.", (die(6),)),
    ("Roll two six-sided dice, each with a call of its own.", (die(6), die(6))),
    ("What is the weather in Rome, and what is it in Oslo?", (weather("rome"), weather("oslo"))),
    ("Read both a.txt and b.txt.", (path_of("read_file", "a.txt"), path_of("read_file", "b.txt"))),
    ("What is 8 times 9, and what is the weather in Lima?", (sum_of(72), weather("lima"))),
    (
        "List the files in tests, and read tests/conftest.py.",
        (path_of("list_files", "tests"), path_of("read_file", "tests/conftest.py")),
    ),
)


def asked(url: str, question: str, way: str, temperature: float | None, max_tokens: int, seed: int) -> dict[str, Any]:
    """One choice of the answer."""
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "tool_choice": way,
        "seed": seed,
        "max_completion_tokens": max_tokens,
    }
    body |= {} if temperature is None else {"temperature": temperature}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600.0)
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def judged(choice: Mapping[str, Any], wanted: tuple[Wanted, ...]) -> frozenset[str]:
    """The names in `_COLUMNS` that hold for an answer."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    found = {"ended"} if choice["finish_reason"] != "length" else set[str]()
    if not calls:
        return frozenset({*found, "unread"} if _holds_call(message.get("content") or "") else found)
    found.add("read")
    named = Counter(call["name"] for call in calls) == Counter(one.tool for one in wanted)
    found |= {"number"} if len(calls) == len(wanted) else set()
    found |= {"tools"} if named else set()
    if named and _fit([(call["name"], _object(call["arguments"])) for call in calls], wanted):
        found.add("arguments")
    return frozenset({*found, "all"} if found >= {"ended", "arguments"} else found)


def _holds_call(text: str) -> bool:
    names = "|".join(NAMES)
    return re.search(rf"""["']name["']\s*:\s*["']({names})["']|\b({names})\(|<function=({names})""", text) is not None


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _fit(calls: list[tuple[str, Mapping[str, object]]], wanted: tuple[Wanted, ...]) -> bool:
    """Whether each wanted call is a call of its own."""
    if not wanted:
        return True
    first, rest = wanted[0], wanted[1:]
    return any(
        name == first.tool
        and all(key in arguments and matches(arguments[key]) for key, matches in first.arguments.items())
        and _fit(calls[:i] + calls[i + 1 :], rest)
        for i, (name, arguments) in enumerate(calls)
    )


def _shown(choice: Mapping[str, Any]) -> str:
    """An answer on one line."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    written = [f"{call['name']} {call['arguments']}" for call in calls] or [repr(message.get("content"))]
    return " ".join(f"{choice['finish_reason']}: {'; '.join(written)}".split())[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--way", action="append", choices=_WAYS, help="this tool_choice alone")
    parser.add_argument("--temperature", type=float, help="default: the model's own")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the last so many, which need two calls")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of one answer")
    args = parser.parse_args()
    command = ["-m", "inferd.server.cli", "serve", args.model, "--served-model-name", "m", "--max-model-len", "4096"]
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running((sys.executable, *command), Path(folder) / "server.log", 300.0) as daemon,
    ):
        for way in args.way or _WAYS:
            counts: Counter[tuple[int, str]] = Counter()
            for seed, (question, wanted) in enumerate(QUESTIONS[-args.questions :]):
                choice = asked(daemon.url, question, way, args.temperature, args.tokens, seed)
                held = judged(choice, wanted)
                counts.update((len(wanted), name) for name in held)
                print(f"{way} {'right' if 'all' in held else '-----'} {question} {_shown(choice)}", flush=True)
            for num_calls in (1, 2):
                num = sum(len(wanted) == num_calls for _, wanted in QUESTIONS[-args.questions :])
                rows.append((way, str(num_calls), str(num), *(str(counts[num_calls, name]) for name in _COLUMNS)))
    print(tables.markdown(("tool_choice", "calls wanted", "questions", *_COLUMNS), rows))


if __name__ == "__main__":
    main()
