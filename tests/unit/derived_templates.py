"""Chat templates in the styles that published ones have, for formats that are derived. None is a published one.

Each has a name for its style. `STRANGE` are some that resemble no family. `MISPRINTS` print values in a way that no
model writes, so a grammar asks for another one.
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

_TAGGED = (
    "{% macro tagged(v) %}{% if v is mapping %}{% for k, x in v.items() %}~|<{{ k }}>{{ tagged(x) }}~|</{{ k }}>"
    "{% endfor %}{% elif v is iterable and v is not string %}{% for x in v %}~|<each>{{ tagged(x) }}~|</each>"
    "{% endfor %}"
    "{% else %}" + _PLAIN + "{% endif %}{% endmacro %}"
)
"""Writes objects and lists as values in tags."""

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
    "a list of calls in Python alone": turns(
        "{% if m.tool_calls %}[" + _CALLS + "{{ f.name }}(" + _EACH + "{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    ),
    "JSON alone, without a separator": turns(_CALLS + _JSON + "{% endfor %}"),
    "values in tags, as deep as they go": _TAGGED
    + turns(
        "{% if m.tool_calls %}~|<calls>\n"
        + _CALLS
        + '~|<invoke name="{{ f.name }}">{{ tagged(f.arguments) }}~|</invoke>\n{% endfor %}~|</calls>{% endif %}'
    ),
    "a text before each tag": turns(
        "{% if m.tool_calls %}:::<calls>\n"
        + _CALLS
        + ':::<invoke name="{{ f.name }}">'
        + _EACH
        + ':::<param name="{{ k }}">'
        + _PLAIN
        + ":::</param>{% endfor %}:::</invoke>\n{% endfor %}:::</calls>{% endif %}"
    ),
    "a list of calls inside an object": turns(
        '{% if m.tool_calls %}<plan>\n{"steps": ['
        + _CALLS
        + '{"tool": "{{ f.name }}", "input": {{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}'
        "{% endfor %}]}\n</plan>{% endif %}"
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
    "reasoning that is cut out of earlier turns": turns(
        _CALLS + f"\n<call>\n{_JSON}\n</call>{{% endfor %}}",
        content="{% set c = m.content or '' %}{{ c.split('[/MULL]')[-1].lstrip() if '[/MULL]' in c else c }}",
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
    "assignments": (
        "{% if tools %}<%sys%>{{ tools | tojson }}<%over%>\n{% endif %}"
        + _LOOP
        + "{% if m.role == 'assistant' %}<%bot%>"
        "{% if m.reasoning_content %}\u27e6muse\u27e7{{ m.reasoning_content }}\u27e6/muse\u27e7{% endif %}"
        "{{ m.content or '' }}"
        + _CALLS
        + "\n\u00a7CALL {{ f.name }}\u00a7"
        + _EACH
        + "\n  {{ k }} := {{ v | tojson }}{% endfor %}\n\u00a7DONE\u00a7{% endfor %}<%over%>\n{% else %}"
        "<%{{ m.role }}%>{{ m.content }}<%over%>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<%bot%>{% endif %}"
    ),
    "bars": (
        "{% if tools %}[sys] {{ tools | tojson }} [end]\n{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}"
        "[bot] {{ m.content or '' }}{% if m.tool_calls %}<<do"
        + _CALLS
        + " {{ f.name }}("
        + _EACH
        + "{{ k }}: {{ v | tojson }}{% if not loop.last %} | {% endif %}{% endfor %})"
        "{% if not loop.last %} && {% endif %}"
        "{% endfor %}>>{% endif %} [end]\n{% else %}[{{ m.role }}] {{ m.content }} [end]\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[bot] {% endif %}"
    ),
    "quotes of its own": (
        "{% if tools %}<s0>{{ tools | tojson }}</s0>{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}<s1>"
        "{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}{{ m.content or '' }}"
        + _CALLS
        + "<c:{{ f.name }}>"
        + _EACH
        + "{{ '{' }}{{ k }}={% if v is string %}\u00ab{{ v }}\u00bb{% else %}{{ v | tojson }}{% endif %}{{ '}' }}"
        "{% endfor %}"
        "</c>{% endfor %}</s1>{% else %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<s1>{% endif %}"
    ),
    "channels": (
        "{% if tools %}<sys>{{ tools | tojson }}</sys>{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}<turn:bot>"
        "{% if m.reasoning_content %}<ch>think\n{{ m.reasoning_content }}</ch>{% endif %}"
        "{% if m.content %}<ch>say\n{{ m.content }}</ch>{% endif %}"
        + _CALLS
        + "<ch>tool {{ f.name }}\n{{ f.arguments | tojson }}</ch>{% endfor %}</turn>{% else %}"
        "<turn:{{ m.role }}>{{ m.content }}</turn>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<turn:bot>{% endif %}"
    ),
    "lines": (
        "{% if tools %}=== tools\n{{ tools | tojson }}\n{% endif %}" + _LOOP + "=== {{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ m.content or '' }}"
        + _CALLS
        + "\n--- run {{ f.name }}"
        + _EACH
        + "{{ '\\n' }}{{ k }}: {{ v | tojson }}{% endfor %}{{ '\\n' }}--- end run{% endfor %}\n"
        "{% else %}{{ m.content }}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}=== assistant\n{% endif %}"
    ),
    "the number of calls": (
        "{% if tools %}\u27e8tools\u27e9{{ tools | tojson }}\u27e8/tools\u27e9{% endif %}"
        + _LOOP
        + "{% if m.role == 'assistant' %}\u27e8a\u27e9{{ m.content or '' }}"
        "{% if m.tool_calls %}\u27e8calls n={{ m.tool_calls | length }}\u27e9"
        + _CALLS
        + "\u27e8call\u27e9{{ f.name }}\u27e8with\u27e9"
        + _EACH
        + "\u27e8{{ k }}\u27e9"
        + _PLAIN
        + "\u27e8/{{ k }}\u27e9{% endfor %}\u27e8/call\u27e9{% endfor %}\u27e8/calls\u27e9{% endif %}\u27e8/a\u27e9"
        "{% else %}\u27e8u\u27e9{{ m.content }}\u27e8/u\u27e9{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\u27e8a\u27e9{% endif %}"
    ),
    "recipients": (
        "{% if tools %}<|from|>sys\n{{ tools | tojson }}<|eot|>{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}"
        "<|from|>me\n\n{% if m.content %}>>>all\n{{ m.content }}{% endif %}"
        + _CALLS
        + ">>>{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}<|eot|>{% else %}"
        "<|from|>{{ m.role }}\n\n{{ m.content }}<|eot|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|from|>me\n\n>>>{% endif %}"
    ),
    "tools in the last question": (
        _LOOP
        + "{% if m.role == 'assistant' %}|>me\n{{ m.content or '' }}"
        + _CALLS
        + "\nAction: {{ f.name }}\nAction Input: {{ f.arguments | tojson }}{% endfor %}\n<|\n{% else %}|>{{ m.role }}\n"
        "{{ m.content }}{% if loop.last and tools %}\nAvailable: {{ tools | tojson }}{% endif %}\n<|\n{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}|>me\n{% endif %}"
    ),
}

_LIST = "{% if m.tool_calls %}[" + _CALLS + "{{ f.name }}(" + _EACH + "{{ k }}="
_END_OF_LIST = "){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
_COMMA = "{% if not loop.last %}, {% endif %}{% endfor %}"

MISPRINTS: dict[str, str] = {
    "texts without quotes": turns(f"{_LIST}{{{{ v }}}}{_COMMA}{_END_OF_LIST}"),
    "quotes around every value": turns(f'{_LIST}"{{{{ v }}}}"{_COMMA}{_END_OF_LIST}'),
    "no comma between arguments": turns(f"{_LIST}{{{{ v | tojson }}}}{{% endfor %}}{_END_OF_LIST}"),
    "quotes that a text may have, too": turns(
        "{% if m.tool_calls %}<|calls|>[" + _CALLS + "{{ f.name }}(" + _EACH + "{{ k }}={% if v is string %}'{{ v }}'"
        "{% else %}{{ v | tojson }}{% endif %}" + _COMMA + "){% if not loop.last %}, {% endif %}{% endfor %}]<|/calls|>"
        "{% endif %}"
    ),
    "the end of all calls behind several only": turns(
        "{% if m.tool_calls %}<|section|>" + _CALLS + "<|call|>{{ f.name }}<|args|>{{ f.arguments | tojson }}<|/call|>"
        "{% if loop.last and not loop.first %}<|/section|>{% endif %}{% endfor %}{% endif %}"
    ),
}
