"""A server of the Model Context Protocol on standard input and output, with one tool: it counts the words of a text."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "count_words",
    "description": "Count the words of a text.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def result_of(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """None for a method that this server does not have."""
    match method:
        case "initialize":
            server = {"name": "words", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"{len(params['arguments']['text'].split())} words"}]}
        case "ping":
            return {}
    return None


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = result_of(message["method"], message.get("params", {}))
        answer = {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
