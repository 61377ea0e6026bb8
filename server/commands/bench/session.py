"""Runs one load test from start to exit code: finds the model, warms up, sends the load, reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.answer import Outcome
from inferd.server.commands.bench.client import Client, ClientError
from inferd.server.commands.bench.load import LoadRun, closed_loop, run_load
from inferd.server.commands.bench.options import LoadOptions
from inferd.server.commands.bench.page import run_page
from inferd.server.commands.bench.prompts import LoadRequest, load_requests, make_prompts
from inferd.server.commands.bench.report import (
    Drafts,
    as_json,
    drafts_line,
    failures,
    goodput_line,
    headline,
    summarize,
    table,
    warnings,
)


@dataclass(frozen=True, slots=True)
class Session:
    """A finished load run, and the server that it loaded."""

    run: LoadRun
    model: str
    server_version: str | None
    drafts: Drafts | None
    """Draft tokens that the server verified meanwhile; None if its metrics do not say."""


def run_bench(options: LoadOptions, api_key: str | None, json_file: Path | None, page: Path | None = None) -> int:
    """Run and print. Returns 0, or 1 if any request failed. Raises `ConfigError` if the run cannot begin."""
    _check_file("--json", json_file)
    _check_file("--report", page)
    session = measure(options, api_key)
    report = summarize(session.run, options.goodput, session.drafts)
    console = Console(highlight=False)
    console.print(headline(report), soft_wrap=True)
    if options.goodput is not None:
        console.print(goodput_line(report, options.goodput), soft_wrap=True)
    if (line := drafts_line(report)) is not None:
        console.print(line, soft_wrap=True)
    console.print(table(report))
    problems = Console(stderr=True, highlight=False)
    if report.num_failed:
        message = f"{report.num_failed} requests failed: {failures(session.run.outcomes)}"
        problems.print(message, style="bold red", markup=False, soft_wrap=True)
    for warning in warnings(report):
        problems.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    content = as_json(report, options, session.model, session.server_version)
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    if page is not None:
        page.write_text(run_page(session.run, report, options, content))
    return 1 if report.num_failed else 0


def _check_file(flag: str, file: Path | None) -> None:
    """Raises `ConfigError` before the load if a file could not be written after it."""
    if file is not None and not file.resolve().parent.is_dir():
        raise ConfigError(f"{flag}: there is no directory {file.resolve().parent}")
    if file is not None and file.is_dir():
        raise ConfigError(f"{flag} must be a file, but {file} is a directory")


def measure(options: LoadOptions, api_key: str | None = None) -> Session:
    """Warm up and load the server. Raises `ConfigError` if the run cannot begin."""
    return uvloop.run(_session(options, api_key))


async def _session(options: LoadOptions, api_key: str | None) -> Session:
    client = Client(options.base_url, api_key, options.timeout_s)
    try:
        model = options.model or await _first_model(client, options.base_url)
        server_version = await _server_version(client)
        prompts = await make_prompts(options, client, model)
        # Measured requests have the first numbers, so that the length of the warm-up changes none of them.
        measured = list(load_requests(options, model, prompts, 0, options.num_requests))
        await _warm_up(client, options, list(load_requests(options, model, prompts, len(measured), options.warmup)))
        before = await _drafts(client)
        run = await _measure(client, options, measured)
        after = await _drafts(client)
        drafts = None if before is None or after is None else after.since(before)
        return Session(run, model, server_version, drafts)
    finally:
        client.close()


async def _first_model(client: Client, base_url: str) -> str:
    try:
        reply = await client.get("/v1/models")
    except ClientError as error:
        raise ConfigError(
            f"no server at {base_url} ({error}): start one with `inferd serve`, or give --base-url"
        ) from error
    if reply.status != 200:
        raise ConfigError(
            f"{base_url}/v1/models answered {reply.status}" + ("; give --api-key" * (reply.status == 401))
        )
    try:
        return str(orjson.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{base_url}/v1/models lists no model; give --model") from error


async def _server_version(client: Client) -> str | None:
    """The server's version, or None if it has no such page. The report shows either."""
    try:
        reply = await client.get("/version")
        return str(orjson.loads(reply.body)["version"]) if reply.status == 200 else None
    except (ClientError, ValueError, LookupError, TypeError):
        return None


async def _drafts(client: Client) -> Drafts | None:
    """Draft tokens that the server has verified so far; None if it has no such page or does not count them."""
    try:
        reply = await client.get("/metrics")
    except ClientError:
        return None
    return Drafts.read(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None


async def _warm_up(client: Client, options: LoadOptions, requests: list[LoadRequest]) -> None:
    outcomes = await closed_loop(client, options, requests)
    if outcomes and all(outcome.error is not None for outcome in outcomes):
        raise ConfigError(f"the server answered none of the warm-up requests: {failures(outcomes)}")


async def _measure(client: Client, options: LoadOptions, requests: list[LoadRequest]) -> LoadRun:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        how = f"{options.rate:g} requests/s" if options.rate is not None else f"{options.concurrency} in flight"
        task = progress.add_task(how, total=options.num_requests)

        def on_done(outcome: Outcome) -> None:
            progress.advance(task)

        return await run_load(client, options, requests, on_done)
