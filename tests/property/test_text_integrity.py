"""The text of an answer is the same, whether it is streamed in any pieces, sent at once, or decoded by the library from
all ids.

Tested over HTTP, through every interface that streams, with an engine whose ids and cuts Hypothesis chooses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inferd.server.text.detokenizer import TokenBytes
from inferd.server.text.model import ServedModel
from tests.api.conftest import MODEL_PATH, Script, ScriptedRouter, app_settings, serving

LIBRARY = Tokenizer.from_file(str(Path(MODEL_PATH) / "tokenizer.json"))
TABLE = TokenBytes(LIBRARY)
NUM_MARKERS = 5
"""Ids of special tokens and of the marks around calls, which are not text."""
BYTE_IDS = {TABLE.of(i): i for i in range(NUM_MARKERS, 3_072) if len(TABLE.of(i)) == 1}
ALPHABET = "ae <>\u00e9\u20ac\U0001f600\u0915\u094d\ufffd\n"
MAX_IDS = 24

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Interface:
    """The requests of one family of routes, and the text in their answers."""

    path: str
    body: Json
    stop: str
    plain: Callable[[Json], str]
    piece: Callable[[Json], str]


def _said(event: Json) -> str:
    return str(event.get("delta", "")) if event.get("type") == "response.output_text.delta" else ""


HI = [{"role": "user", "content": "hi"}]
INTERFACES = (
    Interface(
        "/v1/completions", {"prompt": "x", "max_tokens": 64}, "stop",
        lambda whole: whole["choices"][0]["text"],
        lambda event: "".join(choice["text"] for choice in event["choices"]),
    ),
    Interface(
        "/v1/chat/completions", {"messages": HI, "max_tokens": 64}, "stop",
        lambda whole: whole["choices"][0]["message"]["content"] or "",
        lambda event: "".join(choice["delta"].get("content") or "" for choice in event["choices"]),
    ),
    Interface(
        "/v1/messages", {"messages": HI, "max_tokens": 64}, "stop_sequences",
        lambda whole: "".join(block["text"] for block in whole["content"]),
        lambda event: event.get("delta", {}).get("text", ""),
    ),
    Interface(
        "/v1/responses", {"input": "hi", "max_output_tokens": 64}, "stop",
        lambda whole: "".join(part["text"] for item in whole["output"] for part in item["content"]),
        _said,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def router() -> ScriptedRouter:
    return ScriptedRouter(ServedModel.load(MODEL_PATH, ("tiny",), max_model_len=256, vocab_size=3_072))


@pytest.fixture(scope="module")
def http(router: ScriptedRouter) -> Iterator[httpx.Client]:
    with (
        serving(router.model, router, app_settings(access_log=False)) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        yield client


def ids_of_text(text: str) -> list[int]:
    """One token a byte: every character that is not ASCII is spread over several."""
    return [BYTE_IDS[bytes((byte,))] for byte in text.encode()]


IDS = st.lists(st.one_of(st.integers(NUM_MARKERS, 300), st.integers(NUM_MARKERS, 3_071)), min_size=1, max_size=MAX_IDS)
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def ended_by(text: str, stops: Sequence[str]) -> str:
    """The text up to the first complete stop string; if two end there, the longer one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


def ask(
    http: httpx.Client, router: ScriptedRouter, face: Interface, script: Script, body: Json
) -> tuple[str, list[str]]:
    """(text of the plain answer, pieces of the streamed one)."""
    router.reset()
    router.will(script)
    whole = http.post(face.path, json={**face.body, **body})
    assert whole.status_code == 200, whole.text
    pieces: list[str] = []
    with http.stream("POST", face.path, json={**face.body, **body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(face.piece(json.loads(line.removeprefix("data: "))))
    return face.plain(whole.json()), [piece for piece in pieces if piece]


@pytest.mark.parametrize("face", INTERFACES, ids=lambda face: face.path)
@settings(max_examples=25, deadline=None)
@given(ids=IDS, cuts=CUTS)
def test_streamed_is_plain_is_decoded(
    face: Interface, http: httpx.Client, router: ScriptedRouter, ids: list[int], cuts: list[int]
) -> None:
    expected = LIBRARY.decode(ids, skip_special_tokens=True)
    plain, pieces = ask(http, router, face, Script(token_ids=tuple(ids), cuts=tuple(cuts)), {})
    assert plain == expected
    assert "".join(pieces) == expected


@pytest.mark.parametrize("face", INTERFACES, ids=lambda face: face.path)
@settings(max_examples=25, deadline=None)
@given(text=st.text(ALPHABET, min_size=1, max_size=8), lost=st.integers(0, 3), cuts=CUTS)
def test_a_character_is_shown_whole_or_at_the_end(
    face: Interface, http: httpx.Client, router: ScriptedRouter, text: str, lost: int, cuts: list[int]
) -> None:
    """The last bytes of the text may be cut off: then its last character is replaced, and no other."""
    ids = ids_of_text(text)
    ids = ids[: max(1, len(ids) - lost)]
    plain, pieces = ask(http, router, face, Script(token_ids=tuple(ids), cuts=tuple(cuts)), {})
    whole = text.encode()[: len(ids)].decode("utf-8", "ignore")
    assert plain in (whole, whole + "\ufffd")
    assert "".join(pieces) == plain
    assert all(piece.count("\ufffd") <= text.count("\ufffd") for piece in pieces[:-1])


@pytest.mark.parametrize("face", INTERFACES, ids=lambda face: face.path)
@settings(max_examples=25, deadline=None)
@given(
    text=st.text("ab<>\u20ac", min_size=1, max_size=14),
    stops=st.lists(st.text("ab<>\u20ac", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    cuts=CUTS,
)
def test_no_piece_of_a_stop_string_is_ever_shown(
    face: Interface, http: httpx.Client, router: ScriptedRouter, text: str, stops: list[str], cuts: list[int]
) -> None:
    """At any moment the streamed text is a beginning of the answer, so nothing has to be taken back."""
    expected = ended_by(text, stops)
    script = Script(token_ids=tuple(ids_of_text(text)), cuts=tuple(cuts))
    plain, pieces = ask(http, router, face, script, {face.stop: stops})
    assert plain == expected
    shown = ""
    for piece in pieces:
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected


@settings(max_examples=40, deadline=None)
@given(prompt=st.text("a\u20ac\U0001f600", min_size=1, max_size=4), cut=st.integers(1, 3), cuts=CUTS)
def test_a_prompt_that_ends_inside_a_character_is_not_shown_again(
    http: httpx.Client, router: ScriptedRouter, prompt: str, cut: int, cuts: list[int]
) -> None:
    """The answer completes the character. It begins with it, without any text before it."""
    ids = ids_of_text(prompt + "\u20ac")
    face = replace(INTERFACES[0], body={"prompt": ids[:-cut], "max_tokens": 64})
    script = Script(token_ids=(*ids[-cut:], *ids_of_text("b")), cuts=tuple(cuts))
    plain, pieces = ask(http, router, face, script, {})
    assert plain == "\u20acb"
    assert "".join(pieces) == plain
