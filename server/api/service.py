"""What the handlers stand on, made once by `create_app` and handed to each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from inferd.engine.api.cost.roofline import StepPhase
from inferd.server.api.responses.background import Background
from inferd.server.api.responses.store import ResponseStore
from inferd.server.generate.intake import Intake
from inferd.server.generate.ports import Router
from inferd.server.generate.prompts import PromptReader
from inferd.server.observability.efficiency import PhaseSummary
from inferd.server.schema.targets import NO_TARGETS, Targets
from inferd.server.text.lanes import Lanes
from inferd.server.text.model import ServedModel


class Metrics(Protocol):
    """What is counted here, and what is scraped."""

    def request_arrived(self, api: str) -> None:
        """A generation was accepted by the route family `api`."""
        ...

    def http_request(self, route: str, method: str, status: int, duration_s: float) -> None:
        """An answer ended; `route` is a template, never a caller's path."""
        ...

    def keys_read(self, num_keys: int, is_good: bool) -> None:
        """The keys file was read, and so many of its keys are known; not `is_good`: it was refused, and those stay."""
        ...

    def keys_age(self, age_s: float) -> None:
        """The keys in force were last seen to be those of the keys file `age_s` ago."""
        ...

    def num_tasks(self, count: int) -> None:
        """Tasks of the event loop, now."""
        ...

    def loop_lag(self, lag_s: float) -> None:
        """By how much a beat of the event loop came late."""
        ...

    def last_minute(self) -> Mapping[StepPhase, PhaseSummary]:
        """How near the steps came to the device's peaks; a phase that had none is not there."""
        ...

    @property
    def num_restarts(self) -> int:
        """Engines that replaced one that died."""
        ...

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type), in the format that an Accept header asks for."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """The served model and the ways to it."""

    model: ServedModel
    router: Router
    metrics: Metrics
    intake: Intake
    prompts: PromptReader
    lanes: Lanes
    responses: ResponseStore
    background: Background
    version: str
    """Of inferd."""
    unknown_fields: Literal["refuse", "warn"]
    keep_alive_s: float
    targets: Targets = NO_TARGETS
    """Of requests that ask for none."""
    e2e_target_s: float | None = None
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Setting -> {value, source, became}, for /config; without secrets."""

    def fingerprint(self) -> str:
        """`system_fingerprint`: changes where the answer to the same request may. Only once the engine is ready."""
        ready = self.router.ready
        seen = (self.version, self.model.root, ready.device, ready.dtype, ready.vocab_size, ready.kernels)
        return "fp_" + hashlib.sha256(repr(seen).encode()).hexdigest()[:10]
