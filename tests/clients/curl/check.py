"""Compares the bytes of answers to curl, with their headers, with those in `golden/`. `--write` records them anew.

In `golden/`, a name in angle brackets stands for what differs between requests: ids, times, jittered waits and the
fingerprint of this machine's build. Consecutive events that differ in one text are merged, because an event may carry
one token or several. All else is compared byte for byte: the order of keys, blank lines, `[DONE]`.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

from checks import BASE_URL, KEY, MODEL, PERSON, URL, WEATHER, WEATHER_QUESTION, check_each, run

GOLDEN = Path(__file__).resolve().parent / "golden"
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
ASK = [{"role": "user", "content": WEATHER_QUESTION}]
GREEDY = {"model": MODEL, "temperature": 0, "seed": 7}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
JSON = ("-H", "Content-Type: application/json")
AUTH = ("-H", f"Authorization: Bearer {KEY}")


def post(path: str, body: object, *more: str) -> list[str]:
    return [*JSON, *AUTH, *more, "-d", body if isinstance(body, str) else json.dumps(body), BASE_URL + path]


def get(path: str, *more: str) -> list[str]:
    return [*AUTH, *more, URL + path]


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CASES = {
    "chat": post("/chat/completions", {**GREEDY, "messages": HELLO, "max_tokens": 12}),
    "chat_stream": post("/chat/completions", {**GREEDY, "messages": HELLO, "max_tokens": 6, **USAGE}),
    "chat_logprobs": post(
        "/chat/completions", {**GREEDY, "messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 0}
    ),
    "chat_call": post("/chat/completions", {**GREEDY, "messages": ASK, "tools": [WEATHER]}),
    "chat_call_stream": post("/chat/completions", {**GREEDY, "messages": ASK, "tools": [WEATHER], **USAGE}),
    "chat_schema": post("/chat/completions", {**GREEDY, "messages": HELLO, "response_format": SCHEMA}),
    "completion": post("/completions", {**GREEDY, "prompt": "The sky is", "max_tokens": 4, "stop": "."}),
    "completion_stream": post("/completions", {**GREEDY, "prompt": "The sky is", "max_tokens": 3, "stream": True}),
    "models": get("/v1/models"),
    "tokenize": [*JSON, *AUTH, "-d", json.dumps({"model": MODEL, "prompt": "The sky is blue."}), URL + "/tokenize"],
    "error_model": post("/chat/completions", {"model": "nobody", "messages": HELLO}),
    "error_bound": post("/chat/completions", {**GREEDY, "messages": HELLO, "max_tokens": 0}),
    "error_type": post("/chat/completions", {**GREEDY, "messages": HELLO, "temperature": "hot"}),
    "error_missing": post("/chat/completions", {"model": MODEL}),
    "error_unknown": post("/chat/completions", {**GREEDY, "messages": HELLO, "temprature": 1}),
    "error_context": post("/chat/completions", {**GREEDY, "messages": [{"role": "user", "content": "word " * 3_000}]}),
    "error_json": post("/chat/completions", '{"model": '),
    "error_media_type": [*AUTH, "-H", "Content-Type: text/plain", "-d", "{}", f"{BASE_URL}/chat/completions"],
    "error_key": ["-H", "Authorization: Bearer wrong", f"{BASE_URL}/models"],
    "error_no_key": [f"{BASE_URL}/models"],
    "error_route": get("/v1/nothing"),
    "error_method": get("/v1/chat/completions"),
}
VOLATILE = (
    (r'"id":"(chatcmpl|cmpl|call|modelperm)[-_][^"]*"', r'"id":"\1-<id>"'),
    (r'"created":\d+', '"created":<seconds>'),
    (r'"system_fingerprint":"[^"]*"', '"system_fingerprint":"<fingerprint>"'),
    (r'"cached_tokens":\d+', '"cached_tokens":<count>'),
    (r'"logprob":-?[0-9.e-]+', '"logprob":<number>'),
    (r"(?im)^(date|x-request-id|content-length|openai-processing-ms): .*$", r"\1: <varies>"),
    (r"(?im)^server: .*\n", ""),
)


def answer(arguments: list[str]) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--include", "--max-time", "60", *arguments]
    text = subprocess.run(command, capture_output=True, check=True).stdout.decode().replace("\r\n", "\n")
    for pattern, name in VOLATILE:
        text = re.sub(pattern, name, text)
    head, _, body = _merged(text).partition("\n\n")
    status, *headers = head.splitlines()
    return "\n".join([status, *sorted(headers), "", body])


PIECE = re.compile(r'("(?:content|arguments|text)":)"((?:[^"\\]|\\.)*)"')


def _merged(text: str) -> str:
    """Merge consecutive events that differ in one text only, and join these texts."""
    events: list[str] = []
    for event in text.split("\n\n"):
        found, before = PIECE.findall(event), PIECE.findall(events[-1]) if events else []
        if len(found) == len(before) == 1 and PIECE.sub("", event) == PIECE.sub("", events[-1]):
            whole = f'{found[0][0]}"{before[0][1]}{found[0][1]}"'
            event = PIECE.sub(lambda _, whole=whole: whole, events.pop())
        events.append(event)
    return "\n\n".join(events)


@check_each(CASES)
def compare(name: str) -> None:
    """the bytes equal the golden file"""
    file, found = GOLDEN / f"{name}.txt", answer(CASES[name])
    if "--write" in sys.argv:
        file.write_text(found)
        return
    expected = file.read_text()
    if found != expected:
        raise AssertionError("\n".join(difflib.unified_diff(expected.splitlines(), found.splitlines(), lineterm="")))


run()
