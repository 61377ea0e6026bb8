"""The objects that all handlers of one model share. `create_app` makes them once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inferd.server.dispatch.router import Router
from inferd.server.endpoints.responses.background import Background
from inferd.server.endpoints.responses.store import ResponseStore
from inferd.server.generate.intake import Intake
from inferd.server.generate.prompts import PromptReader
from inferd.server.observability.metrics import Metrics
from inferd.server.schema.answers.operation import Config
from inferd.server.schema.latency import NO_TARGETS, Targets
from inferd.server.text.model import ServedModel
from inferd.server.text.text_threads import TextThreads


@dataclass(frozen=True, slots=True)
class Service:
    """One served model, and the objects that lead a request to it."""

    model: ServedModel
    router: Router
    metrics: Metrics
    intake: Intake
    prompts: PromptReader
    threads: TextThreads
    responses: ResponseStore
    background: Background
    version: str
    """Version of inferd."""
    unknown_fields: Literal["refuse", "warn"]
    keep_alive_s: float
    targets: Targets = NO_TARGETS
    """Targets of requests that set none."""
    e2e_target_s: float | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the weight files by name, as far as they are known."""
    config: Config = field(default_factory=dict)
    """The answer of /config, without secrets."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (*self.model.names, *self.router.adapters.named)
