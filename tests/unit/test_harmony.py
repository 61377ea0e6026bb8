"""gpt-oss's format from end to end without a model: a checkpoint's files, the prompt, ids of an answer in any pieces,
and what a client gets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from inferd.engine.api.errors import RequestError
from inferd.server.generate.answer_rules import answer_rules, template_kwargs, tools_shown
from inferd.server.generate.choice import Choice
from inferd.server.generate.events import ChoiceResult, ResultBuilder
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.request_model import read
from inferd.server.text.model import ServedModel
from inferd.server.text.template import Conversation
from tests.unit.test_results import MODEL_PATH, deltas, request
from tests.unit.tool_samples import PARIS, TOOLS, WEATHER, dumped

RETURN, CALL = "<|return|>", "<|call|>"
SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", RETURN, CALL)
TEMPLATE = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') }}
{{- '\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|># Tools\n' }}
{%- for tool in tools %}{{ '// ' + tool.function.description + '\ntype ' + tool.function.name }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
"""The rules of the published template that matter here: one call a message, one text before it, reasoning as
`thinking`, arguments and results as JSON."""
USER = {"role": "user", "content": "Weather?"}
THINKING = "<|channel|>analysis<|message|>They want Paris.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALLING = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{dumped(PARIS[1])}{CALL}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The embedded model's tokenizer with gpt-oss's special tokens, and a config that names no end of a turn."""
    path = tmp_path_factory.mktemp("gpt-oss")
    backend = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return ServedModel.load(path, ("m",), max_model_len=4096, vocab_size=backend.get_vocab_size())


def prompt_of(model: ServedModel, **fields: Any) -> tuple[ChatRequest, str]:
    wire = read(ChatRequest, {"messages": [USER], **fields})
    assert model.template is not None
    given = Conversation(wire.messages, tools_shown(wire), kwargs=template_kwargs(wire, model.template.source))
    return wire, model.template.render(given)


def answer_of(model: ServedModel, text: str, cuts: list[int], **fields: Any) -> ChoiceResult:
    wire, prompt = prompt_of(model, **fields)
    config = answer_rules(wire, model, prompt, None).parser_config
    params = structs.replace(request().params, stop_token_ids=(), eos_token_ids=model.eos_token_ids)
    asked = replace(request(), parser_config=config, params=params)
    ids = model.tokenizer.encode(text, False)
    choice, results = Choice(0, asked, model.tokenizer.bytes), ResultBuilder(asked)
    for delta in deltas(ids, cuts, "stop" if ids[-1] in model.eos_token_ids else "length"):
        for event in choice.feed(delta):
            results.add(event)
    return results.results()[0]


ANSWERS = {
    "an answer": (f"{THINKING}{FINAL}Which day?{RETURN}", "Which day?", "They want Paris.", (), "stop"),
    "a call": (f"{THINKING}<|start|>assistant{CALLING}", "", "They want Paris.", (PARIS,), "tool_calls"),
    "a call behind a preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALLING}",
        "I look.", "", (PARIS,), "tool_calls",
    ),
    "the recipient first": (
        f" to=functions.get_weather<|channel|>commentary code<|message|>{dumped(PARIS[1])}{CALL}",
        "", "", (PARIS,), "tool_calls",
    ),
    "reasoning twice": (
        f"{THINKING}<|start|>assistant<|channel|>analysis<|message|>And now.<|end|>{FINAL}Hm.{RETURN}",
        "Hm.", "They want Paris.\nAnd now.", (), "stop",
    ),
    "cut in its reasoning": ("<|channel|>analysis<|message|>They want", "", "They want", (), "length"),
}  # fmt: skip
"""(text, content, reasoning, calls, finish reason)."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_split_the_same_at_every_token(model: ServedModel, name: str) -> None:
    text, content, thought, calls, reason = ANSWERS[name]
    num_ids = len(model.tokenizer.encode(text, False))
    for cuts in ([], list(range(num_ids)), *([cut] for cut in range(1, num_ids))):
        found = answer_of(model, text, cuts, tools=[*TOOLS])
        assert (found.text, found.reasoning or "", found.reason) == (content, thought, reason), cuts
        assert tuple((call.name, json.loads(call.arguments)) for call in found.calls) == calls, cuts


def test_a_message_to_a_tool_that_is_not_offered_is_not_for_the_caller(model: ServedModel) -> None:
    python = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    for text in (f"<|start|>assistant{CALLING}", f"{THINKING}<|start|>assistant{python}"):
        found = answer_of(model, text, [])
        assert (found.calls, found.text) == ((), "")
    found = answer_of(model, f"{python}{FINAL}Two.", [], tools=[*TOOLS])
    assert (found.calls, found.text) == ((), "Two.")


def test_the_ends_of_a_turn_need_no_config(model: ServedModel) -> None:
    ids = model.tokenizer.special_ids
    assert {ids[RETURN], ids[CALL]} <= set(model.eos_token_ids)


@pytest.mark.parametrize("effort", ["low", "high"])
def test_the_effort_is_in_the_prompt(model: ServedModel, effort: str) -> None:
    assert f"Reasoning: {effort}\n" in prompt_of(model, reasoning_effort=effort)[1]
    assert "Reasoning: medium\n" in prompt_of(model)[1]


def calling(name: str, **more: object) -> dict[str, object]:
    called = {"type": "function", "id": name, "function": {"name": name, "arguments": '{"city": "Paris"}'}}
    return {"role": "assistant", "tool_calls": [called], **more}


def test_a_turn_with_calls_goes_back_into_the_prompt(model: ServedModel) -> None:
    """Reasoning is the text before a call. Beside a preamble the template takes one text, so they are joined."""
    result = {"role": "tool", "tool_call_id": "get_weather", "content": "12 degrees"}
    back = '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"12 degrees"<|end|>'
    call = '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    said = "<|start|>assistant<|channel|>analysis<|message|>"
    for more, before in (
        ({}, ""),
        ({"reasoning_content": "Paris, then."}, f"{said}Paris, then.<|end|>"),
        ({"reasoning": "Paris, then.", "content": "I look."}, f"{said}Paris, then.\nI look.<|end|>"),
    ):
        messages = [USER, calling("get_weather", **more), result]
        prompt = prompt_of(model, messages=messages, tools=[*TOOLS])[1]
        assert prompt.endswith(f"Weather?<|end|>{before}{call}{back}<|start|>assistant")


def test_two_calls_become_two_messages(model: ServedModel) -> None:
    both: dict[str, Any] = calling("get_weather")
    both["tool_calls"] = [*both["tool_calls"], *calling("time.now")["tool_calls"]]  # type: ignore[misc]
    results = [{"role": "tool", "tool_call_id": name, "content": name[:3]} for name in ("get_weather", "time.now")]
    prompt = prompt_of(model, messages=[USER, both, *results], tools=[*TOOLS])[1]
    order = ["to=functions.get_weather", '"get"', "to=functions.time.now", '"tim"']
    assert sorted(order, key=prompt.index) == order


def test_a_tool_may_have_no_description(model: ServedModel) -> None:
    bare = {"type": "function", "function": {"name": "get_weather"}}
    assert "// \ntype get_weather" in prompt_of(model, tools=[bare])[1]
    with pytest.raises(RequestError, match="a result without a call"):
        prompt_of(model, messages=[{"role": "tool", "tool_call_id": "x", "content": "y"}], tools=[WEATHER])
