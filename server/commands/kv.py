"""`inferd kv`: shows, checks and clears a directory of KV segments. Servers may use it meanwhile."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from inferd.engine.api.kv_store.listing import Listing

kv_app = typer.Typer(name="kv", help="Show, check and clear a directory of KV segments.", no_args_is_help=True)

_MIB = 2**20
_SHOWN_DIGITS = 16
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of KV segments.", show_default=False)]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Group:
    """The segments of one tenant of one model."""

    fingerprint: str
    tenant: str
    num_files: int
    num_bytes: int
    oldest_use_s: float
    """The time at which the least recent of them was last used, in seconds since 1970."""
    newest_use_s: float


@kv_app.callback()
def _group() -> None:
    """Show, check and clear a directory of KV segments."""


@kv_app.command("ls")
def show(folder: _Folder, *, as_json: _AsJson = False) -> None:
    """List models by fingerprint and their tenants, with files, sizes and last uses."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    with _listed(folder) as (_, listing):
        groups = _groups(listing)
    if as_json:
        print(json.dumps({"groups": [asdict(group) for group in groups], **_others(listing)}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("fingerprint", "tenant", "files", "MiB", "oldest use", "newest use"):
        table.add_column(name, justify="right" if name in ("files", "MiB") else "left", overflow="fold")
    for group in groups:
        table.add_row(
            group.fingerprint[:_SHOWN_DIGITS],
            group.tenant,
            f"{group.num_files:,}",
            f"{group.num_bytes / _MIB:,.1f}",
            _date(group.oldest_use_s),
            _date(group.newest_use_s),
        )
    console = Console(highlight=False)
    if groups:
        console.print(table)
    num_files, size = len(listing.segments), listing.num_bytes / _MIB
    console.print(f"{num_files:,} segments, {size:,.1f} MiB in {folder}", markup=False, soft_wrap=True)
    _tell_others(listing)


@kv_app.command("verify")
def verify(folder: _Folder, *, as_json: _AsJson = False) -> None:
    """Read every segment and compare its checksums. Exit code 1 if one is damaged.

    Nothing is changed. A server removes a damaged segment when it reads it.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    from inferd.engine.api.kv_store import upkeep  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with (
        _listed(folder) as (root, listing),
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        task = progress.add_task("", total=sum(entry.num_bytes for entry in listing.segments))
        verdict = upkeep.verify(root, listing, lambda num_bytes: progress.advance(task, num_bytes))
    if as_json:
        print(json.dumps({**asdict(verdict), **_others(listing)}, indent=2))
    else:
        for path, reason in verdict.damaged.items():
            typer.echo(f"{path}: {reason}")
        typer.echo(f"{verdict.num_sound:,} segments are sound, {len(verdict.damaged):,} damaged")
        _tell_others(listing)
    raise typer.Exit(1 if verdict.damaged else 0)


@kv_app.command("clear")
def clear(
    folder: _Folder, *, is_sure: Annotated[bool, typer.Option("--yes", help="Remove without a question.")] = False
) -> None:
    """Remove all segments. Files that inferd did not write stay."""
    from inferd.engine.api.kv_store import upkeep  # noqa: PLC0415

    with _listed(folder) as (root, listing):
        if not is_sure:
            size = f"{len(listing.segments):,} segments, {listing.num_bytes / _MIB:,.1f} MiB"
            typer.confirm(f"Remove {size} from {folder}?", abort=True)
        listing = upkeep.clear(root)
    typer.echo(f"removed {len(listing.segments):,} segments, {listing.num_bytes / _MIB:,.1f} MiB")
    _tell_foreign(listing)


@contextmanager
def _listed(folder: Path) -> Iterator[tuple[int, Listing]]:
    """Descriptor of the directory, and what it holds. Raises `StartError`, also for an `OSError` of the caller."""
    from inferd.engine.api.kv_store.listing import list_all  # noqa: PLC0415
    from inferd.engine.api.kv_store.opening import existing  # noqa: PLC0415

    with existing(folder) as root:
        yield root, list_all(root)


def _groups(listing: Listing) -> list[Group]:
    """Largest first."""
    found = defaultdict(list)
    for entry in listing.segments:
        found[entry.folder].append(entry)
    groups = [
        Group(
            fingerprint=fingerprint,
            tenant=tenant,
            num_files=len(entries),
            num_bytes=sum(entry.num_bytes for entry in entries),
            oldest_use_s=min(entry.used_ns for entry in entries) / 1e9,
            newest_use_s=max(entry.used_ns for entry in entries) / 1e9,
        )
        for (fingerprint, tenant), entries in found.items()
    ]
    return sorted(groups, key=lambda group: (-group.num_bytes, group.fingerprint, group.tenant))


def _others(listing: Listing) -> dict[str, list[str]]:
    """Files that are no segments, for JSON."""
    return {"parts": [part.path for part in listing.parts], "foreign": listing.foreign}


def _tell_others(listing: Listing) -> None:
    if listing.parts:
        num_left = sum(part.is_left for part in listing.parts)
        typer.echo(f"{len(listing.parts):,} parts of segments, {num_left:,} of them left by processes that were killed")
    _tell_foreign(listing)


def _tell_foreign(listing: Listing) -> None:
    for path in listing.foreign:
        typer.echo(f"not inferd's, left alone: {path if path.isprintable() else ascii(path)}")


def _date(used_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(used_s))
