"""`inferd bench serve`: the command line of a load test. Figures go to stdout, everything else to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.options import (
    DEFAULT_CONCURRENCY,
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    SPELLINGS,
    LoadOptions,
    parse_lengths,
)
from inferd.server.commands.bench.slo import SPELLING, parse_objective

bench_app = typer.Typer(name="bench", help="Measure a running server.", no_args_is_help=True)


@bench_app.callback()
def _group() -> None:
    """Measure a running server."""


@bench_app.command("serve")
def bench_serve(
    base_url: Annotated[
        str, typer.Option(help="URL of the server.", rich_help_panel="Server")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(help="Model to ask. Default: the first that the server lists.", rich_help_panel="Server"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="INFERD_API_KEY", help="API key, if the server requires one.", rich_help_panel="Server"),
    ] = None,
    api: Annotated[
        Literal["completions", "chat"],
        typer.Option(
            help="Send completions with a prompt, or chats with one user message.", rich_help_panel="Requests"
        ),
    ] = "completions",
    prompts: Annotated[
        Literal["ids", "words"],
        typer.Option(
            help="Make completion prompts of random token ids, or of random words if the server accepts no ids.",
            rich_help_panel="Requests",
        ),
    ] = "ids",
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", help="Number of requests to measure.", rich_help_panel="Requests")
    ] = 64,
    input_len: Annotated[
        str, typer.Option(help=f"Number of prompt tokens: {SPELLINGS}.", metavar="LENGTHS", rich_help_panel="Requests")
    ] = str(DEFAULT_INPUT_LEN),
    output_len: Annotated[
        str,
        typer.Option(
            help="Number of tokens that each answer has, exactly.", metavar="LENGTHS", rich_help_panel="Requests"
        ),
    ] = str(DEFAULT_OUTPUT_LEN),
    shared_prefix: Annotated[
        int, typer.Option(help="Number of tokens with which all prompts begin alike.", rich_help_panel="Requests")
    ] = 0,
    num_prefixes: Annotated[
        int, typer.Option(help="Number of different shared prefixes, used in turn.", rich_help_panel="Requests")
    ] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", rich_help_panel="Requests")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.", rich_help_panel="Requests")] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Draw prompt ids below this number instead of calling /tokenize.", rich_help_panel="Requests"
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            help=f"Number of requests to keep in flight (default {DEFAULT_CONCURRENCY}).",
            rich_help_panel="Load",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests to start per second, instead of --concurrency.", rich_help_panel="Load"),
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "constant"],
        typer.Option(help="Gaps between requests of --rate: random or equal.", rich_help_panel="Load"),
    ] = "poisson",
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of random gaps: 1 is Poisson, below 1 comes in bursts, above 1 is more even.",
            rich_help_panel="Load",
        ),
    ] = 1.0,
    warmup: Annotated[
        int, typer.Option(help="Number of requests to send before measuring.", rich_help_panel="Load")
    ] = 2,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a request counts as failed.", rich_help_panel="Load")
    ] = 600.0,
    goodput: Annotated[
        str | None,
        typer.Option(
            help=f"Also report how many requests met these targets: {SPELLING}.",
            metavar="SLO",
            rich_help_panel="Report",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write settings and figures to this file.", rich_help_panel="Report"
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page with plots to this HTML file. It works offline.",
            rich_help_panel="Report",
        ),
    ] = None,
) -> None:
    """Send load to a server, and report TTFT, TPOT, ITL and throughput.

    The exit code is 1 if any request failed, and 2 if nothing was measured: an option was wrong, no server answered,
    or the warm-up failed.
    """
    options = LoadOptions(
        base_url=base_url,
        model=model,
        api=api,
        prompts=prompts,
        num_requests=num_requests,
        concurrency=_concurrency(concurrency, rate),
        rate=rate,
        arrivals=arrivals,
        burstiness=burstiness,
        input_len=parse_lengths("input_len", input_len),
        output_len=parse_lengths("output_len", output_len),
        shared_prefix=shared_prefix,
        num_prefixes=num_prefixes,
        goodput=None if goodput is None else parse_objective(goodput),
        temperature=temperature,
        seed=seed,
        warmup=warmup,
        timeout_s=timeout_s,
        vocab_size=vocab_size,
    )

    from inferd.server.commands.bench.session import run_bench  # noqa: PLC0415

    raise typer.Exit(run_bench(options, first_key(api_key), json_file, report))


@bench_app.command("compare")
def bench_compare(
    files: Annotated[list[Path], typer.Argument(help="Reports that `inferd bench serve --json` wrote.")],
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write an HTML page with the table. Runs at several rates get plots over it."
        ),
    ] = None,
) -> None:
    """Put the figures of several runs beside each other, with ratios to the first."""
    from inferd.server.commands.bench.compare import compare  # noqa: PLC0415

    raise typer.Exit(compare(files, report))


def _concurrency(given: int | None, rate: float | None) -> int:
    """Raises `ConfigError` if both are given, because a rate starts requests however many are in flight."""
    if given is not None and rate is not None:
        raise ConfigError(
            f"--rate {rate:g} and --concurrency {given} exclude each other: "
            "drop --concurrency to start requests at a rate, or --rate to keep that many in flight"
        )
    return DEFAULT_CONCURRENCY if given is None else given


def first_key(keys: str | None) -> str | None:
    """The first of the keys in INFERD_API_KEY, which the server reads as a list. Each of them is valid."""
    return keys.partition(",")[0].strip() if keys else None
