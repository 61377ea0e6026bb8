"""The objects that handlers share: some for each model, and a table to find them by a model's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from inferd.server.api.responses.background import Background
from inferd.server.api.responses.store import ResponseStore
from inferd.server.dispatch.router import Router
from inferd.server.errors import table as errors
from inferd.server.generate.intake import Intake
from inferd.server.generate.prompts import PromptReader
from inferd.server.observability.metrics import Metrics
from inferd.server.schema.answers.operation import Config
from inferd.server.schema.latency import NO_TARGETS, Targets
from inferd.server.text.lanes import Lanes
from inferd.server.text.model import ServedModel


@dataclass(frozen=True, slots=True)
class Service:
    """One served model, and the objects that lead a request to it."""

    model: ServedModel
    router: Router
    metrics: Metrics
    intake: Intake
    prompts: PromptReader
    lanes: Lanes
    responses: ResponseStore
    background: Background
    version: str
    """Version of inferd."""
    unknown_fields: Literal["refuse", "warn"]
    keep_alive_s: float
    targets: Targets = NO_TARGETS
    """Targets of requests that set none."""
    e2e_target_s: float | None = None
    config: Config = field(default_factory=dict)
    """The answer of /config, without secrets."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (*self.model.names, *self.router.adapters.named)


class Services:
    """The services of all models. A request that names no model is for the first."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._all = tuple(services)
        self.first = self._all[0]

    def __iter__(self) -> Iterator[Service]:
        return iter(self._all)

    @property
    def are_several(self) -> bool:
        return len(self._all) > 1

    def of(self, name: str | None) -> Service:
        """The service of the model, or of the adapter's model, with that name. Raises `RequestError` if there is none.

        If there is one model alone, its intake checks the name.
        """
        if name is None or len(self._all) == 1:
            return self.first
        found = next((service for service in self._all if name in service.names), None)
        if found is None:
            raise errors.model_not_found(name, *(service.model.names[0] for service in self._all))
        return found
