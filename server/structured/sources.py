"""Writes trees as source text: characters and regular expressions, terminals of Lark, and the lines of a grammar."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.server.structured.trees import Alt, Both, Char, Name, Node, Not, Repeat, Seq, Text, inner_of

TOO_LARGE = f"what enforces it is a grammar of more than {MAX_GRAMMAR_BYTES} characters, the most allowed"


class Lines:
    """The lines of a grammar, counted while they are written."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_chars = 0

    def add(self, line: str) -> None:
        """Raises ValueError once the grammar has more characters than allowed."""
        self._num_chars += len(line)
        if self._num_chars > MAX_GRAMMAR_BYTES:
            raise ValueError(TOO_LARGE)
        self._lines.append(line)

    def text(self) -> str:
        return "\n".join((*self._lines, ""))


_ALTERNATIVES, _SEQUENCE, _OPERAND = range(3)
"""Places of a tree in its source, by what need not be put in brackets there."""


def count_source(node: Repeat) -> str:
    """The operator for how often the item is repeated."""
    bounds = (node.low, node.high)
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return known.get(bounds) or f"{{{node.low},{'' if node.high is None else node.high}}}"


def regex_source(node: Node, place: int = _ALTERNATIVES) -> str:
    """A tree of characters as a regular expression."""
    if isinstance(node, Char):
        return f"(?i:{node.text})" if node.ignores_case else node.text
    if isinstance(node, Text):
        return f"(?:{node.source})" if place == _OPERAND else node.source
    if isinstance(node, Repeat):
        text = f"{regex_source(node.item, _OPERAND)}{count_source(node)}"
        return f"(?:{text})" if place == _OPERAND else text
    if isinstance(node, Alt):
        text = "|".join(regex_source(item, _SEQUENCE) for item in node.items)
        return text if place == _ALTERNATIVES else f"(?:{text})"
    assert isinstance(node, Seq)
    text = "".join(_joined(node.items))
    return f"(?:{text})" if place == _OPERAND or not text else text


def _joined(items: Iterable[Node]) -> Iterator[str]:
    """The sources of a sequence's items; letters of either case that follow each other share one group."""
    letters: list[str] = []
    for item in items:
        if isinstance(item, Char) and item.ignores_case:
            letters.append(item.text)
            continue
        if letters:
            yield f"(?i:{''.join(letters)})"
            letters = []
        yield regex_source(item, _SEQUENCE)
    if letters:
        yield f"(?i:{''.join(letters)})"


def terminal_source(node: Node, names: Mapping[str, str]) -> str:
    """A tree as the body of a terminal of Lark. `names`: what each `Name` is called there."""
    beyond: set[int] = set()
    _find_beyond(node, beyond)
    return _terminal_source(node, names, beyond, _ALTERNATIVES)


def _find_beyond(node: Node, found: set[int]) -> bool:
    """Finds the `id` of each tree that no regular expression stands for. Returns whether this is one."""
    inner = [_find_beyond(item, found) for item in inner_of(node)]
    if not isinstance(node, (Name, Both, Not)) and not any(inner):
        return False
    found.add(id(node))
    return True


def _terminal_source(node: Node, names: Mapping[str, str], beyond: Container[int], place: int) -> str:
    def source_of(item: Node, place: int) -> str:
        return _terminal_source(item, names, beyond, place)

    if id(node) not in beyond:
        text = regex_source(node)
        return f"/{text}/" if text not in ("", "(?:)") else '""'
    if isinstance(node, Name):
        return names[node.name]
    if isinstance(node, Not):
        return f"~{source_of(node.item, _OPERAND)}"
    if isinstance(node, Repeat):
        if node.high == 0:
            return '""'
        text = f"{source_of(node.item, _OPERAND)}{count_source(node)}"
    elif isinstance(node, Alt):
        text = " | ".join(source_of(item, _SEQUENCE) for item in node.items)
        return text if place == _ALTERNATIVES else f"({text})"
    elif isinstance(node, Both):
        text = " & ".join(source_of(item, _OPERAND) for item in node.items)
        return f"({text})"
    else:
        assert isinstance(node, Seq)
        text = " ".join(source_of(item, _OPERAND) for item in node.items)
    return f"({text})" if place == _OPERAND else text
