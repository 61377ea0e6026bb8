"""Lists of modules in a quantization_config: names, parts of names, and regular expressions.

An expression comes from a stranger, and matching one can take forever. So an expression may hold letters, classes,
wildcards and alternatives, and the time that all of them could take is bounded before any is tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from inferd.engine.arch.description import ArchError
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.shown import shown

IsListed = Callable[[str], bool]
"""Says whether a list names a module, which is given by its name in the checkpoint."""

_MAX_NAMES = 10_000
_MAX_LENGTH = 500
_MAX_STEPS = 20_000
"""Most steps that one expression may take to fail on one name: enough for 3 wildcards."""
_MAX_ALL_STEPS = 1_000_000
"""Most steps for all expressions: 2.3 s for 700 names (one core of an AMD EPYC Zen 4, 2026-11-23)."""
_NAME_LENGTH = 40
_ATOM = r"(?:[\w\-]|\\[.\-_dw]|\.|\[\^?[\w\-.]+\])"
_TOKEN = re.compile(
    rf"(?P<repeated>{_ATOM}[*+]\??)|(?P<optional>{_ATOM}\?)|{_ATOM}|(?P<open>\((?:\?:)?)|(?P<or>\|)|(?P<close>\))|\^|\$"
)


def names_of(section: Fields, fields: Iterable[str]) -> list[str]:
    """The texts in the lists that these fields hold. An absent field is an empty list."""
    texts: list[str] = []
    for field in fields:
        own = section.strings(field) if section.has(field) else ()
        check_count(section, field, len(own))
        texts += own
    return texts


def check_count(section: Fields, field: str, count: int) -> None:
    if count > _MAX_NAMES:
        raise ArchError(f"{section.owner}: {field} must hold at most {_MAX_NAMES} names, but holds {count}")


def listed(section: Fields, texts: Iterable[str]) -> IsListed:
    """A test for modules that `texts` name. A text is a module's name, the name of a module above it, the end of its
    name, or after `re:` a regular expression."""
    texts = list(texts)
    plain = {text for text in texts if not text.startswith("re:")}
    patterns = compiled(section, expressions(texts))

    def is_listed(module: str) -> bool:
        parts = module.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        below = {".".join(parts[first:]) for first in range(len(parts))}
        return not plain.isdisjoint(above | below) or any(pattern.match(module) for pattern in patterns)

    return is_listed


def with_wildcards(text: str) -> str:
    """A name with wildcards, such as `model.layers.0*`, as `listed` takes it. The whole name must match."""
    return "re:" + text.replace(".", r"\.").replace("*", ".*") + "$" if "*" in text else text


def compiled(section: Fields, patterns: list[str]) -> list[re.Pattern[str]]:
    """Regular expressions that the modules' names are matched with. Raises `ArchError` if matching could take long."""
    check_time(section, patterns)
    try:
        return [re.compile(pattern) for pattern in patterns]
    except (re.error, RecursionError) as error:
        raise ArchError(f"{section.owner}: an expression for modules is malformed: {error}") from error


def expressions(texts: Iterable[str]) -> list[str]:
    """The regular expressions in a list."""
    return [text.removeprefix("re:") for text in texts if text.startswith("re:")]


def check_time(section: Fields, patterns: list[str]) -> None:
    """Raises `ArchError` if matching names with all of these expressions could take long."""
    costs = [_steps(pattern) for pattern in patterns]
    for pattern, steps in zip(patterns, costs, strict=True):
        if steps > _MAX_STEPS:
            raise ArchError(
                f"{section.owner}: a list of modules must hold names, or expressions of names, classes, alternatives "
                f"and at most 3 wildcards (.*), but it holds {shown(pattern)}"
            )
    if sum(costs) > _MAX_ALL_STEPS:
        raise ArchError(
            f"{section.owner}: {len(patterns)} expressions for modules would take long to match: list names instead"
        )


def _steps(pattern: str) -> float:
    """Most steps to match the expression with a name. Infinite if it holds anything but the tokens known here, such as
    a repeated group."""
    if len(pattern) > _MAX_LENGTH:
        return math.inf
    num_repeated, ways, position, alternatives = 0, 1, 0, [1]
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            return math.inf
        position = token.end()
        match token.lastgroup:
            case "repeated":
                num_repeated += 1
            case "optional":
                ways *= 2
            case "open":
                alternatives.append(1)
            case "or":
                alternatives[-1] += 1
            case "close":
                ways *= alternatives.pop() if len(alternatives) > 1 else 1
    return math.comb(_NAME_LENGTH + num_repeated, num_repeated) * ways * math.prod(alternatives)
