"""Bodies that are taken and say much: messages, tools, formats and options, each nested as deep as it goes."""

from __future__ import annotations

from typing import Any

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}', "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
    USER,
]
FLAT_TOOL: dict[str, Any] = {"type": "function", **FUNCTION}
USES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]}],
    },
]
THEIR_TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": SCHEMA}
REPETITION = {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2}
FORMS: tuple[dict[str, Any], ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "description": "d", "schema": SCHEMA, "strict": True}},
    {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]},
)
WAYS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA}, {"json_object": True}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'},
)  # fmt: skip
SAMPLING: dict[str, Any] = {
    "temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
    "repetition_penalty": 1.1, "seed": 7, "logit_bias": {"7": 1.5, "8": -100}, "bad_words": ["a", "b"],
    "stop": ["x", "y"], "stop_token_ids": [1, 2], "repetition_detection": REPETITION, "priority": -1, "cache_salt": "s",
    "prompt_cache_options": {"a": 1}, "user": "u",
}  # fmt: skip

NESTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": TURNS, "tools": [TOOL, {**TOOL, "function": {"name": "g"}}], "max_tokens": 2}),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }}),
    (CHAT, {"messages": [USER], "max_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 2, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}}),
    (CHAT, {"messages": [USER], "max_completion_tokens": 2, **SAMPLING}),
    (CHAT, {"messages": [USER], "max_tokens": 2, "reasoning": {"effort": "low", "enabled": True, "exclude": False},
            "chat_template_kwargs": {"enable_thinking": True}, "prediction": {"type": "content", "content": "x"}}),
    *((CHAT, {"messages": [USER], "max_tokens": 2, "response_format": form}) for form in FORMS),
    *((CHAT, {"messages": [USER], "max_tokens": 2, "structured_outputs": way}) for way in WAYS),
    (CHAT + "/render", {"messages": TURNS, "tools": [TOOL]}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    (TEXT, {"prompt": [[1, 2], [3]], "max_tokens": 2, "allowed_token_ids": [5, 6], "return_token_ids": True}),
    (TEXT, {"prompt": [1, 2, 3], "max_tokens": 2, **SAMPLING}),
    (TEXT, {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (TEXT + "/render", {"prompt": ["a", "b"], "truncate_prompt_tokens": 4}),
    (RESPONSES, {"input": ITEMS, "max_output_tokens": 2, "instructions": "i", "metadata": {"k": "v", "l": "w"}}),
    (RESPONSES, {"input": "a", "tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "f"}}),
    (RESPONSES, {"input": "a", "tools": [FLAT_TOOL], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}],
    }}),
    (RESPONSES, {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 2,
                 "reasoning": {"effort": "low", "summary": "auto"}, "stream": True, "truncation": "disabled"}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2, "text": {
        "verbosity": "medium", "format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True},
    }}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2, "previous_response_id": "resp_RECORDED", "store": False}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "item_RECORDED"}], "max_output_tokens": 2}),
    (RESPONSES, {"input": "a", "background": True, "max_output_tokens": 2, **SAMPLING}),
    (MESSAGES, {"messages": USES, "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "tools": [THEIR_TOOL],
                "metadata": {"user_id": "u"}, "stop_sequences": ["x"], "thinking": {"type": "disabled"}}),
    (MESSAGES, {"messages": [USER], "max_tokens": 2, "tools": [THEIR_TOOL],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}}),
    (MESSAGES, {"messages": [USER], "max_tokens": 2, "stream": True, "temperature": 1, "top_p": 0.5, "top_k": 4,
                "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}}),
    (MESSAGES + "/count_tokens", {"messages": USES, "system": "s", "tools": [THEIR_TOOL]}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2, "encoding_format": "float", "user": "u"}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "pooling": "mean", "normalize": False}),
    ("/v1/rerank", {"query": "a", "documents": ["a b", {"text": "c", "id": 1}], "top_n": 1, "max_tokens_per_doc": 9}),
    ("/v2/rerank", {"query": {"text": "a"}, "documents": ["a b", "c"], "max_chunks_per_doc": 3, "priority": 1}),
    ("/rerank", {"query": "a", "texts": ["a b", "c"], "raw_scores": True, "return_text": True, "truncate": True}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": -1, "use_activation": False}),
    ("/score", {"queries": ["a", "b"], "documents": ["b", "c"]}),
    ("/v1/classify", {"input": [[1, 2], [3]], "use_activation": True}),
    ("/classify", {"input": ["a", "b"], "add_special_tokens": False}),
    ("/predict", {"inputs": [["a"], ["a", "b"]], "raw_scores": True, "truncation_direction": "Right"}),
    ("/v1/embeddings", {"input": "a b c", "output_dtype": "int8", "truncate_prompt_tokens": 2}),
    ("/pooling", {"input": ["a", "b"], "task": "embed", "use_activation": False}),
    ("/v2/embed", {"texts": ["a", "b"], "embedding_types": ["float", "int8"], "truncate": "START", "max_tokens": 2}),
    ("/v1/embed", {"texts": ["a"], "input_type": "search_document"}),
    ("/embed", {"inputs": ["a", "b"], "normalize": False, "truncate": True, "truncation_direction": "Left"}),
    ("/embed_all", {"inputs": "a"}),
    ("/api/embed", {"model": "tiny", "input": ["a", "b"], "truncate": True, "dimensions": 2, "keep_alive": "5m"}),
    ("/api/embeddings", {"prompt": "a", "options": {}}),
    ("/embedding", {"content": "a", "embd_normalize": -1}),
    ("/tokenize", {"messages": TURNS, "tools": [TOOL], "return_token_strs": True}),
    ("/tokenize", {"prompt": "a b", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]  # fmt: skip
