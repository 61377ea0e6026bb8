"""The queries of /sleep, /wake_up and /is_sleeping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from inferd.server.schema.request_model import RequestModel, option
from inferd.server.schema.values import Many, Text, Whole

Tags = Annotated[tuple[Literal["weights", "kv_cache", "scheduling"], ...], Many(max_length=16)]


class SleepingQuery(RequestModel):
    """Query of a route that is about the sleep of one model or of all."""

    model: Text | None = option("A name of the model.", unset="all models")


class SleepQuery(SleepingQuery):
    """Query of /sleep."""

    level: Whole | None = option(
        "0 stops no engine. 1 ends the engines. On CPUs the memory of their KV pools stays, so that the next ones find "
        "prefixes there. 2 gives that up too.",
        unset="1",
        ge=0,
        le=2,
    )
    mode: Literal["abort", "wait", "keep"] | None = option(
        "`abort` ends unfinished answers with an error, and `wait` finishes them first. `keep` has them go on when the "
        "model wakes, and needs level 1 or 2.",
        unset="`abort`",
    )
    refused: ClassVar[Mapping[str, str]] = {"tags": "Use `level`: weights and KV cache belong to one process."}


class WakeQuery(SleepingQuery):
    """Query of /wake_up."""

    tags: Tags | None = option(
        "Both of `weights` and `kv_cache`, if the engines were stopped: they come back together.", unset="all"
    )
