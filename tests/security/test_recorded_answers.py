"""Every recorded request is answered as it was when it was recorded: the same status, type, code and param.

`pytest tests/security/test_recorded_answers.py --long -k embeddings` replays all requests of one family of routes.
Without `--long` a fixed sample of them is replayed. `recorded/record` says when to record anew, and how.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import pytest

from tests.security.recorded.asking import (
    ANSWERS,
    ANTHROPIC,
    OPENAPI,
    Answer,
    Case,
    Client,
    names,
    openapi_of,
    read_cases,
    read_rows,
    served,
)
from tests.security.recorded.documented import statements

FAMILIES = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses",
    "messages": "/v1/messages", "embeddings": "/v1/embeddings", "rerank": "/v1/rerank", "score": "/v1/score",
    "classify": "/v1/classify", "predict": "/predict", "tokenize": "/tokenize", "detokenize": "/detokenize",
    "others": "",
}  # fmt: skip
"""Name -> prefix of the paths of its requests."""
SHARE = 10
"""Without `--long`, one of each kind and one in this many requests are replayed."""
MAX_BYTES = 200_000
"""Longest body that is sent without `--long`."""
TRIES = 4
"""A busy machine may have no time to check a grammar, so this answer is not compared."""
NUM_SHOWN, NUM_CHARS = 30, 300


def family_of(case: Case) -> str:
    return next(name for name, start in FAMILIES.items() if case.route.partition(" ")[2].startswith(start))


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Case]]:
    """Family -> its requests."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in read_cases():
        found[family_of(case)].append(case)
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """Id of a request -> its answer, but for those that are left out with a reason."""
    rows = read_rows(ANSWERS)
    return {
        name: Answer(*rest, tuple(headers), tuple(hints), digest)
        for name, *rest, headers, hints, digest, reason in rows
        if not reason
    }


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, Client]]:
    with served() as clients:
        yield clients


def sample(cases: list[Case], answers: dict[str, Answer]) -> list[Case]:
    """The first request of each route with each answer, all at the bounds of a field, and a share of the others."""
    firsts: dict[tuple[object, ...], Case] = {}
    short = [case for case in cases if len(case.body or b"") <= MAX_BYTES and case.id in answers]
    for case in short:
        was = answers[case.id]
        firsts.setdefault((case.route, case.server, was.status, was.type, was.code, was.param), case)
    kept = {case.id for case in firsts.values()}
    kept |= {case.id for case in short if case.fault == "bounds"}
    return [case for case in short if case.id in kept or zlib.crc32(case.id.encode()) % SHARE == 0]


def ask(client: Client, case: Case, was: Answer) -> tuple[Answer, str]:
    """(the answer of now, the message of its error)."""
    for _ in range(TRIES):
        now, body = client.ask(case)
        if now.status == was.status or now.status not in (503, 529):
            break
    message = message_of(body)
    # A message may be worded otherwise, as long as it names the same parameters.
    if was.param and case.path.startswith(ANTHROPIC) and names(message, was.param):
        now = replace(now, param=was.param)
    return replace(now, hints=tuple(name for name in was.hints if f"'{name}'" in message)), message


def message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


Difference = tuple[Case, Answer, Answer, str]


def differences(clients: dict[str, Client], asked: list[Case], answers: dict[str, Answer]) -> list[Difference]:
    """The requests that are answered otherwise than `answers` says."""
    found = []
    for case in asked:
        if (was := answers.get(case.id)) is not None:
            now, message = ask(clients[case.server], case, was)
            if now != was:
                found.append((case, was, now, message))
    return found


def table(found: list[Difference], num_asked: int) -> str:
    """The first differences, by route, field and kind of fault, each with its request and both answers."""

    def group(difference: Difference) -> tuple[str, str, str]:
        return difference[0].route, difference[0].field, difference[0].fault

    found = sorted(found, key=group)
    lines = [f"{len(found)} of {num_asked} requests are answered otherwise than recorded; the first {NUM_SHOWN}:"]
    for (route, field, fault), some in groupby(found[:NUM_SHOWN], group):
        lines.append(f"\n{route} | {field or 'whole body'} | {fault}")
        for case, was, now, message in some:
            lines.append(f"  {case.id} ({case.server}): {case.method} {case.path[:NUM_CHARS]}")
            lines.append(f"    sent     {(case.body or b'')[:NUM_CHARS]!r}")
            changed = [one.name for one in fields(was) if getattr(was, one.name) != getattr(now, one.name)]
            for name in changed:
                lines.append(f"    {name:8} was {getattr(was, name)!r}, is {getattr(now, name)!r}")
            lines.append(f"    was      {shown(was)}")
            lines.append(f"    is       {shown(now)} {message[:NUM_CHARS]}")
    return "\n".join(lines)


def shown(answer: Answer) -> str:
    return f"{answer.status} type={answer.type} code={answer.code} param={answer.param}"


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_as_recorded(
    clients: dict[str, Client], cases: dict[str, list[Case]], answers: dict[str, Answer], family: str, is_long: bool
) -> None:
    asked = cases[family] if is_long else sample(cases[family], answers)
    assert len(asked) > 50
    if found := differences(clients, asked, answers):
        pytest.fail(table(found, len(asked)), pytrace=False)


CHANGES: dict[str, Callable[[Answer], Answer]] = {
    "another status": lambda answer: replace(answer, status=422),
    "another type": lambda answer: replace(answer, type="api_error"),
    "another code": lambda answer: replace(answer, code="value_error"),
    "another param": lambda answer: replace(answer, param="body.temperature"),
    "another media type": lambda answer: replace(answer, media="text/plain"),
    "another name to use instead": lambda answer: replace(answer, hints=("temperatures",)),
    "a header more": lambda answer: replace(answer, headers=("retry-after",)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_answer_is_seen_and_shown(
    clients: dict[str, Client], cases: dict[str, list[Case]], answers: dict[str, Answer], change: Any
) -> None:
    for family in ("completions", "messages"):
        case = next(case for case in cases[family] if case.field == "temperature" and answers[case.id].status == 400)
        assert differences(clients, [case], answers) == []
        told = table(differences(clients, [case], {case.id: change(answers[case.id])}), 1)
        assert "| temperature |" in told
        assert "is       400 type=invalid_request_error" in told


def test_what_a_taken_request_asks_for_is_compared(
    clients: dict[str, Client], cases: dict[str, list[Case]], answers: dict[str, Answer]
) -> None:
    """1.0 for a whole number, an alias, -1 for "not given": taken requests become the same generation."""
    taken = [case for case in cases["completions"] if answers[case.id].status == 200 and answers[case.id].digest]
    assert len(taken) > 100
    case = next(case for case in taken if case.field == "temperature")
    assert case.body is not None
    other = replace(case, body=case.body[:-1] + b',"top_p":0.25}')
    ((_, was, now, _),) = differences(clients, [other], answers)
    assert (was.status, now.status) == (200, 200) and was.digest != now.digest


@pytest.mark.parametrize("server", ["open", "keyed"])
def test_nothing_that_was_documented_is_lost(clients: dict[str, Client], server: str) -> None:
    was = statements(next(read_rows(OPENAPI))[server])
    assert len(was) > 5_000
    lost = was - statements(openapi_of(clients[server]))
    assert not lost, "\n".join(sorted(map(str, lost))[:NUM_SHOWN])
