"""One route, as data: a row of the table in `routes`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Literal

from inferd.server.schema.request_model import RequestModel


class Area(StrEnum):
    """The parts of the documentation."""

    GENERATING = "Generating"
    TOKENS = "Tokens"
    MODELS = "Models"
    OPERATION = "Operation"
    ADMINISTRATION = "Administration"


class Access(Enum):
    """The callers that a route allows."""

    PUBLIC = "public"
    """Any caller, because probes and scrapers have no key."""
    KEY = "key"
    """Callers with a key, if the server has keys."""
    ADMIN = "admin"
    """Callers with an admin key. Without admin keys nobody may call: an address proves nothing behind a proxy."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One row of the table of routes, equal to itself alone."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    access: Access
    area: Area
    about: str
    answer: Any
    """Type of its answer's body, as pydantic reads types; None if it is not served."""
    fields: type[RequestModel] | None = None
    """Type of the request's body; None if it reads none."""
    query: type[RequestModel] | None = None
    """Type of its query; None if it reads none."""
    events: Any = None
    """Type of the data of its events; None if it never answers by a stream."""
    operation: str = ""
    """Name of what it does in traces; empty if it has no trace of its own."""
    missing: str = ""
    """Reason for which it answers 501; empty if it is served."""

    def __post_init__(self) -> None:
        assert (self.answer is None) == bool(self.missing), f"{self.path}: a route that is served has an answer"

    @property
    def is_metered(self) -> bool:
        """Whether a request counts toward its key's quota. Routes do that generate from prompts."""
        return self.method == "POST" and self.area is Area.GENERATING and self.fields is not None
