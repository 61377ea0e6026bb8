"""The objects that all handlers of one model share, and those of all models. `create_app` makes them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from inferd.server.dispatch.router import Router
from inferd.server.endpoints.responses.background import Background
from inferd.server.endpoints.responses.store import ResponseStore
from inferd.server.errors import messages as errors
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


class Services:
    """The services of all models. A request that names no model is for the first that is made for what it asks."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._all = tuple(services)
        self.first = self._all[0]

    def __iter__(self) -> Iterator[Service]:
        return iter(self._all)

    @property
    def are_several(self) -> bool:
        return len(self._all) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models and adapters."""
        return tuple(name for service in self._all for name in service.names)

    @property
    def names_of_models(self) -> tuple[str, ...]:
        return tuple(name for service in self._all for name in service.model.names)

    def of(self, name: str | None) -> Service:
        """The service of the model, or of the adapter's model, with that name. Raises `RequestError` if there is none.

        If there is one model alone, its intake checks the name.
        """
        if name is None or len(self._all) == 1:
            return self.first
        found = next((service for service in self._all if name in service.names), None)
        if found is None:
            raise errors.model_not_found(name, self.names)
        return found

    def made_for(self, name: str | None, *purposes: Callable[[ServedModel], bool]) -> Service:
        """As `of`. Without a name it is the first that serves the first of these purposes, or else the next one."""
        if name is None and self.are_several:
            for serves in purposes:
                for service in self._all:
                    if serves(service.model):
                        return service
        return self.of(name)

    def generating(self, name: str | None) -> Service:
        """As `of`. Without a name it is the first model that is made to generate, or else the first that can."""
        return self.made_for(name, lambda model: model.task == "generate", lambda model: model.generates)

    def named(self, name: str) -> Service:
        """The service of the model, or of the adapter's model, with that name. Raises `RequestError` if there is none,
        also if there is one model alone."""
        service = self.of(name)
        if name not in service.names:
            raise errors.model_not_found(name, self.names)
        return service

    def of_query(self, request: Request) -> Service:
        """The service of the name in `?model=`, and without it the first. Other parameters are ignored. Raises
        `RequestError` for a name that is not served."""
        name = request.query_params.get("model")
        return self.first if name is None else self.named(name)
