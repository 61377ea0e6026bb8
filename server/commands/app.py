"""The subcommands of `inferd`. The flags of `serve` are made from the settings model.

Each command imports its code only when it runs, so that `--help` answers at once. `inferd keys new` is here. It makes a
key, shows it once, and writes its entry, in which only its SHA-256 is stored. This file knows no engine and no HTTP.
`cli` runs it, and prints a user's error.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup, TyperOption

from inferd.engine.api.process import garbage
from inferd.server.commands.bench.command import bench_app, first_key
from inferd.server.commands.cache import cache_app
from inferd.server.commands.kv import kv_app
from inferd.server.config.fields import Setting
from inferd.server.config.names import split_name
from inferd.server.config.settings import SETTINGS, Settings

keys_app = typer.Typer(name="keys", help="Make API keys for clients.", no_args_is_help=True)


@keys_app.callback()
def _group() -> None:
    """Make API keys for clients."""


@keys_app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the key in logs.", show_default=False)],
    file: Annotated[
        Path | None, typer.Option(help="Keys file to add the key to. It is created if it is missing.", metavar="FILE")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant of the key. Keys of one tenant share its caches and its fair share.")
    ] = None,
    weight: Annotated[float, typer.Option(help="Weight of the tenant's fair share of the machine.")] = 1.0,
    concurrent_requests: Annotated[
        int | None, typer.Option(help="Maximum number of requests at the same time.", metavar="N")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Maximum number of requests per minute.", metavar="N")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Maximum number of tokens per minute, prompts and answers together.", metavar="N")
    ] = None,
) -> None:
    """Make a key and show it once. A running server accepts it within a second.

    Without --file the entry is shown too, so that it can be added to a keys file by hand.
    """
    from inferd.server.auth.keys_file import append_entry, digest_of, entry_of, entry_text, new_key  # noqa: PLC0415

    key = new_key()
    entry = entry_of(
        sha256=digest_of(key).hex(),
        name=name,
        tenant=tenant,
        weight=weight,
        concurrent_requests=concurrent_requests,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    if file is None:
        typer.echo(f"keys:\n{entry_text(entry)}", err=True)
    else:
        append_entry(file, entry)
        typer.echo(f"added {name} to {file}; serve with --keys-file {file}", err=True)
    typer.echo(key)


class _Commands(TyperGroup):
    """The subcommands, with a help that fits a screen."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if isinstance(param, TyperOption) and param.name == "show_completion":
                param.help = "Show completion for the current shell."
        return params


app = typer.Typer(
    name="inferd",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app)
app.add_typer(keys_app)
app.add_typer(cache_app)
app.add_typer(kv_app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"inferd {installed_version('inferd')}")
        raise typer.Exit


@app.callback()
def _root(
    is_version_asked: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models to OpenAI clients."""


def _settings_parameters(panels: Collection[str]) -> list[inspect.Parameter]:
    """One keyword parameter for each setting of `panels`. Values stay text; the settings model checks them."""
    return [
        inspect.Parameter(about.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(about))
        for about in SETTINGS.values()
        if about.panel in panels and about.name not in _POSITIONAL
    ]


def _option(about: Setting) -> Any:
    choices = f" One of {', '.join(about.choices)}." if about.choices else ""
    default = f" Default: {about.default}." if about.default else ""
    # A switch gets a --no- flag only if it can be on by default. This keeps the help narrow.
    is_double = about.is_switch and about.default != "off"
    option = typer.Option(
        f"{about.flag}/--no-{about.flag.removeprefix('--')}" if is_double else about.flag,
        help=f"{about.help}{choices}{default}",
        metavar=about.metavar or " ",
        rich_help_panel=about.panel,
        show_default=False,
        autocompletion=(lambda: list(about.choices)) if about.choices else None,
    )
    kind = bool if about.is_switch else list[str] if about.is_list else str
    return Annotated[kind | None, option]


def _with_settings(*panels: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**flags` by one flag for each setting of `panels`. Models stay positional arguments."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        signature = inspect.Signature([*own, *_settings_parameters(panels)])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorated


def _load(models: list[str] | None, config: Path | None, flags: Mapping[str, object]) -> Settings:
    """The settings of a command. Raises `ConfigError`."""
    is_plain = models is not None and len(models) == 1 and split_name(models[0])[0] is None
    named = {"model": models[0]} if models and is_plain else {"models": models}
    given = {name: value for name, value in {**flags, **named}.items() if value not in (None, [])}
    return Settings.load(given, config)


_POSITIONAL = ("model", "models")
_Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file of settings.", rich_help_panel="Model", show_default=False),
]


@app.command()
@_with_settings(*dict.fromkeys(about.panel for about in SETTINGS.values()))
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help=f"{SETTINGS['model'].help} NAME=MODEL serves it under that name. Several models share the server.",
            show_default=False,
        ),
    ] = None,
    *,
    config: _Config = None,
    **flags: object,
) -> None:
    """Serve a model, or several.

    Each option can also be set by a variable INFERD_<NAME> or by a line of the YAML file (--config).
    """
    settings = _load(models, config, flags)

    with garbage.collector_paused():
        from inferd.engine.api.process.engine_forks import EngineForks  # noqa: PLC0415
        from inferd.server.text.render_workers import render_process  # noqa: PLC0415

    # These processes import their libraries side by side: each takes a second or more.
    with contextlib.closing(EngineForks()) as forks, contextlib.closing(render_process()) as renders:
        renders.start()
        with garbage.collector_paused():
            from inferd.engine.api.process.logs import LogStyle, configure  # noqa: PLC0415
            from inferd.server.lifecycle.serve import serve as run_server  # noqa: PLC0415

        configure(LogStyle(settings.log_level, settings.log_format))
        for warning in settings.warnings:
            logging.getLogger("inferd").warning(warning)
        raise typer.Exit(run_server(settings, forks))


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Question to ask once. Without it, a conversation starts.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask. Default: the first that the server lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="INFERD_API_KEY", help="API key, if the server requires one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature. Default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens in an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling. The same seed gives the same answer.")] = None,
) -> None:
    """Chat with a running server."""
    from inferd.server.commands.chat_repl import ChatOptions, run_chat  # noqa: PLC0415

    options = ChatOptions(
        base_url=base_url,
        model=model,
        api_key=first_key(api_key),
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
    )
    raise typer.Exit(run_chat(options, question))


@app.command()
def embed(
    file: Annotated[str, typer.Argument(help="File with one text a line, or JSON lines (.jsonl); - reads the input.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write: JSON lines, or .npy. Default: FILE.embeddings.jsonl."),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", "--url", help="URL of a running server. Without it the command starts its own."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model to ask, or to serve without --base-url. Default: the server's first that embeds."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="INFERD_API_KEY", help="API key, if the server requires one.")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field of each JSON line that has the text. Default for .jsonl: text.")
    ] = None,
    input_type: Annotated[str | None, typer.Option(help="Kind of texts, such as query or document.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="Name of the model's prompt that begins each text.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Number of leading components to keep.", min=1)] = None,
    output_dtype: Annotated[
        Literal["float", "int8", "uint8", "binary", "ubinary"], typer.Option(help="Type of the components.")
    ] = "float",
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long. Otherwise such a line fails.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Maximum number of lines in a request.", min=1, max=2048)] = 128,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", help="Number of requests to keep in flight.", min=1, max=256)
    ] = 4,
    patience: Annotated[
        float, typer.Option(help="Seconds to try again while the server is busy or away.", min=0)
    ] = 600.0,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever an earlier run left.")] = False,
) -> None:
    """Embed the lines of a file, or the rest of it.

    The exit code is 1 if lines failed: the output says which, and why.
    """
    from inferd.server.commands.embed.run import EmbedOptions, run  # noqa: PLC0415

    options = EmbedOptions(
        file=file,
        output=output,
        base_url=base_url,
        model=model,
        api_key=first_key(api_key),
        field=field,
        input_type=input_type,
        prompt_name=prompt_name,
        dimensions=dimensions,
        output_dtype=output_dtype,
        truncate=truncate,
        batch=batch,
        concurrency=concurrency,
        patience_s=patience,
        restart=restart,
    )
    raise typer.Exit(run(options))


@app.command()
@_with_settings("Model", "Engine")
def plan(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Hub id, checkpoint directory, GGUF file, config.json file, tiny or smollm2; or several of them.",
            show_default=False,
        ),
    ] = None,
    *,
    config: _Config = None,
    batch: Annotated[int, typer.Option(help="Number of sequences that run at the same time.", metavar="N")] = 1,
    context: Annotated[
        int | None,
        typer.Option(help="Number of tokens of each sequence.", metavar="N", show_default="the model's maximum"),
    ] = None,
    overhead: Annotated[
        str, typer.Option(help="Overhead, as a percentage of weights and KV cache.", metavar="N[-N]")
    ] = "10-20",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every size in bytes.")] = False,
    **flags: object,
) -> None:
    """Show how much memory models need, and what serve would do.

    Takes the settings of serve, also from variables and the YAML file. Loads no weights: config.json is enough.
    --device also takes the name of a GPU that is not here, such as rtx3090, l40s or h100.
    """
    from inferd.engine.api.machine.cards import card  # noqa: PLC0415

    asked = flags["device"]
    elsewhere = card(asked) if isinstance(asked, str) and asked not in SETTINGS["device"].choices else None
    if elsewhere is not None:
        flags["device"] = "cuda"
    # The command serves nobody, so it needs no key, whatever INFERD_HOST says.
    settings = _load(models, config, {**flags, "allow_unauthenticated": True})
    for warning in settings.warnings:
        typer.echo(f"inferd: {warning}", err=True)
    from inferd.server.commands.plan_table import run  # noqa: PLC0415

    raise typer.Exit(run(settings, batch, context, overhead, elsewhere, as_json=as_json))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    template: Annotated[
        Path | None, typer.Option("--template", help="Show what is derived from this chat template.", metavar="FILE")
    ] = None,
) -> None:
    """Check whether this machine can serve a model.

    Settings come from INFERD_* variables: INFERD_PORT=8001 inferd doctor.
    """
    if template is not None:
        from inferd.server.commands.template_report import run as report  # noqa: PLC0415

        raise typer.Exit(report(template, as_json=as_json))
    from inferd.server.commands.doctor import run  # noqa: PLC0415

    raise typer.Exit(run(as_json=as_json))


# The help lists --version instead, so that it fits a screen.
@app.command(hidden=True)
def version() -> None:
    """Print the version."""
    _show_version(True)
