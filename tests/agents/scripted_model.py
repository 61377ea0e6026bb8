"""A checkpoint whose model follows plans: the embedded model's tokenizer with a chat template in the way of Qwen's.

A plan stands in a user's message: `<plan>[step, ...]</plan>`, in JSON. The model does one step in each of its turns
after that message. A step is a text or a list of calls. As `{"seen": WORDS, "text": TEXT}` or `{"seen": WORDS, "calls":
CALLS}` it has a condition: the turns since the model's last one hold WORDS. If not, the model says what it lacks. So a
program's last answer shows that the results of its tools have reached the model. The model says so too if the prompt
does not offer a tool that the step calls.

A program that tells all that was done so far in one message needs `{"mark": WORDS, "steps": [...]}`. Then it is
the number of WORDS behind the plan that says how many steps were done.

The model reads no more than a real one: the tokens of the prompt.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

TINY = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
CONTEXT = 200_000
"""Tokens. A token of this tokenizer is two to three letters, and Claude Code begins with 120,000 letters."""
NO_PLAN = "Nothing was planned for this."
DONE = "The plan has ended."
PREFACE = "I go on.\n"
"""Comes before calls."""
THOUGHT = "<think>\nI do what the plan says.\n</think>\n\n"

TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part if part is string else part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] -%}
{%- set has_system = first.role in ('system', 'developer') -%}
{%- if tools or has_system -%}
{{- '<|im_start|>system\\n' -}}
{%- if has_system -%}{{- text(first.content) -}}{%- endif -%}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nWrite a call as\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + ('system' if message.role == 'developer' else message.role) + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def write_checkpoint(folder: Path) -> None:
    """Write the checkpoint. Its weights are the embedded model's, which no program reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(TINY / name, folder)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    words = json.loads((TINY / "tokenizer_config.json").read_text())
    del words["response_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": TEMPLATE}))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a prompt."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One way to answer a prompt."""

    text: str
    ids: tuple[int, ...]

    def at(self, place: int) -> int:
        """The token at a place. The last one ends the answer."""
        return self.ids[min(place, len(self.ids) - 1)]


class ScriptedModel:
    """Prompt -> answers."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._start, self._end = (self._tokenizer.encode(text).ids[0] for text in ("<|im_start|>", "<|im_end|>"))

    def answers(self, prompt_ids: tuple[int, ...]) -> list[Answer]:
        """The preferred answer, which reasons and then says what it does. Those after it serve if a grammar allows
        calls alone."""
        *turns, last = self._turns(prompt_ids)
        text = answer_to(turns)
        said = [text, text.removeprefix(PREFACE)]
        if "<think>" not in last.text:
            said = [THOUGHT + each for each in said] + said
        return [Answer(each, (*self._tokenizer.encode(each, add_special_tokens=False).ids, self._end)) for each in said]

    def _turns(self, prompt_ids: tuple[int, ...]) -> list[Turn]:
        pieces: list[list[int]] = []
        for token_id in prompt_ids:
            if token_id == self._start:
                pieces.append([])
            elif pieces:
                pieces[-1].append(token_id)
        texts = (self._tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)
        return [Turn(role, text) for role, _, text in (text.partition("\n") for text in texts)] or [Turn("", "")]


_PLAN = re.compile(r"<plan>(.*?)</plan>", re.DOTALL)
_TOOL = re.compile(r"^\{.*\}$", re.MULTILINE)


def answer_to(turns: list[Turn]) -> str:
    """The text that follows these turns."""
    at = next((i for i in reversed(range(len(turns))) if turns[i].role == "user" and _PLAN.search(turns[i].text)), None)
    if at is None:
        return NO_PLAN
    text = _PLAN.findall(turns[at].text)[-1]
    try:
        plan = json.loads(text)
    except ValueError:
        return f"The plan is no JSON: {text[:2000]}"
    if isinstance(plan, dict):
        step = turns[at].text.rpartition("</plan>")[2].count(plan["mark"])
        return said(plan["steps"][step], turns)
    later = [turn.role for turn in turns[at + 1 :]]
    # Turns of the model that follow each other are one answer.
    step = sum(role == "assistant" and later[i - 1 : i] != ["assistant"] for i, role in enumerate(later))
    return said(plan[step], turns) if step < len(plan) else DONE


def said(step: Any, turns: list[Turn]) -> str:
    """One step of a plan in the words of the model."""
    if isinstance(step, dict):
        told = "\n".join(turn.text for turn in takewhile(lambda turn: turn.role != "assistant", reversed(turns)))
        if step["seen"] not in told:
            return f"I do not see {step['seen']!r}, but: {told[:3000]}"
        step = step.get("text") or step["calls"]
    if isinstance(step, str):
        return step
    offered = tools_of(turns)
    missing = [call["name"] for call in step if call["name"] not in offered]
    if missing:
        return f"Not offered: {', '.join(missing)}. There are: {', '.join(offered)}"
    return PREFACE + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in step)


def tools_of(turns: list[Turn]) -> list[str]:
    """Names of the tools that the prompt offers."""
    system = turns[0].text if turns[0].role == "system" else ""
    listed = system.rpartition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line)["function"]["name"] for line in _TOOL.findall(listed)]
