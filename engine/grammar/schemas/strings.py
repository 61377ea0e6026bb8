"""Strings of JSON as regular expressions: characters, lengths, and formats.

Formats match only texts without characters that JSON escapes, and bound their length. The few of them that llguidance
has as well are written anew: it allows endless fractions of seconds, and days that do not exist.
"""

from __future__ import annotations

import json

from inferd.engine.api.grammars import literal_regex

CHARACTER = r"""([^"\\\x00-\x1F\x7F]|\\["\\bfnrt]|\\u00([01][0-9a-fA-F]|7[fF]))"""
"""One character of a string, as this server has models write it: escaped only if JSON demands it."""
PLAIN_CHARACTER = r"""[^"\\\x00-\x1F\x7F]"""
"""One character that is written as it is."""

MOST_REPETITIONS = 2**31 - 2
"""The greatest bound of repetitions. No answer has so many, so a greater one is none."""

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(\.[0-9]{1,9})?"
_OFFSET = "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}|23:59:60{_FRACTION}[zZ])"
_COUNT = "[0-9]{1,9}"
_DAYS = f"{_COUNT}D"
_MONTHS = f"{_COUNT}M({_DAYS})?"
_SECONDS = f"{_COUNT}S"
_MINUTES = f"{_COUNT}M({_SECONDS})?"
_CLOCK = f"T({_COUNT}H({_MINUTES})?|{_MINUTES}|{_SECONDS})"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,126}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = (
    f"(({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,7}}:|"
    + "|".join(f"({_HEX}:){{1,{7 - i}}}(:{_HEX}){{1,{i}}}" for i in range(1, 7))
    + f"|:(:{_HEX}){{1,7}}|::)"
)
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-=?^_`{|}~\/]"
_URI_CHARACTER = r"([a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_NAME_CHARACTER = r"([a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})"
_SEGMENTS = rf"(\/{_URI_CHARACTER}*)*"
_AUTHORITY = rf"(({_NAME_CHARACTER}|:)*@)?(\[{_IPV6}\]|{_IPV4}|{_NAME_CHARACTER}*)(:[0-9]{{0,5}})?"
_QUERY = rf"({_URI_CHARACTER}|[\/?])*"
_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(\/\/{_AUTHORITY}{_SEGMENTS}|\/({_URI_CHARACTER}+{_SEGMENTS})?|"
    rf"{_URI_CHARACTER}+{_SEGMENTS})?(\?{_QUERY})?(\#{_QUERY})?"
)

FORMATS: dict[str, tuple[str, int | None]] = {
    "date-time": (f"{_DATE}[tT]{_TIME}", None),
    "time": (_TIME, None),
    "date": (_DATE, None),
    "duration": (f"P((({_COUNT}Y({_MONTHS})?|{_MONTHS}|{_DAYS})({_CLOCK})?)|{_CLOCK}|{_COUNT}W)", None),
    "email": (rf"{_ATOM}{{1,64}}(\.{_ATOM}{{1,64}}){{0,31}}@({_HOST}|\[{_IPV4}\])", 254),
    "hostname": (_HOST, 253),
    "ipv4": (_IPV4, None),
    "ipv6": (_IPV6, None),
    "uuid": ("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", None),
    "uri": (_URI, 2_048),
}
"""Format -> (expression, the most characters if the expression does not bound them)."""


def quoted(value: str) -> str:
    """A regular expression between slashes for the one spelling of a string."""
    return literal_regex(json.dumps(value, ensure_ascii=False))


def all_spellings(value: str) -> str:
    """A regular expression between slashes for every spelling of a string that `CHARACTER` allows."""
    return f'"{"".join(map(_spellings, value))}"'


def _spellings(char: str) -> str:
    plain = literal_regex(json.dumps(char, ensure_ascii=False)[1:-1])
    if ord(char) >= 0x20 and ord(char) != 0x7F:
        return plain
    digits = "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in f"{ord(char):02x}")
    return rf"({plain}|\\u00{digits})"


def repeated(low: int, high: int | None) -> str:
    """The operator for a number of repetitions."""
    low = min(low, MOST_REPETITIONS)
    if high is not None and high > MOST_REPETITIONS:
        high = None
    if high is None:
        return "*" if not low else f"{{{low},}}"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"
