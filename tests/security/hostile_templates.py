"""Chat templates that need forever, or all memory, unless a message says `CALM`. Knows no pytest.

In each, some single call into C does the harm, which no exception can interrupt.
"""

from __future__ import annotations

CALM = "be calm"


def _unless_calm(source: str) -> str:
    return "{% if '" + CALM + "' in messages[-1].content %}calm{% else %}" + source + "{% endif %}"


def _sixty(start: str, step: str, end: str) -> str:
    """`ns.a` begins as `start`, and becomes `step` sixty times."""
    return _unless_calm(
        "{% set ns = namespace(a="
        + start
        + ", b="
        + start
        + ") %}{% for i in range(60) %}"
        + step
        + "{% endfor %}"
        + end
    )


HOSTILE: dict[str, str] = {
    # 2^60 comparisons in one call, in the memory of 122 small lists.
    "lists": _sixty("[1]", "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}", "{{ ns.a == ns.b }}"),
    "text": _sixty("'x'", "{% set ns.a = ns.a ~ ns.a %}", "{{ ns.a | length }}"),
    "integers": _sixty("3", "{% set ns.a = ns.a * ns.a %}", "{{ ns.a > 1 }}"),
    "replace": _sixty("'xx'", "{% set ns.a = ns.a.replace('x', ns.a) %}", "{{ ns.a | length }}"),
    "loops": _unless_calm("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3),
}

ENDLESS = ("lists", "integers", "loops")
"""Those that exceed their time. The others exceed their memory first."""
