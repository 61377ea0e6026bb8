"""Finds words that a reader stumbles over: what a program can see of the rules in CONTRIBUTING.md, "Words".

`python -m tests.arch.words [FOLDER ...]` lists every finding.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

MAX_WORDS = 30
"""Most words of one sentence. 25 is the rule; a list or a formula may need some more."""

_OPENING = re.compile(r"(Of|What|Who|Whom|Whose)\b(?!.*\?)")
_PLACES = (
    "place|places|position|positions|point|points|file|files|folder|line|lines|column|row|rows|block|blocks|slot|slots|"
    "address|addresses|machine|machines|host|page|section|level|boundary|end|index|offset|bucket|branch|know|knows|see|"
    "sees|say|says|show|shows|find|finds|from|to|is|are|exactly|anywhere|everywhere|memory|bytes|part|parts|field|"
    "table|list|document|process|device|step|layer"
)
_WHERE = re.compile(r"(\w+)?\W*\b[Ww]here\b")
_COINED = re.compile(
    r"\b(Seats|Twins|Outlook|Spare|rooms?\b(?= (of|may|imports))|whosoever|reckon\w*|hereby|thereof|whereof)\b"
    r"|\b[Ww]hoever\b"
)
_ACTORLESS = re.compile(r"\b(is|are|was|were|be|been|being) (told(?! apart)|said|owed|held against|asked for)\b")
_INVERTED = re.compile(r"\bNor\b|(^|[.:;] )(So|Such) (is|are|do|does|did|was|were|has|have|can)\b", re.MULTILINE)
_PATTERNS = {
    "word of our own": _COINED,
    "passive without its actor": _ACTORLESS,
    "subject behind its verb": _INVERTED,
}
_CODE = re.compile(r"\"where\"|``[^`]*``|`[^`]*`|https?://\S+")
_ONE_LITERAL = re.compile(rb"[a-zA-Z]*(\"\"\"|''')(?:(?!\1).)*\1", re.DOTALL)
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|Fig|No|approx)\.")


class Finding(NamedTuple):
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def findings(path: Path) -> list[Finding]:
    """Every finding in one Python or Markdown file."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    texts = _of_python(path) if path.suffix == ".py" else _of_markdown(path)
    return [Finding(name, line, rule, told) for line, kind, text in texts for rule, told in _judged(kind, text)]


def _judged(kind: str, text: str) -> Iterator[tuple[str, str]]:
    plain = _ABBREVIATIONS.sub(r"\1", _CODE.sub("x", text))
    if kind == "docstring" and _OPENING.match(plain):
        yield "opens without its subject", plain.split("\n")[0][:80]
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", plain):
        for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph):
            num_words = len([word for word in sentence.split() if re.search(r"\w", word)])
            if num_words > MAX_WORDS:
                yield f"sentence of {num_words} words", " ".join(sentence.split())[:100]
    for match in _WHERE.finditer(plain):
        if not re.fullmatch(_PLACES, (match[1] or "").lower()):
            yield (
                '"where" for "if" (or name the place)',
                " ".join(plain[max(0, match.start() - 30) : match.end() + 30].split()),
            )
    line = " ".join(plain.split())
    for rule, pattern in _PATTERNS.items():
        for match in pattern.finditer(line):
            yield rule, line[max(0, match.start() - 30) : match.end() + 30]


def _of_python(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of every docstring, doc of a field, and comment."""
    source = path.read_text()
    strings = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            strings.append(node)
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield statement.lineno, "docstring", text
    comments: list[tuple[int, str]] = []
    for number, comment in _comments(source, strings):
        if not re.match(r"# (fmt|noqa|type|mypy|--)|#!", comment):
            text = comment.lstrip("#: ").rstrip()
            if comments and comments[-1][0] + comments[-1][1].count("\n") + 1 == number:
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{text}")
            else:
                comments.append((number, text))
    for line, text in comments:
        yield line, "comment", text


def _comments(source: str, strings: Sequence[ast.expr]) -> list[tuple[int, str]]:
    """(line, comment) of each comment: a # outside of all strings. Reading tokens takes five times as long, so that is
    only for a file in which a # may be a comment between two strings that Python joins."""
    lines = [line.encode() for line in source.split("\n")]
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for node in strings:
        first, last, end = node.lineno, node.end_lineno or node.lineno, node.end_col_offset or 0
        text = b"\n".join([*lines[first - 1 : last - 1], lines[last - 1][:end]])[node.col_offset :]
        if first < last and b"#" in text and not re.fullmatch(_ONE_LITERAL, text):
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        for line in range(first, last + 1):
            is_first, is_last = line == first, line == last
            spans[line].append((node.col_offset if is_first else 0, end if is_last else len(lines[line - 1])))
    found = []
    for line, content in enumerate(lines, start=1):
        for match in re.finditer(b"#", content) if b"#" in content else ():
            if not any(start <= match.start() < end for start, end in spans[line]):
                found.append((line, content[match.start() :].decode()))
                break
    return found


def _of_markdown(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of every paragraph, list entry and cell of a table outside of code."""
    text = re.sub(
        r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    block: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.startswith("|"):
            for cell in line.strip("|").split(" | "):
                yield number, "text", cell
        elif re.match(r"\s*([-*] |\d+\. |#|$)", line):
            if block:
                yield number - len(block), "text", "\n".join(block)
            block = [line] if line.strip() and not line.startswith("#") else []
        else:
            block.append(line)


def files(folder: str) -> list[Path]:
    """The Python and Markdown files below a folder of the repository, or the one file."""
    path = ROOT / folder
    return [path] if path.is_file() else sorted(each for kind in ("*.py", "*.md") for each in path.rglob(kind))


if __name__ == "__main__":
    found = [each for folder in sys.argv[1:] or ["."] for path in files(folder) for each in findings(path)]
    print(*found, sep="\n")
    print(f"{len(found)} findings")
