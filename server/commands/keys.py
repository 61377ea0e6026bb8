"""`inferd keys new`: makes a key, shows it once, and writes its entry. What is kept of it anywhere is its SHA-256."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

keys_app = typer.Typer(name="keys", help="Keys for callers.", no_args_is_help=True)


@keys_app.callback()
def _group() -> None:
    """Keys for callers."""


@keys_app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What logs call it.", show_default=False)],
    file: Annotated[
        Path | None, typer.Option(help="Keys file to add it to; made where it is not there.", metavar="FILE")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Keys of one tenant share caches and one fair share.")] = None,
    weight: Annotated[float, typer.Option(help="Of the tenant's share of the machine.")] = 1.0,
    concurrent_requests: Annotated[int | None, typer.Option(help="Most at a time.", metavar="N")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Most a minute.", metavar="N")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Most a minute, read and written.", metavar="N")] = None,
) -> None:
    """Make a key. It is shown once; a running server takes it within a second.

    Without --file the entry is shown as well, for a file of keys that is made elsewhere.
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
