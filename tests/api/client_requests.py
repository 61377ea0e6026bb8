"""Requests as widely used clients write them. A row is one client in one situation, with the file that writes it.

Values are ours; the keys and their nesting are the client's. Rows have no `model`; the test adds the served one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLAUDE_CODE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("claude_code_requests.json").read_text(encoding="utf-8")
)
"""Situation -> path, headers and body of a request that Claude Code 2.1.332 sent (2026-11-28). Texts are cut, and most
tools and parameters are left out."""

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

USER: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "18 C"}
DETAILS: list[dict[str, Any]] = [
    {"type": "reasoning.text", "text": "Hm.", "signature": None, "format": "unknown", "index": 0}
]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of one client."""

    client: str
    written_in: str
    """The file of the client's source."""
    path: str
    body: dict[str, Any]


REQUESTS: tuple[Asked, ...] = (
    Asked(
        "codex",
        "codex-rs/codex-api/src/common.rs",
        RESPONSES,
        {
            "instructions": "You are a coding agent.",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "List the files."}],
                    "internal_chat_message_metadata_passthrough": {"turn_id": "t1"},
                },
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
                {
                    "type": "function_call",
                    "name": "shell",
                    "arguments": '{"command":["ls"]}',
                    "call_id": "call_1",
                    "internal_chat_message_metadata_passthrough": {"turn_id": "t1"},
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
                {
                    "type": "message",
                    "role": "assistant",
                    "phase": "commentary",
                    "content": [{"type": "output_text", "text": "One file."}],
                },
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
            ],
            "tools": [
                {"type": "web_search", "external_web_access": False},
                {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": PARAMETERS},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": "0199",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "0199"},
        },
    ),
    Asked(
        "openai-sdk",
        "openai/types/responses/response_create_params.py",
        RESPONSES,
        {
            "input": "Hello!",
            "moderation": {"mode": "auto"},
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "auto"},
            "background_options": {"expires_after": 60},
            "safety_identifier": "u1",
        },
    ),
    Asked(
        "openai-sdk",
        "openai/lib/_parsing/_completions.py",
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "parsed": None,
                    "tool_calls": [
                        {**CALL, "function": {**CALL["function"], "parsed_arguments": {"city": "Paris"}}}
                    ],
                },
                RESULT,
            ],
            "tools": [TOOL],
            "verbosity": "medium",
            "prompt_cache_key": "k",
            "prompt_cache_retention": "in-memory",
            "prediction": {"type": "content", "content": "x"},
            "store": False,
        },
    ),
    Asked(
        "open-webui",
        "backend/open_webui/utils/payload.py",
        CHAT,
        {
            "stream": True,
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.0,
            "max_tokens": -1,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "reasoning_effort": "medium",
            "seed": 0,
            "stop": ["<end>"],
            "logit_bias": {},
            "stream_options": {"include_usage": True},
        },
    ),
    Asked(
        "open-webui",
        "backend/open_webui/utils/middleware.py",
        CHAT,
        {
            "stream": True,
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
                {**RESULT, "content": [{"type": "text", "text": "18 C"}]},
            ],
            "tools": [TOOL],
        },
    ),
    Asked(
        "librechat",
        "packages/api/src/endpoints/openai/llm.ts",
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "65a",
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "include_reasoning": True,
            "reasoning": {"effort": "high", "summary": "auto"},
            "verbosity": "low",
        },
    ),
    Asked(
        "cline",
        "src/core/api/transform/openai-format.ts",
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "You are Cline."},
                {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "reasoning_details": DETAILS},
                RESULT,
            ],
            "temperature": 0,
            "reasoning_effort": "medium",
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": False}}],
        },
    ),
    Asked(
        "continue",
        "core/llm/openaiTypeConverters.ts",
        CHAT,
        {
            "messages": [USER, {"role": "assistant", "content": " ", "tool_calls": [CALL]}, RESULT],
            "max_tokens": 64,
            "temperature": 0.5,
            "stream": True,
            "stop": [],
            "prediction": {"type": "content", "content": "x = 1"},
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": None}}],
        },
    ),
    Asked(
        "continue",
        "core/llm/openaiTypeConverters.ts",
        TEXT,
        {"prompt": "x = ", "max_tokens": 16, "temperature": 0.01, "stream": True, "stop": ["\n"], "suffix": ""},
    ),
    Asked(
        "sillytavern",
        "src/endpoints/backends/chat-completions.js",
        CHAT,
        {
            "messages": [{"role": "system", "content": "Story."}, USER],
            "temperature": 1,
            "max_tokens": 30,
            "stream": True,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "top_k": 0,
            "stop": ["User:"],
            "logit_bias": {},
            "seed": -1,
            "n": None,
            "logprobs": None,
        },
    ),
    Asked(
        "sillytavern",
        "src/constants.js: VLLM_KEYS",
        TEXT,
        {
            "prompt": "Once upon a time",
            "max_tokens": 30,
            "best_of": 1,
            "echo": False,
            "n": 1,
            "seed": -1,
            "stop": ["\nUser:"],
            "stream": True,
            "suffix": None,
            "temperature": 0.7,
            "top_p": 0.5,
            "use_beam_search": False,
            "top_k": 40,
            "min_p": 0,
            "repetition_penalty": 1.2,
            "length_penalty": 1,
            "early_stopping": False,
            "ignore_eos": False,
            "min_tokens": 0,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "include_stop_str_in_output": False,
            "guided_json": None,
        },
    ),
    Asked(
        "sillytavern",
        "src/constants.js: OPENROUTER_KEYS",
        CHAT,
        {
            "messages": [USER],
            "max_tokens": 30,
            "top_a": 0,
            "min_p": 0,
            "repetition_penalty": 1,
            "provider": {"allow_fallbacks": True, "order": []},
            "include_reasoning": False,
            "transforms": ["middle-out"],
            "plugins": [],
            "route": "fallback",
            "reasoning": {"effort": "low"},
            "safety_settings": [],
        },
    ),
    Asked(
        "llama.cpp",
        "tools/server/README.md",
        TEXT,
        {"prompt": "Hi", "max_tokens": 4, "cache_prompt": True, "id_slot": -1, "timings_per_token": True},
    ),
    Asked(
        "openrouter-ai-sdk",
        "src/chat/index.ts",
        CHAT,
        {
            "models": ["a", "b"],
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                },
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALL],
                    "reasoning": "Hm.",
                    "reasoning_details": DETAILS,
                    "annotations": [],
                    "cache_control": {"type": "ephemeral"},
                },
                {**RESULT, "cache_control": {"type": "ephemeral"}},
            ],
            "include_reasoning": True,
            "reasoning": {"enabled": True, "effort": "low", "exclude": False},
            "usage": {"include": True},
            "provider": {"order": ["x"]},
            "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "cache_control": {"type": "ephemeral"},
        },
    ),
    Asked(
        "litellm",
        "litellm/types/utils.py: Message",
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {**CALL, "index": 0, "provider_specific_fields": {"thought_signature": "x"}},
                    ],
                    "function_call": None,
                    "reasoning_content": "Hm.",
                    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
                    "provider_specific_fields": {"refusal": None},
                },
                {**RESULT, "name": "get_weather"},
            ],
            "tools": [TOOL],
            "function_call": "none",
            "n": 1,
        },
    ),
    Asked(
        "codecompanion",
        "lua/codecompanion/http.lua",
        CHAT,
        {"messages": [{**USER, "id": 1947269257}], "stream": True},
    ),
)  # fmt: skip
