"""`inferd bench serve`: the command line around a load run. Figures go to stdout, everything else to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.lengths import SPELLINGS, parse_lengths
from inferd.server.commands.bench.options import DEFAULT_CONCURRENCY, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, LoadOptions
from inferd.server.commands.bench.slo import SPELLING, parse_objective

bench_app = typer.Typer(name="bench", help="Measure a running server.", no_args_is_help=True)


@bench_app.callback()
def _group() -> None:
    """Measure a running server."""


@bench_app.command("serve")
def bench_serve(
    base_url: Annotated[str, typer.Option(help="The server.", rich_help_panel="Server")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first it lists.", rich_help_panel="Server")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="INFERD_API_KEY", help="If it asks for one.", rich_help_panel="Server")
    ] = None,
    api: Annotated[
        Literal["completions", "chat"], typer.Option(help="A prompt, or one user message.", rich_help_panel="Requests")
    ] = "completions",
    prompts: Annotated[
        Literal["ids", "words"],
        typer.Option(help="Completions of random ids, or of words for servers without.", rich_help_panel="Requests"),
    ] = "ids",
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", rich_help_panel="Requests")] = 64,
    input_len: Annotated[
        str, typer.Option(help=f"Prompt tokens: {SPELLINGS}.", metavar="LENGTHS", rich_help_panel="Requests")
    ] = str(DEFAULT_INPUT_LEN),
    output_len: Annotated[
        str, typer.Option(help="Tokens to generate, exactly.", metavar="LENGTHS", rich_help_panel="Requests")
    ] = str(DEFAULT_OUTPUT_LEN),
    shared_prefix: Annotated[int, typer.Option(help="Prompt tokens alike in all.", rich_help_panel="Requests")] = 0,
    num_prefixes: Annotated[
        int, typer.Option(help="Different shared prefixes, taken in turn.", rich_help_panel="Requests")
    ] = 1,
    temperature: Annotated[float, typer.Option(rich_help_panel="Requests")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.", rich_help_panel="Requests")] = 0,
    vocab_size: Annotated[
        int | None, typer.Option(help="Draw ids below it; do not ask /tokenize.", rich_help_panel="Requests")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", help=f"In flight; default {DEFAULT_CONCURRENCY}.", rich_help_panel="Load"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s, instead of a concurrency.", rich_help_panel="Load")
    ] = None,
    arrivals: Annotated[Literal["poisson", "constant"], typer.Option(rich_help_panel="Load")] = "poisson",
    burstiness: Annotated[
        float, typer.Option(help="Of Poisson arrivals: below 1 in bunches, above 1 evenly.", rich_help_panel="Load")
    ] = 1.0,
    warmup: Annotated[int, typer.Option(help="Requests before measuring.", rich_help_panel="Load")] = 2,
    timeout_s: Annotated[float, typer.Option(help="Longest request.", rich_help_panel="Load")] = 600.0,
    goodput: Annotated[
        str | None,
        typer.Option(help=f"Also count what met an objective: {SPELLING}.", metavar="SLO", rich_help_panel="Report"),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write settings and figures here.", rich_help_panel="Report"),
    ] = None,
) -> None:
    """Load a server and report TTFT, TPOT, ITL and throughput. Exits 1 if any request failed, and 2 where nothing
    could be measured: wrong options, no server, a warm-up that failed."""
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

    raise typer.Exit(run_bench(options, first_key(api_key), json_file))


def _concurrency(given: int | None, rate: float | None) -> int:
    """Raises `ConfigError` where both are given: a rate starts requests however many are in flight."""
    if given is not None and rate is not None:
        raise ConfigError(
            f"--rate {rate:g} and --concurrency {given} exclude each other: "
            "drop --concurrency to start requests on time, or --rate to keep that many in flight"
        )
    return DEFAULT_CONCURRENCY if given is None else given


def first_key(keys: str | None) -> str | None:
    """INFERD_API_KEY may hold several keys, as the server reads it; any of them opens it."""
    return keys.partition(",")[0].strip() if keys else None
