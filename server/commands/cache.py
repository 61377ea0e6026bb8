"""`inferd cache`: shows and clears what servers keep for later starts: compiled kernels, tokenizers and packed
weights. A running server keeps what it has opened."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from inferd.engine.api.files import cache_folder

cache_app = typer.Typer(name="cache", help="Show and clear what is kept for later starts.", no_args_is_help=True)

FOLDERS = ("kernels", "tokenizers", "weights")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """One file."""

    kind: str
    """Its folder."""
    path: str
    num_bytes: int
    used_s: float
    """When it was last used, in seconds since 1970."""
    label: str
    """The model and settings of packed weights; empty for others, and for weights that were not written to the end."""


@cache_app.callback()
def _group() -> None:
    """Show and clear what is kept for later starts."""


@cache_app.command("ls")
def show(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List compiled kernels, tokenizers and packed weights, with their sizes and last uses."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    found = list(_kept())
    if as_json:
        print(json.dumps([asdict(kept) for kept in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("kind", "MiB", "last used", "what"):
        table.add_column(name, justify="right" if name == "MiB" else "left", overflow="fold")
    for kept in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.used_s))
        unnamed = "not written to the end" if kept.kind == "weights" else Path(kept.path).name
        table.add_row(kept.kind, f"{kept.num_bytes / _MIB:,.1f}", used, kept.label or unnamed)
    console = Console(highlight=False)
    if found:
        console.print(table)
    total = sum(kept.num_bytes for kept in found)
    console.print(f"{total / _MIB:,.1f} MiB in {cache_folder('')}", markup=False, soft_wrap=True)


@cache_app.command("clear")
def clear(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help="kernels, tokenizers or weights; all by default.")
    ] = None,
) -> None:
    """Remove what is kept. The next start makes it anew."""
    unknown = [kind for kind in kinds or () if kind not in FOLDERS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(FOLDERS)}")
    removed = 0
    for kept in list(_kept()):
        if not kinds or kept.kind in kinds:
            Path(kept.path).unlink(missing_ok=True)
            removed += kept.num_bytes
    typer.echo(f"removed {removed / _MIB:,.1f} MiB")


def _kept() -> Iterator[Kept]:
    from inferd.engine.api.weight_cache import files_in, label_of  # noqa: PLC0415

    for kind in FOLDERS:
        for used in files_in(cache_folder(kind)):
            if not used.num_bytes:
                continue  # a lock
            label = label_of(used.path) if kind == "weights" else ""
            yield Kept(kind, str(used.path), used.num_bytes, used.used_s, label)
