"""Chat templates in the styles that published ones have, for formats that are derived. None is a published one.

Each has a name for its style. `STRANGE` are two that resemble no family.
"""

from __future__ import annotations

_LOOP = "{% for m in messages %}"
_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
_USER = "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% else %}"
_PROMPT = "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"


def turns(calls: str, *, thought: str = "", content: str = "{{ m.content or '' }}", prompt: str = _PROMPT) -> str:
    """A template with `calls` as the text of an assistant's calls, behind its reasoning and its content."""
    return f"{_TOOLS}{_LOOP}{_USER}<|im_start|>assistant\n{thought}{content}{calls}<|im_end|>\n{prompt}"


_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_EACH = "{% for k, v in f.arguments.items() %}"
_PLAIN = "{{ v if v is string else v | tojson }}"

_QUOTED = (
    "{% macro quoted(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v.items() %}{{ k }}:{{ quoted(x) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for x in v %}{{ quoted(x) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
"""Writes a value as JSON with bare keys, and with strings in quotes of its own."""

TEMPLATES: dict[str, str] = {
    "JSON in tags": turns(_CALLS + f"\n<call>\n{_JSON}\n</call>{{% endfor %}}", thought=_THOUGHT),
    "JSON in one tag": turns(
        "{% if m.tool_calls %}<|calls|>[" + _CALLS + _JSON + "{% if not loop.last %}, {% endif %}{% endfor %}]"
        "<|/calls|>{% endif %}"
    ),
    "JSON lines in one tag": turns(
        "{% if m.tool_calls %}\n<calls>\n" + _CALLS + _JSON + "\n{% endfor %}</calls>{% endif %}"
    ),
    "JSON of another form": turns(
        "{% if m.tool_calls %}<|act|>[" + _CALLS + '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": '
        '"{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% if not loop.last %},{% endif %}{% endfor %}\n]'
        "<|/act|>{% endif %}"
    ),
    "JSON by name": turns(
        "{% if m.tool_calls %}<|tools|>[" + _CALLS + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tools|>{% endif %}"
    ),
    "JSON alone": turns(
        "{% if m.tool_calls %}[" + _CALLS + _JSON + "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    ),
    "calls as requests have them": turns("{% if m.tool_calls %}<|calls|>{{ m.tool_calls | tojson }}{% endif %}"),
    "a name before JSON": turns(_CALLS + "[CALL]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"),
    "an id and a name before JSON": turns(
        "{% if m.tool_calls %}<|section|>" + _CALLS + "<|call|>{{ c.id }}<|name|>{{ f.name }}<|args|>"
        "{{ f.arguments | tojson }}<|/call|>{% endfor %}<|/section|>{% endif %}"
    ),
    "a number behind the name": turns(
        "{% if m.tool_calls %}<|section|>" + _CALLS + "<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>"
        "{{ f.arguments | tojson }}<|/call|>{% endfor %}<|/section|>{% endif %}"
    ),
    "tags of arguments": turns(
        _CALLS + "\n<call>\n<function={{ f.name }}>\n" + _EACH + "<parameter={{ k }}>\n" + _PLAIN + "\n</parameter>\n"
        "{% endfor %}</function>\n</call>{% endfor %}",
        thought=_THOUGHT,
    ),
    "tags of arguments without line breaks": turns(
        "{% if m.tool_calls %}\n<calls>\n"
        + _CALLS
        + '<invoke name="{{ f.name }}">'
        + _EACH
        + '<parameter name="{{ k }}">'
        + _PLAIN
        + "</parameter>{% endfor %}</invoke>\n{% endfor %}</calls>{% endif %}"
    ),
    "tags with types": turns(
        "{% if m.tool_calls %}<calls>\n"
        + _CALLS
        + '<invoke name="{{ f.name }}">\n'
        + _EACH
        + "<parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        + _PLAIN
        + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>{% endif %}"
    ),
    "tags named as arguments": turns(
        _CALLS + '<call name="{{ f.name }}">' + _EACH + "<{{ k }}>" + _PLAIN + "</{{ k }}>{% endfor %}</call>"
        "{% endfor %}"
    ),
    "pairs of key and value": turns(
        _CALLS + "\n<call>{{ f.name }}\n" + _EACH + "<key>{{ k }}</key>\n<value>" + _PLAIN + "</value>\n{% endfor %}"
        "</call>{% endfor %}"
    ),
    "strings in marked sections": turns(
        _CALLS
        + '\n<function name="{{ f.name }}">'
        + _EACH
        + "<param name=\"{{ k }}\">{% if v is string and '<' in v %}"
        "<![CDATA[{{ v }}]]>{% else %}" + _PLAIN + "{% endif %}</param>{% endfor %}</function>{% endfor %}"
    ),
    "JSON with other quotes": _QUOTED
    + turns(
        _CALLS
        + "<|call>call:{{ f.name }}{{ '{' }}"
        + _EACH
        + "{{ k }}:{{ quoted(v) }}{% if not loop.last %},{% endif %}{% endfor %}"
        "{{ '}' }}<call|>{% endfor %}"
    ),
    "calls in Python": turns(
        "{% if m.tool_calls %}<|calls|>[" + _CALLS + "{{ f.name }}(" + _EACH + "{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|/calls|>"
        "{% endif %}"
    ),
    "reasoning that the prompt opens": turns(
        _CALLS + f"\n<call>\n{_JSON}\n</call>{{% endfor %}}",
        thought="<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n",
        prompt=_PROMPT.replace(
            "assistant\n{% endif",
            "assistant\n<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif",
        ),
    ),
    "reasoning that no earlier turn shows": turns(
        _CALLS + f"\n<call>\n{_JSON}\n</call>{{% endfor %}}",
        prompt=_PROMPT.replace(
            "assistant\n{% endif",
            "assistant\n{% if enable_thinking %}[THINK]{% else %}[THINK][/THINK]{% endif %}{% endif",
        ),
    ),
    "content with markers": turns(
        "{% if m.tool_calls %}<|START_ACTION|>[" + _CALLS + _JSON + "{% if not loop.last %}, {% endif %}{% endfor %}]"
        "<|END_ACTION|>{% endif %}",
        thought="{% if m.reasoning_content %}<|START_THOUGHT|>{{ m.reasoning_content }}<|END_THOUGHT|>{% endif %}",
        content="{% if m.content %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% endif %}",
    ),
}

STRANGE: dict[str, str] = {
    "letters": (
        "{% if tools %}~~ helpers ~~\n{{ tools | tojson }}\n{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}"
        "~~ me ~~\n{% if m.reasoning_content %}<<mull>>{{ m.reasoning_content }}\n<<said>>{% endif %}"
        "{{ m.content or '' }}"
        + _CALLS
        + "\n<<ask {{ f.name }} no {{ loop.index }}>>"
        + _EACH
        + "<<with {{ k }}>>"
        + _PLAIN
        + "<<.>>{% endfor %}"
        "<<go>>{% endfor %}\n~~ over ~~\n{% else %}~~ {{ m.role }} ~~\n{{ m.content }}\n~~ over ~~\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}~~ me ~~\n{% endif %}"
    ),
    "ledger": (
        "{% if tools %}#tools {{ tools | tojson }}\n{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}"
        "#{assistant}{% if m.reasoning_content %}<|mull|>{{ m.reasoning_content }}<|/mull|>{% endif %}"
        "{{ m.content or '' }}{% if m.tool_calls %}<|ledger|>"
        + _CALLS
        + "<|row|>{{ f.name }}|{{ f.arguments | tojson }}<|/row|>{% endfor %}"
        "<|/ledger|>{% endif %}<|eot|>\n{% else %}#{ {{ m.role }} }{{ m.content }}<|eot|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}#{assistant}{% endif %}"
    ),
}
