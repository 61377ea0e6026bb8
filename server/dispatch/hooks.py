"""The router's calls to the owner of a model's engines. Each is None until the owner sets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec import Raw

from inferd.engine.api.wire.messages import Phase


@dataclass(slots=True)
class Hooks:
    """The hooks of one model."""

    on_wanted: Callable[[], None] | None = None
    """Called once when unloaded engines are to start."""
    on_unload: Callable[[], Awaitable[None]] | None = None
    """Stops the engines."""
    on_recovered: Callable[[int, float], None] | None = None
    """Called with (requests sent again, seconds for which no engine computed them)."""
    on_phase: Callable[[int, Phase], None] | None = None
    """Called with a replica and a phase of its start that has ended."""
    on_kv_events: Callable[[int, Raw], None] | None = None
    """Called with a replica and KV events of its cache."""

    def report_cache(self, index: int, events: Raw) -> None:
        """Publish KV events of a replica's cache, if somebody subscribes."""
        if self.on_kv_events is not None:
            self.on_kv_events(index, events)
