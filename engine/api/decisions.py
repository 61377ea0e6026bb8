"""The settings of an engine while they are settled, and the decisions that were taken, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.arch.modelled import Modelled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting that `resolve` chose or changed."""

    field: str
    asked: object
    became: object
    why: str
    unused_flag: str = ""
    """Flag of a setting without effect, if the operator gave it; otherwise empty."""


class Settling:
    """The settings that are settled, and what was decided for them, in order."""

    def __init__(self, asked: AskedConfig, modelled: Modelled | None = None) -> None:
        self.asked = asked
        self.decisions: list[Decision] = []
        same = set(AskedConfig.__struct_fields__) & set(EngineConfig.__struct_fields__)
        self._values: dict[str, Any] = {field: getattr(asked, field) for field in sorted(same)}
        self._values["modelled"] = modelled

    def settle(self, field: str, value: T, why: str, unused_flag: str = "") -> T:
        """Give a field its value. It is a decision unless the operator asked for just this value. `unused_flag`: the
        flag of a setting that has no effect with this model."""
        asked = getattr(self.asked, field, None)
        if value != asked:
            self.decisions.append(Decision(field, asked, value, why, unused_flag))
        self._values[field] = value
        return value

    def unless_asked(self, field: str, value: int, why: str) -> None:
        """Give a field a value if the operator asked for none."""
        if getattr(self.asked, field) is None:
            self.settle(field, value, why)

    def value(self, field: str) -> Any:
        """The value that a field has now."""
        return self._values[field]

    def config(self, **others: object) -> EngineConfig:
        """The settings, `others` instead of theirs."""
        return EngineConfig(**self._values | others)
