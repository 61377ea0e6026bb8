"""`inferd keys new`: makes a key, shows it once, and writes its entry. Only its SHA-256 is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
