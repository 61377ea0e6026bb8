"""`inferd chat` against a scripted server: its output, the conversation it keeps, and its text for a refusal."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from inferd.server.commands.chat_repl import ChatError, ChatOptions, ChatSession, run_chat

THOUGHTS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"reasoning": "Hm", "reasoning_content": "Hm"}}]},
    {"choices": [{"delta": {"reasoning_content": "m."}}]},
]
STREAM: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Hel"}}]},
    {"choices": [{"delta": {"content": "lo"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {}},
]


class Handler(BaseHTTPRequestHandler):
    """Says hello. A message "refuse" gets a 400, and "break" an error in the stream."""

    bodies: list[dict[str, Any]]
    keys: list[str | None]

    def do_GET(self) -> None:
        models = b"[]" if self.path.startswith("/empty") else b'[{"id": "m1"}]'
        if self.path.startswith("/several"):
            models = b'[{"id": "e", "task": "embed"}, {"id": "g", "task": "generate"}]'
        if self.path.startswith("/embedding"):
            models = b'[{"id": "e", "task": "embed"}, {"id": "r", "task": "rerank"}]'
        self._answer(200, b'{"data": %b}' % models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers.get("Authorization"))
        said = body["messages"][-1]["content"]
        if said == "locked":
            return self._answer(401, b'{"error": {"message": "You didn\'t provide an API key."}}')
        if said == "refuse":
            return self._answer(400, b'{"error": {"message": "too long, by far"}}')
        chunks: list[dict[str, Any]] = (
            [*STREAM[:2], {"error": {"message": "engine gone"}}] if said == "break" else STREAM
        )
        chunks = [*THOUGHTS, *chunks] if said == "think" else chunks
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return self._answer(200, (": keep-alive\n\n" + "".join(events) + "data: [DONE]\n\n").encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.bodies, Handler.keys = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_one_question(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ChatOptions(base_url=f"{url}/v1", api_key="k", system="Be brief.", temperature=0.0, max_tokens=9, seed=3)
    assert run_chat(options, "Hi") == 0
    assert capsys.readouterr().out == "Hello\n"
    assert Handler.keys == ["Bearer k"]
    assert Handler.bodies == [
        {
            "model": "m1",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "temperature": 0.0,
            "max_tokens": 9,
            "seed": 3,
        }
    ]


@pytest.mark.parametrize(("path", "name"), [("several", "g"), ("embedding", "e")])
def test_a_model_that_generates_is_chosen_before_others(url: str, path: str, name: str) -> None:
    assert run_chat(ChatOptions(base_url=f"{url}/{path}"), "Hi") == 0
    assert Handler.bodies[0]["model"] == name


def test_a_conversation_is_remembered_until_reset(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\nrefuse\nbreak\ntwo\n/reset\n/help\n/etc/x\n/quit\nfour\n"))
    assert run_chat(ChatOptions(base_url=url, model="m2"), None) == 0
    output = capsys.readouterr()
    assert output.out == "Hello\nHel\nHello\nHello\n"
    refused, gone, unknown = output.err.splitlines()
    assert (refused, gone) == ("inferd: too long, by far", "inferd: engine gone")
    assert unknown.startswith("inferd: there is no command /help: /reset starts a new conversation, ")
    said = [[message["content"] for message in body["messages"]] for body in Handler.bodies]
    assert said == [
        ["one"],
        ["one", "Hello", "refuse"],
        ["one", "Hello", "break"],
        ["one", "Hello", "break", "Hel", "two"],
        ["/etc/x"],
    ]


def test_an_answer_stopped_half_way_is_kept(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        conversation = ChatSession(ChatOptions(base_url=url, model="m"), client)
        answer = conversation.ask("one")
        assert [next(answer), next(answer)] == ["", "Hel"]
        answer.close()
        assert conversation.messages[1:] == [{"role": "assistant", "content": "Hel"}]


def test_reasoning_is_shown_and_not_sent_back(url: str) -> None:
    thoughts: list[str] = []
    with httpx.Client(base_url=url) as client:
        conversation = ChatSession(ChatOptions(base_url=url, model="m"), client, on_reasoning=thoughts.append)
        assert "".join(conversation.ask("think")) == "Hello"
    assert thoughts == ["Hm", "m."]
    assert conversation.messages[1:] == [{"role": "assistant", "content": "Hello"}]


def test_refusals_are_one_line(url: str) -> None:
    with pytest.raises(ChatError, match=r"^too long, by far$"):
        run_chat(ChatOptions(base_url=url), "refuse")
    with pytest.raises(ChatError, match=r"API key\. Give the key by --api-key or INFERD_API_KEY\.$"):
        run_chat(ChatOptions(base_url=url), "locked")
    with pytest.raises(
        ChatError, match=r"^no server at http://127.0.0.1:1: start one with `inferd serve`, or give --base-url$"
    ):
        run_chat(ChatOptions(base_url="http://127.0.0.1:1"), "Hi")
    with pytest.raises(ChatError, match=r"^no server at http://127.0.0.1:1: "):
        run_chat(ChatOptions(base_url="http://127.0.0.1:1", model="m"), "Hi")
    for wrong in ("ftp://x", "127.0.0.1:8000"):
        with pytest.raises(ChatError, match=rf"^--base-url must begin with http:// or https://, but got '{wrong}'$"):
            run_chat(ChatOptions(base_url=wrong), "Hi")
    with pytest.raises(ChatError, match="lists no model"):
        run_chat(ChatOptions(base_url=f"{url}/empty"), "Hi")
