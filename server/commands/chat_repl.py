"""`inferd chat`: chats with a running server from a terminal. Answers are printed as they come; Ctrl-C stops one.

It speaks only the OpenAI protocol, so any server with that protocol works. It keeps nothing but the conversation.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

import httpx

from inferd.engine.api.errors import ConfigError

_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The server and the sampling options. None leaves a value to the server."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class ChatError(ConfigError):
    """The server refused or did not answer. Its text is one line for the terminal."""

    exit_code = 1


@dataclass(slots=True)
class ChatSession:
    """The messages so far, and the client of the server that answers them."""

    options: ChatOptions
    client: httpx.Client
    messages: list[dict[str, str]] = field(default_factory=list)
    on_reasoning: Callable[[str], None] = lambda text: None
    """Receives the model's reasoning, which is never sent back to the server."""

    def reset(self) -> None:
        self.messages[:] = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def ask(self, question: str) -> Generator[str, None, None]:
        """The pieces of the answer. The conversation keeps an unfinished answer, but forgets a refused question."""
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[str, None, None]:
        options = self.options
        sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
        body: dict[str, object] = {"model": options.model, "messages": self.messages, "stream": True}
        body |= {name: value for name, value in sampling.items() if value is not None}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_refusal(response))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        delta = _delta(json.loads(line[6:]))
                        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
                        if reasoning:
                            self.on_reasoning(str(reasoning))
                        yield str(delta.get("content") or "")
        except httpx.HTTPError as error:
            raise _unreachable(options.base_url, error) from error


def _delta(chunk: dict[str, object]) -> dict[str, object]:
    error, choices = chunk.get("error"), chunk.get("choices")
    if isinstance(error, dict):
        raise ChatError(str(error.get("message")))
    if not isinstance(choices, list) or not choices:
        return {}
    delta = choices[0].get("delta")
    return delta if isinstance(delta, dict) else {}


def _unreachable(base_url: str, error: httpx.HTTPError | httpx.InvalidURL) -> ChatError:
    """Says that there is no server if no connection was made, and otherwise what went wrong."""
    way_out = "start one with `inferd serve`, or give --base-url"
    if isinstance(error, httpx.ConnectTimeout) or _is_refused(error):
        return ChatError(f"no server at {base_url}: {way_out}")
    return ChatError(f"no answer from {base_url} ({error}): {way_out}")


def _is_refused(error: Exception) -> bool:
    """Whether the system refused the connection. A failed TLS handshake is another error, with a reason of its own."""
    return isinstance(error, httpx.ConnectError) and str(error).startswith("[Errno")


def _refusal(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        message = f"HTTP {response.status_code}"
    return f"{message} Give the key by --api-key or INFERD_API_KEY." if response.status_code == 401 else message


def run_chat(options: ChatOptions, question: str | None) -> int:
    """Ask `question` and end, or converse until the input ends. Raises `ChatError` if no server answers."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    if not base_url.startswith(("http://", "https://")):
        raise ChatError(f"--base-url must begin with http:// or https://, but got {options.base_url!r}")
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=base_url, headers=headers, timeout=timeout) as client:
        conversation = ChatSession(_with_model(options, client), client, on_reasoning=_print_reasoning)
        conversation.reset()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, which stops an answer
        if question is not None:
            _print_answer(conversation, question)
            return 0
        return _talk(conversation)


def _with_model(options: ChatOptions, client: httpx.Client) -> ChatOptions:
    """Fill in the first model of the server's list that is made to generate. Other servers list no tasks."""
    if options.model is not None:
        return options
    try:
        response = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(options.base_url, error) from error
    if response.status_code != 200:
        raise ChatError(_refusal(response))
    try:
        cards = response.json()["data"]
        generating = [card for card in cards if card.get("task", "generate") == "generate"]
        return replace(options, model=str((generating or cards)[0]["id"]))
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise ChatError(f"{options.base_url}/v1/models lists no model; give --model, or another --base-url") from error


_ENDS = ("/quit", "/exit")
_COMMAND = re.compile(r"/[a-z?]*( .*)?")
"""A line that looks like a command. A path such as /etc/hosts does not."""
_HINTS = "/reset starts a new conversation, Ctrl-C stops an answer, Ctrl-D or /quit ends"


def _talk(conversation: ChatSession) -> int:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"Chatting with {conversation.options.model}: {_HINTS}", file=sys.stderr)
    while True:
        try:
            question = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if question in _ENDS:
            return 0
        if question == "/reset":
            conversation.reset()
        elif _COMMAND.fullmatch(question):
            print(f"inferd: there is no command {question}: {_HINTS}", file=sys.stderr)
        elif question:
            try:
                _print_answer(conversation, question)
            except ChatError as error:
                print(f"inferd: {error}", file=sys.stderr)


def _print_reasoning(text: str) -> None:
    """Print reasoning dimmed and only to a terminal, so that a pipe receives the answer alone."""
    if sys.stderr.isatty():
        print(f"\x1b[2m{text}\x1b[0m", end="", file=sys.stderr, flush=True)


def _print_answer(conversation: ChatSession, question: str) -> None:
    answer, has_begun = conversation.ask(question), False
    try:
        for piece in answer:
            print(piece, end="", flush=True)
            has_begun = True
    except KeyboardInterrupt:
        answer.close()
    finally:
        if has_begun:
            print()
