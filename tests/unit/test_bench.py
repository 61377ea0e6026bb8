"""The load generator against a scripted server: its requests, its pacing, its counts, and its failures.

The server is a few lines of asyncio on a thread, and its answer depends on the model's name. To test pacing, it holds
answers back until the right number of requests is there. A generator that paces wrongly never gets an answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench import session
from inferd.server.commands.bench.answer import Outcome, StreamReader
from inferd.server.commands.bench.client import Client, ClientError
from inferd.server.commands.bench.command import bench_app
from inferd.server.commands.bench.load import LoadRun, arrival_offsets, closed_loop, open_loop
from inferd.server.commands.bench.options import Fixed, LoadOptions, LogNormal, Uniform, parse_lengths
from inferd.server.commands.bench.prompts import PAGE, IdPrompts, WordPrompts, load_requests, make_prompts
from inferd.server.commands.bench.report import failures, goodput_line, quantile, summarize, warnings
from inferd.server.commands.bench.session import run_bench
from inferd.server.commands.bench.slo import Objective, goodput, parse_objective

MODELS = {
    "good": None,
    "no-ids": None,
    "bytewise": None,
    "closes": None,
    "busy": "HTTP 429 slow_down",
    "plain-text": "HTTP 500",
    "lies": "usage and stream disagree",
    "short": "not the output length asked for",
    "cut": "connection closed by the server",
    "silent-end": "stream ended without [DONE]",
    "no-usage": "no usage in the stream",
    "error-event": "in the stream: engine_error",
    "garbage": "an event that is not JSON",
}
"""The reported failure for each model of the scripted server."""


class FakeServer:
    """Answers by script. `hold` requests must be in flight before any of them is answered."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = self.in_flight = self.most_in_flight = 0
        self.hold = 1
        self.has_tokenizer = True
        self.pages: dict[str, bytes] = {}
        """Path -> another answer, for requests that are not streams."""
        self.metrics: list[bytes] = []
        """The answers to /metrics, in order. Without one there is no such page."""
        self._gate: asyncio.Event | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client closed the connection
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length:")), 0)
        body = orjson.loads(await reader.readexactly(length)) if length else {}
        path = head.split()[1]
        if path in self.pages and "stream" not in body:
            return self._plain(writer, 200, self.pages[path])
        if path == "/metrics" and self.metrics:
            return self._plain(writer, 200, self.metrics.pop(0))
        if path == "/metrics":
            return self._plain(writer, 404, b"there is no such page")
        if path == "/v1/models":
            return self._plain(writer, 200, b'{"data": [{"id": "good"}]}')
        if path == "/version":
            return self._plain(writer, 200, b'{"version": "7"}')
        if path == "/tokenize" and self.has_tokenizer:
            return self._plain(writer, 200, orjson.dumps({"tokens": list(range(10, 300))}))
        if path == "/tokenize":
            return self._plain(writer, 404, b"there is no such page")
        self.bodies.append(body)
        if "stream" not in body:
            return self._plain(writer, 200, b'{"usage": {"prompt_tokens": 400}}')
        await self._wait_for_others()
        try:
            return await self._generate(writer, body)
        finally:
            self.in_flight -= 1

    async def _wait_for_others(self) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._gate = self._gate or asyncio.Event()
        if self.in_flight >= self.hold:
            self._gate.set()
            self._gate = None
        else:
            await self._gate.wait()

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> bool:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        return True

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        model: str = body["model"]
        if model == "busy":
            return self._plain(writer, 429, b'{"error": {"code": "slow_down", "message": "later"}}')
        if model == "plain-text":
            return self._plain(writer, 500, b"oops")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        stream = b"".join(b"data: %b\n\n" % event for event in self._events(model, body))
        for piece in [stream[i : i + 1] for i in range(len(stream))] if model == "bytewise" else [stream]:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if model == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return model != "closes"

    def _events(self, model: str, body: dict[str, Any]) -> Iterator[bytes]:
        num_tokens = body["max_tokens"] - (model == "short")
        for index in range(num_tokens):
            ids = {} if model == "no-ids" else {"token_ids": [index]}
            yield orjson.dumps({"choices": [{"text": "x", "delta": {"content": "x"}, **ids}], "usage": None})
        if model == "error-event":
            yield b'{"error": {"code": "engine_error"}}'
        if model == "garbage":
            yield b"{"
        usage = {"prompt_tokens": 5, "completion_tokens": num_tokens + (model == "lies")}
        if model != "no-usage":
            yield orjson.dumps({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}})
        if model not in ("silent-end", "error-event"):
            yield b"[DONE]"


@pytest.fixture
def server() -> Iterator[tuple[FakeServer, str]]:
    """The scripted server on a thread of its own, and its address."""
    fake, loop = FakeServer(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake, asyncio.run_coroutine_threadsafe(fake.start(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def options(base_url: str = "http://x", **changes: Any) -> LoadOptions:
    given = {"base_url": base_url, "num_requests": 8, "concurrency": 4, "output_len": 3, "timeout_s": 20.0, **changes}
    lengths = {name: parse_lengths(name, str(given[name])) for name in ("input_len", "output_len") if name in given}
    return LoadOptions(**{**given, **lengths})


def load(asked: LoadOptions, model: str) -> list[Outcome]:
    async def run() -> list[Outcome]:
        client = Client(asked.base_url, timeout_s=asked.timeout_s)
        requests = list(load_requests(asked, model, IdPrompts(asked, [7, 8, 9]), 0, asked.num_requests))
        try:
            if asked.rate is not None:
                return await open_loop(client, asked, requests, lambda outcome: None)
            return await closed_loop(client, asked, requests)
        finally:
            client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_way_to_fail_is_called_by_its_name(server: tuple[FakeServer, str], model: str, api: Any) -> None:
    outcomes = load(options(server[1], api=api), model)
    assert [outcome.error for outcome in outcomes] == [MODELS[model]] * 8


def test_tokens_are_counted_twice(server: tuple[FakeServer, str]) -> None:
    outcomes = load(options(server[1]), "good")
    assert {(o.num_input, o.num_output, o.num_streamed, o.num_cached, len(o.gaps_s)) for o in outcomes} == {
        (5, 3, 3, 3, 2)
    }
    assert {outcome.num_streamed for outcome in load(options(server[1]), "no-ids")} == {None}


def test_a_closed_loop_keeps_exactly_n_in_flight(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    fake.hold = 4
    assert len(load(options(url, num_requests=12), "good")) == 12
    assert (fake.most_in_flight, fake.num_connections) == (4, 4)


def test_an_open_loop_waits_for_no_answer(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    fake.hold = 8
    outcomes = load(options(url, rate=10_000.0, concurrency=1), "good")
    assert [outcome.error for outcome in outcomes] == [None] * 8
    assert fake.most_in_flight == 8


def test_an_open_loop_counts_from_when_a_request_was_due(server: tuple[FakeServer, str]) -> None:
    asked = options(server[1], rate=1000.0, arrivals="constant")
    starts = sorted(outcome.start_s for outcome in load(asked, "good"))
    assert [start - starts[0] for start in starts] == pytest.approx([i / 1000 for i in range(8)], abs=1e-6)


def test_a_kept_connection_that_was_closed_is_replaced(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    assert [outcome.error for outcome in load(options(url, concurrency=1), "closes")] == [None] * 8
    assert fake.num_connections == 8


def test_a_server_that_speaks_no_http_is_an_error() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-x\r\n")
            await writer.drain()
            writer.close()

        fake = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{fake.sockets[0].getsockname()[1]}", timeout_s=10)
        with pytest.raises(ClientError, match="not HTTP"):
            await client.get("/")
        fake.close()
        with pytest.raises(ClientError, match="cannot connect"):
            await client.get("/")

    asyncio.run(run())


def test_the_key_is_sent_and_the_base_url_may_end_in_v1(server: tuple[FakeServer, str]) -> None:
    fake, url = server

    async def run() -> None:
        client = Client(f"{url}/v1/", api_key="k1")
        await client.get("/v1/models")
        client.close()

    asyncio.run(run())
    assert fake.heads[0].startswith("GET /v1/models HTTP/1.1\r\n")
    assert "Authorization: Bearer k1\r\n" in fake.heads[0]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_session_reports_what_the_server_gave(
    server: tuple[FakeServer, str], api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    asked = options(url, api=api, input_len=20, shared_prefix=5, warmup=3, goodput=parse_objective("e2e:19s"))
    assert run_bench(asked, "secret-key", tmp_path / "out.json") == 0
    written = json.loads((tmp_path / "out.json").read_text())
    results = written["results"]
    assert (results["num_ok"], results["num_failed"], results["num_output_tokens"]) == (8, 0, 24)
    assert (results["num_input_tokens"], results["num_cached_tokens"], results["counts_checked"]) == (40, 24, True)
    assert (written["settings"]["shared_prefix"], written["settings"]["input_len"]) == (5, "20")
    assert (written["settings"]["goodput"], results["goodput"]["share_met"]) == ("e2e:19000ms", 1.0)
    assert (written["settings"]["model"], written["versions"]["server"]) == ("good", "7")
    assert "secret-key" not in json.dumps(written)
    assert len(fake.bodies) == 11
    assert {body["max_tokens"] for body in fake.bodies} == {3}
    assert all(body["ignore_eos"] and body["stream_options"]["include_usage"] for body in fake.bodies)
    output = capsys.readouterr()
    assert "8 requests in" in output.out
    assert "goodput at e2e:19000ms: 8 of 8 requests (100.0%)" in output.out
    assert "TTFT" in output.out
    assert output.err == "" or "generator itself was slow" in output.err


def page(prefix: str, num_drafts: int, *num_accepted: int) -> bytes:
    """A page of metrics with drafts of two models."""
    names = {
        "inferd": ("inferd_draft_tokens_total", "inferd_accepted_draft_tokens_total"),
        "vllm": ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    }
    drafts, accepted = names.get(prefix, ("other_total", "another_total"))
    samples = [f'{drafts}{{model_name="m"}} {num_drafts:.1f}']
    samples += [f'{accepted}{{model_name="{i}"}} {number:.1f}' for i, number in enumerate(num_accepted)]
    return "\n".join([f"# TYPE {drafts} counter", *samples, f"{drafts}_created 5.0", ""]).encode()


@pytest.mark.parametrize(
    ("pages", "drafted", "line"),
    [
        ([page("inferd", 10, 4, 1), page("inferd", 50, 30, 5)], (40, 30), "30 of 40 draft tokens accepted (75.0%)"),
        ([page("vllm", 0, 0), page("vllm", 3, 1)], (3, 1), "1 of 3 draft tokens accepted (33.3%)"),
        ([page("inferd", 10, 4), page("inferd", 10, 4)], (0, 0), ""),
        ([page("other", 10, 4), page("other", 11, 4)], (None, None), ""),
        ([page("inferd", 10, 4)], (None, None), ""),
        ([], (None, None), ""),
    ],
)
def test_a_report_says_how_many_drafts_were_accepted_meanwhile(
    server: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], pages: list[bytes],
    drafted: tuple[int | None, int | None], line: str,
) -> None:  # fmt: skip
    """The server's counters before and after the run are compared; a page without them, or none, is no failure."""
    server[0].metrics = list(pages)
    assert run_bench(options(server[1]), None, tmp_path / "out.json") == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (results["num_drafts"], results["num_accepted"]) == drafted
    shown = capsys.readouterr().out
    assert line in shown and ("draft tokens" in shown) == bool(line)


def test_the_commands_defaults_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []

    def run(*arguments: object) -> int:
        given.append(arguments)
        return 5

    monkeypatch.setattr(session, "run_bench", run)
    monkeypatch.setenv("INFERD_API_KEY", "a, b")
    assert CliRunner().invoke(bench_app, ["serve"]).exit_code == 5
    assert given == [(LoadOptions(base_url="http://127.0.0.1:8000"), "a", None, None)]


def test_failed_requests_make_the_exit_code(server: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(options(server[1], model="short", warmup=0), None, None) == 1
    assert "8 requests failed: 8 x not the output length asked for" in capsys.readouterr().err


def test_a_run_that_cannot_begin_says_why(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"answered none of the warm-up requests: 2 x HTTP 429 slow_down \(later\)$"):
        run_bench(options(server[1], model="busy"), None, None)
    with pytest.raises(ConfigError, match=r"no server at http://127.0.0.1:1 .*inferd serve"):
        run_bench(options("http://127.0.0.1:1"), None, None)
    with pytest.raises(ConfigError, match="there is no directory"):
        run_bench(options(server[1]), None, tmp_path / "absent" / "out.json")
    with pytest.raises(ConfigError, match=r"--json must be a file, but .* is a directory"):
        run_bench(options(server[1]), None, tmp_path)
    with pytest.raises(ConfigError, match=r"--report must be a file, but .* is a directory"):
        run_bench(options(server[1]), None, None, tmp_path)
    server[0].pages["/v1/models"] = b'{"data": []}'
    with pytest.raises(ConfigError, match="/v1/models lists no model; give --model"):
        run_bench(options(server[1]), None, None)


@pytest.mark.parametrize("body", [b"{}", b'{"usage": null}', b'{"usage": {"prompt_tokens": 0}}', b"[1]", b"no JSON"])
def test_a_server_that_counts_no_tokens_is_refused(server: tuple[FakeServer, str], body: bytes) -> None:
    fake, url = server
    fake.has_tokenizer = False
    fake.pages["/v1/completions"] = body
    with pytest.raises(ConfigError, match=r"cannot be counted: /v1/completions answered without usage.prompt_tokens"):
        run_bench(options(url, prompts="words"), None, None)


@pytest.mark.parametrize("body", [b"[1, 2]", b'{"tokens": "no list"}', b'{"tokens": ["a"]}', b'"text"'])
def test_another_tokenize_is_as_none(server: tuple[FakeServer, str], body: bytes) -> None:
    server[0].pages["/tokenize"] = body
    with pytest.raises(ConfigError, match="/tokenize did not answer with ids"):
        run_bench(options(server[1]), None, None)


@pytest.mark.parametrize("body", [b'"7"', b"[]", b"{}", b"7 of 9"])
def test_a_version_that_is_none_stays_out_of_the_report(
    server: tuple[FakeServer, str], tmp_path: Path, body: bytes
) -> None:
    server[0].pages["/version"] = body
    assert run_bench(options(server[1]), None, tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text())["versions"]["server"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, but got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, but got 0"),
        ({"rate": 0.0}, "rate must be a number above 0"),
        ({"rate": float("nan")}, "rate must be a number above 0"),
        ({"shared_prefix": 129}, r"shared_prefix must be from 0 to input_len \(128\), but got 129"),
        ({"num_prefixes": 0}, "num_prefixes must be at least 1, but got 0"),
        ({"burstiness": 0.0}, "burstiness must be a number above 0"),
        ({"base_url": "localhost:8000"}, "base_url must begin with http"),
    ],
)
def test_options_out_of_bounds(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_times_of_a_stream() -> None:
    reader = StreamReader(start_s=10.0, expected_output=6)
    for now, ids in [(11.0, [1, 2]), (11.5, []), (13.0, [3]), (14.0, [4, 5]), (14.0, [6])]:
        reader.on_event(orjson.dumps({"choices": [{"text": "", "token_ids": ids}]}), now)
    reader.on_event(b'{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}}', 15.0)
    reader.on_event(b"[DONE]", 15.0)
    outcome = reader.outcome()
    assert (outcome.error, outcome.ttft_s, outcome.e2e_s, outcome.tpot_s) == (None, 1.0, 4.0, 0.6)
    assert outcome.gaps_s == (0.0, 2.0, 0.5, 0.5, 0.0)
    assert sum(outcome.gaps_s) == (outcome.tpot_s or 0.0) * 5


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40))
def test_quantiles_are_the_standard_librarys(values: list[float]) -> None:
    ours = [quantile(sorted(values), percent / 100) for percent in range(1, 100)]
    assert ours == pytest.approx(statistics.quantiles(values, n=100, method="inclusive"), abs=1e-9)


def test_arrivals() -> None:
    constant = list(arrival_offsets(options(rate=4.0, arrivals="constant", num_requests=9)))
    assert constant == [i / 4 for i in range(9)]
    poisson = list(arrival_offsets(options(rate=4.0, num_requests=4001)))
    gaps = [after - before for before, after in itertools.pairwise(poisson)]
    # 4,000 exponential gaps: mean and deviation are both 1/rate, within 5 standard errors (1.6% and 2.2%).
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.12)
    evenly_random = [rng.uniform(0, 0.5) for rng in map(random.Random, range(4000))]
    assert statistics.stdev(evenly_random) != pytest.approx(0.25, rel=0.12)
    assert poisson == list(arrival_offsets(options(rate=4.0, num_requests=4001)))
    assert poisson != list(arrival_offsets(options(rate=4.0, num_requests=4001, seed=1)))


def test_prompts_repeat_by_seed_and_share_only_the_prefix() -> None:
    asked = options(input_len=50, shared_prefix=20)
    ids = list(range(10_000))
    prompts = [IdPrompts(asked, ids).fields(index, 50)["prompt"] for index in range(20)]
    assert prompts == [IdPrompts(asked, ids).fields(index, 50)["prompt"] for index in range(20)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({prompt[20] for prompt in prompts}) > 10
    assert IdPrompts(options(input_len=50, seed=1), ids).fields(0, 50)["prompt"] != prompts[0]


def test_chat_prompts_have_the_words_that_make_the_length() -> None:
    asked = WordPrompts(options(api="chat", input_len=100, shared_prefix=40), 0.5)
    chats = [asked.fields(i, 100)["messages"][0]["content"] for i in (0, 1)]
    words = [chat.split() for chat in chats]
    assert [len(each) for each in words] == [50, 50]
    assert words[0][:20] == words[1][:20]
    assert words[0][20:] != words[1][20:]


def test_a_slow_generator_is_warned_of() -> None:
    outcome = Outcome(start_s=0.0, first_token_s=1.0, last_token_s=2.0, num_output=2, num_streamed=2)
    fine = summarize(LoadRun((outcome,), 1.0, (0.001,) * 100, 0.2))
    late = summarize(LoadRun((outcome,), 1.0, (0.001,) * 98 + (0.009, 0.009), 0.2))
    busy = summarize(LoadRun((outcome,), 1.0, (0.001,) * 100, 0.95))
    assert [len(warnings(report)) for report in (fine, late, busy)] == [0, 1, 1]


@pytest.mark.parametrize(("itl_s", "num_warnings"), [(0.010, 1), (0.044, 1), (0.046, 0), (1.0, 0)])
def test_a_lag_counts_beside_the_gaps_that_it_distorts(itl_s: float, num_warnings: int) -> None:
    """9 ms late: a fifth of 45 ms."""
    outcome = Outcome(start_s=0.0, first_token_s=1.0, last_token_s=2.0, gaps_s=(itl_s,), num_output=2, num_streamed=2)
    assert len(warnings(summarize(LoadRun((outcome,), 1.0, (0.009,) * 100, 0.2)))) == num_warnings


def test_a_failure_carries_what_the_server_said_first() -> None:
    outcomes = [Outcome(start_s=0.0, error="HTTP 400 x", message=f"request\n{index} [too] long") for index in range(3)]
    assert failures([*outcomes, Outcome(start_s=0.0, error="cut")]) == "3 x HTTP 400 x (request 0 [too] long), 1 x cut"


def test_an_error_in_the_stream_keeps_its_message() -> None:
    reader = StreamReader(start_s=0.0, expected_output=1)
    reader.on_event(b'{"error": {"code": "engine_error", "message": "it is gone"}}', 1.0)
    assert (reader.outcome().error, reader.outcome().message) == ("in the stream: engine_error", "it is gone")


def test_a_rate_and_a_concurrency_exclude_each_other() -> None:
    refused = CliRunner().invoke(bench_app, ["serve", "--rate", "5", "--concurrency", "8"]).exception
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith("--rate 5 and --concurrency 8 exclude each other: drop --concurrency")


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Fixed(128)),
        (" 64:256 ", Uniform(64, 256)),
        ("7:7", Uniform(7, 7)),
        ("lognormal:128,0.6", LogNormal(128, 0.6)),
        ("lognormal:128,1,2048", LogNormal(128, 1.0, 2048)),
    ],
)
def test_a_length_is_read_as_it_is_written(text: str, lengths: object) -> None:
    parsed = parse_lengths("input_len", text)
    assert parsed == lengths
    assert parse_lengths("input_len", str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "but got ''$"),
        ("-3", "but got '-3'$"),
        ("1.5", "but got '1.5'$"),
        ("\u0663", "but got"),
        ("0", "a length must be from 1 to 10000000"),
        ("9" * 5000, "a length must be from 1 to 10000000"),
        ("256:64", "256 is above 64"),
        ("normal:128,3", r"but got 'normal:128,3'$"),
        ("lognormal:128", r"but got 'lognormal:128'$"),
        ("lognormal:128,0.6,1,2", "but got 'lognormal:128,0.6,1,2'$"),
        ("lognormal:128,nan", "sigma must be above 0 and at most 5"),
        ("lognormal:128,0.6,100", "the maximum, 100, is below the median, 128"),
    ],
)
def test_a_length_that_means_nothing_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^output_len must be 128 \(always\), 64:256 (.|\n)*{reason}"):
        parse_lengths("output_len", text)


def test_lengths_are_distributed_as_asked() -> None:
    rng = random.Random(1)
    even = [Uniform(3, 6).draw(rng) for _ in range(4000)]
    # 1,000 of each expected, within 5 standard deviations (27 each).
    assert all(abs(even.count(length) - 1000) < 137 for length in (3, 4, 5, 6)) and set(even) == {3, 4, 5, 6}
    logs = sorted(LogNormal(200, 0.6).draw(rng) for _ in range(4000))
    # The median's standard error is 0.6 * 1.25 / sqrt(4000) = 1.2% of it.
    assert logs[2000] == pytest.approx(200, rel=0.06)
    assert statistics.stdev(map(math.log, logs)) == pytest.approx(0.6, rel=0.06)
    cut = [LogNormal(20, 2.0, 30).draw(rng) for _ in range(4000)]
    assert min(cut) == 1 and max(cut) == 30


def test_the_same_seed_asks_the_same_lengths() -> None:
    asked = options(input_len="5:60", output_len="lognormal:20,0.6", shared_prefix=10, num_prefixes=2)

    def drawn(asked: LoadOptions) -> list[tuple[list[int], int, int]]:
        requests = load_requests(asked, "m", IdPrompts(asked, range(10_000)), 0, 30)
        bodies = [(orjson.loads(request.body), request.output_len) for request in requests]
        return [(body["prompt"], body["max_tokens"], expected) for body, expected in bodies]

    first = drawn(asked)
    assert first == drawn(asked)
    assert first != drawn(options(input_len="5:60", output_len="lognormal:20,0.6", shared_prefix=10, seed=1))
    assert all(max_tokens == expected for _, max_tokens, expected in first)
    assert len({len(prompt) for prompt, _, _ in first}) > 10 and len({expected for _, _, expected in first}) > 10
    for turn in (0, 1):
        prefixes = [tuple(prompt[:10]) for prompt, _, _ in first[turn::2]]
        longest = max(prefixes, key=len)
        assert all(longest[: len(prefix)] == prefix for prefix in prefixes)
    assert first[0][0][:5] != first[1][0][:5]


def test_a_server_without_ids_or_a_tokenizer_gets_words(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    fake.has_tokenizer = False

    async def prompt(asked: LoadOptions) -> Any:
        client = Client(url, timeout_s=10)
        try:
            return (await make_prompts(asked, client, "good")).fields(0, 100)["prompt"]
        finally:
            client.close()

    # The scripted server counts 400 tokens for the page.
    num_words = len(asyncio.run(prompt(options(url, prompts="words", input_len=100))).split())
    assert num_words == round(100 * len(PAGE.split()) / 400)
    with pytest.raises(ConfigError, match="--vocab-size or --prompts words"):
        asyncio.run(prompt(options(url)))


def done(start_s: float, first_s: float, last_s: float, num_output: int, error: str | None = None) -> Outcome:
    return Outcome(start_s=start_s, first_token_s=first_s, last_token_s=last_s, num_output=num_output, error=error)


def test_goodput_by_hand() -> None:
    outcomes = [
        done(0.0, 0.5, 1.4, 10),  # TTFT 500 ms, TPOT 100 ms: on both bounds
        done(0.0, 0.6, 1.0, 10),  # TTFT too long
        done(0.0, 0.1, 1.1, 5),  # TPOT 250 ms
        done(1.0, 1.2, 1.2, 1),  # one token: no TPOT
        done(0.0, 0.1, 0.2, 10, error="cut"),
    ]
    objective = parse_objective("ttft:500ms,tpot:100ms")
    found = goodput(objective, outcomes, 2.0)
    assert (found.num_met, found.share_met, found.requests_per_s, found.output_tokens_per_s) == (2, 0.4, 1.0, 5.5)
    assert goodput(parse_objective("e2e:1s"), outcomes, 2.0).num_met == 2
    report = summarize(LoadRun(tuple(outcomes), 2.0, (), 0.1), objective)
    assert goodput_line(report, objective) == (
        "goodput at ttft:500ms,tpot:100ms: 2 of 5 requests (40.0%), 1.00 requests/s, 5.5 output tokens/s"
    )
    assert summarize(LoadRun(tuple(outcomes), 2.0, (), 0.1)).goodput is None


def test_an_objective_is_read_as_it_is_written() -> None:
    assert parse_objective(" e2e:2s , ttft:1.5 ms") == Objective(ttft_s=0.0015, e2e_s=2.0)
    assert parse_objective(str(parse_objective("ttft:250us,tpot:50ms"))) == Objective(ttft_s=0.00025, tpot_s=0.05)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("itl:5ms", "there is no latency 'itl'; there are ttft, tpot, e2e"),
        ("ttft:500", "'500' is not a time above 0"),
        ("ttft", "'' is not a time above 0"),
        ("tpot:0ms", "'0ms' is not a time above 0"),
        ("ttft:1s,ttft:2s", "ttft is given twice"),
        ("", "there is no latency ''"),
    ],
)
def test_an_objective_that_means_nothing_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^goodput must be latencies with units.*{reason}"):
        parse_objective(text)


def test_burstiness_changes_the_spread_of_the_gaps_and_not_their_mean() -> None:
    def gaps(burstiness: float) -> list[float]:
        offsets = list(arrival_offsets(options(rate=4.0, num_requests=4001, burstiness=burstiness)))
        return [after - before for before, after in itertools.pairwise(offsets)]

    for burstiness in (0.25, 4.0):
        found = gaps(burstiness)
        # Deviation mean/sqrt(shape); 5 standard errors of the mean are 16% at 0.25 and 4% at 4.
        assert statistics.mean(found) == pytest.approx(0.25, rel=0.16)
        assert statistics.stdev(found) == pytest.approx(0.25 / math.sqrt(burstiness), rel=0.2)


def test_tokens_that_came_together_are_one_chunk() -> None:
    reader = StreamReader(start_s=0.0, expected_output=3)
    for ids in ([1, 2], [3]):
        reader.on_event(orjson.dumps({"choices": [{"text": "", "token_ids": ids}]}), 1.0)
    assert reader.outcome().num_chunks == 2
