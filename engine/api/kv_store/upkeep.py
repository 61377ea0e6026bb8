"""Checks and clears a directory of KV segments, for the commands. Servers may use the directory meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from inferd.engine.api.kv_store import segment as files
from inferd.engine.api.kv_store.listing import Listing, list_all, opened_file, opened_folder, remove
from inferd.engine.api.kv_store.segment import Damaged


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of reading every segment."""

    num_sound: int
    damaged: dict[str, str]
    """Path in the directory -> what is wrong."""


def verify(root: int, listing: Listing, on_done: Callable[[int], None]) -> Verdict:
    """Read every segment of the listing, and compare all checksums. A segment that was removed meanwhile does not
    count. Nothing is changed. `on_done` gets the bytes of each file when it was read. Raises `OSError`."""
    num_sound, damaged = 0, dict[str, str]()
    for entry in listing.segments:
        try:
            with opened_folder(root, entry.folder) as folder, opened_file(folder, entry.name) as descriptor:
                files.check(descriptor, entry.segment)
            num_sound += 1
        except Damaged as error:
            damaged[entry.path] = str(error)
        except FileNotFoundError:
            pass
        on_done(entry.num_bytes)
    return Verdict(num_sound, damaged)


def clear(root: int) -> Listing:
    """Remove all segments and parts, and the folders that are empty then. Return what was there. The mark stays, and so
    does everything foreign. Raises `OSError`."""
    listing = list_all(root)
    for entry in (*listing.segments, *listing.parts):
        remove(root, entry)
    for folder in sorted(listing.folders, key=len, reverse=True):
        with suppress(OSError), opened_folder(root, folder[:-1]) as above:
            os.rmdir(folder[-1], dir_fd=above)  # fails for one that holds something
    return listing
