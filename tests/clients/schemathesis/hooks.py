"""Hooks of schemathesis for event streams.

The document's schema of a stream describes the data of one event, as OpenAI's own document does. schemathesis takes it
for the fields of the event (`event`, `data`), so it is rewritten in the form that schemathesis and OpenAPI 3.2 read.

A field may be given by its name or by another server's name for it, not by both. schemathesis can write requests for at
most `MAX_NAMED_TWICE` such pairs a schema. Of a schema with more, the further names are left out.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

STREAM = "text/event-stream"
MAX_NAMED_TWICE = 4


@schemathesis.hook
def before_load_schema(context: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    del context
    for methods in raw_schema["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                media = answer.get("content", {}).get(STREAM)
                if media is not None:
                    media["itemSchema"] = _event(media.pop("schema"))
    for schema in raw_schema["components"]["schemas"].values():
        pairs = schema.get("allOf", [])
        for pair in pairs[MAX_NAMED_TWICE:]:
            other_name = next(iter(pair["anyOf"][0]["properties"]))
            del schema["properties"][other_name]
        del pairs[MAX_NAMED_TWICE:]


def _event(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of an event whose data is `[DONE]` or matches `schema`."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}


if os.environ.get("INFERD_ONLY_STREAMS"):

    @schemathesis.hook
    def map_body(context: schemathesis.HookContext, body: Any) -> Any:
        del context
        return {**body, "stream": True} if isinstance(body, dict) else body
