"""Outputs of models of each family with the expected parse, and the texts of chat templates that show the family.

Outputs and template texts are written for these tests, in the spelling of the published templates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from inferd.server.tools.detect import Clues

DS = "<\uff5ctool\u2581"
CALLS_BEGIN, CALLS_END = f"{DS}calls\u2581begin\uff5c>", f"{DS}calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END, SEP = f"{DS}call\u2581begin\uff5c>", f"{DS}call\u2581end\uff5c>", f"{DS}sep\uff5c>"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["C", "F"]},
                "hours": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time.now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = (WEATHER, TIME)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of a model."""

    tools: str
    """Name of the format of its calls."""
    reasoning: str
    text: str
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()
    prompt: str = ""
    """The end of its prompt."""
    is_as_transformers: bool = True
    """transformers' own parser reads it the same way."""


PARIS: tuple[str, dict[str, object]] = ("get_weather", {"city": "Paris"})
OSLO: tuple[str, dict[str, object]] = ("get_weather", {"city": "Os\u00ado \u20ac", "days": 3, "hours": [1, 2]})
NOW: tuple[str, dict[str, object]] = ("time.now", {})


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def call(name: str, arguments: dict[str, object], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {dumped(arguments)}}}'


SAMPLES: dict[str, Sample] = {
    "hermes": Sample("hermes", "none", f"<tool_call>\n{call(*PARIS)}\n</tool_call>", calls=(PARIS,)),
    "hermes, two after words": Sample(
        "hermes", "think",
        f"<think>\nBoth.\n</think>\n\nLet me see.\n<tool_call>\n{call(*PARIS)}\n</tool_call>\n"
        f"<tool_call>\n{call(*OSLO)}\n</tool_call>",
        "Let me see.", "Both.", (PARIS, OSLO), "<|im_start|>assistant\n",
    ),
    "hermes, words alone": Sample(
        "hermes", "think", "  Hello <there>.\n", "  Hello <there>.\n", is_as_transformers=False
    ),
    "hermes, a marker inside a string": Sample(
        "hermes", "none", '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> {"}}</tool_call>',
        calls=(("say", {"text": "</tool_call> {"}),), is_as_transformers=False,
    ),
    "qwen3, thinking begun by the prompt": Sample(
        "hermes", "think", "Hm, a < b.\n</think>\n\nIt is **3**.", "It is **3**.", "Hm, a < b.",
        prompt="<|im_start|>user\nSay <think>!<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "qwen3, thinking switched off": Sample(
        "hermes", "think", "Three.", "Three.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "qwen3-coder": Sample(
        "qwen3_coder", "think",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "I look.", calls=(("get_weather", {"city": "Paris", "days": 3, "hours": [1, 2]}),),
    ),
    "qwen3-coder, two, one without its outer tag": Sample(
        "qwen3_coder", "none",
        "<function=get_weather>\n<parameter=city>\n  if a > b:\n    c</d>\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time.now>\n</function>\n</tool_call>\n",
        calls=(("get_weather", {"city": "  if a > b:\n    c</d>"}), NOW),
    ),
    "seed-oss": Sample(
        "seed_oss", "seed_oss",
        "<seed:think>A city.</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris"
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "I look.", "A city.", (("get_weather", {"city": "Paris", "days": 3}),), "<seed:bos>assistant\n",
    ),
    "glm 4.5, two calls behind its reasoning": Sample(
        "glm45", "think",
        "\n<think>A city.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>hours</arg_key>\n<arg_value>[1, 2]"
        "</arg_value>\n</tool_call>\n<tool_call>time.now\n</tool_call>",
        "I look.", "A city.", (("get_weather", {"city": "Paris", "days": 3, "hours": [1, 2]}), NOW), "<|assistant|>",
    ),
    "glm 4.7, on one line": Sample(
        "glm47", "think",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a < b\n</arg_value></tool_call>"
        "<tool_call>time.now</tool_call>",
        calls=(("get_weather", {"city": "a < b\n"}), NOW), prompt="<|assistant|></think>",
    ),
    "exaone 4, whose prompt begins to think": Sample(
        "hermes", "think", "A sum.\n</think>\n\nSeven.", "Seven.", "A sum.", prompt="[|assistant|]\n<think>\n"
    ),
    "llama 3": Sample("llama3_json", "none", call(*PARIS, "parameters"), calls=(PARIS,), is_as_transformers=False),
    "llama 3, two behind the tag": Sample(
        "llama3_json", "none", f"<|python_tag|>{call(*PARIS, 'parameters')}; {call(*NOW, 'parameters')}",
        calls=(PARIS, NOW), is_as_transformers=False,
    ),
    "llama 3, JSON that is no call": Sample(
        "llama3_json", "none", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', is_as_transformers=False
    ),
    "llama 3, a call of a built-in": Sample(
        "llama3_json", "none", '<|python_tag|>brave_search.call(query="x")',
        'brave_search.call(query="x")', is_as_transformers=False,
    ),
    "lfm2, two calls in Python": Sample(
        "lfm2", "think",
        "<think>Both.</think>I look.\n<|tool_call_start|>[get_weather(city='Os\u00ado \u20ac', days=3, hours=[1, 2]), "
        "time.now()]<|tool_call_end|>", "I look.", "Both.", (OSLO, NOW), is_as_transformers=False,
    ),
    "lfm2, every literal": Sample(
        "lfm2", "none",
        '<|tool_call_start|>f(a=-1.5, b={"k": (None, True), "l": null}, c="<|tool_", d=false)<|tool_call_end|>Done.',
        "Done.",
        calls=(("f", {"a": -1.5, "b": {"k": [None, True], "l": None}, "c": "<|tool_", "d": False}),),
        is_as_transformers=False,
    ),
    "olmo 3, a call on each line": Sample(
        "olmo3", "think",
        "<think>Both.</think>I look.<function_calls>get_weather(city='Paris')\ntime.now()</function_calls>",
        "I look.", "Both.", (PARIS, NOW), is_as_transformers=False,
    ),
    "pythonic, a list": Sample(
        "pythonic", "none", '[get_weather(city="Paris"), time.now()]', calls=(PARIS, NOW), is_as_transformers=False,
    ),
    "pythonic, between markers": Sample(
        "pythonic", "none", "<|python_start|>[time.now()]<|python_end|>", calls=(NOW,), is_as_transformers=False,
    ),
    "pythonic, halves of a character": Sample(
        "pythonic", "none", '[get_weather(city="\\ud83d\\ude00")]', calls=(("get_weather", {"city": "\U0001f600"}),),
        is_as_transformers=False,
    ),
    "pythonic, an unknown function": Sample(
        "pythonic", "none", "[get_rain(city='Paris')]", "[get_rain(city='Paris')]", is_as_transformers=False,
    ),
    "pythonic, a call and then words": Sample(
        "pythonic", "none", "[time.now()] tells the time.", "[time.now()] tells the time.", is_as_transformers=False,
    ),
    "pythonic, a list in the text": Sample(
        "pythonic", "none", "Say [time.now()].", "Say [time.now()].", is_as_transformers=False,
    ),
    "kimi k2, two calls": Sample(
        "kimi_k2", "think",
        "<think>Both.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{dumped(PARIS[1])}<|tool_call_end|><|tool_call_begin|>functions.time.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.", "Both.", (PARIS, NOW),
    ),
    "functools": Sample(
        "functools", "none", f"functools[{call(*PARIS)}, {call(*NOW)}]", calls=(PARIS, NOW), is_as_transformers=False,
    ),
    "granite 3.3, reasoning": Sample(
        "granite", "granite", "Here is my thought process:\nOne.\nHere is my response:\nTwo.", "Two.", "One.",
    ),
    "lfm2, in JSON": Sample(
        "lfm2", "none", f'<|tool_call_start|>[{call("f", {"a": True})}, {call(*PARIS)}]<|tool_call_end|>',
        calls=(("f", {"a": True}), PARIS), is_as_transformers=False,
    ),
    "mistral, a list": Sample(
        "mistral", "none", f'[TOOL_CALLS] [{call(*PARIS)[:-1]}, "id": "123456789"}}, {call(*NOW)}]', calls=(PARIS, NOW),
        is_as_transformers=False,
    ),
    "mistral, names before arguments": Sample(
        "mistral_args", "mistral",
        f"[THINK]Two.[/THINK]Well.[TOOL_CALLS]get_weather[ARGS]{dumped(PARIS[1])}"
        f"[TOOL_CALLS]time.now[CALL_ID]abc123XYZ[ARGS]{{}}",
        "Well.", "Two.", (PARIS, NOW), is_as_transformers=False,
    ),
    "deepseek v3": Sample(
        "deepseek_v3", "think",
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}get_weather\n```json\n{dumped(PARIS[1])}\n```{CALL_END}\n"
        f"{CALL_BEGIN}function{SEP}time.now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        thought="", calls=(PARIS, NOW), prompt="<\uff5cAssistant\uff5c>",
    ),
    "deepseek r1": Sample(
        "deepseek_v3", "think", "First I add.\n</think>\n\nSeven.", "Seven.", "First I add.",
        prompt="<\uff5cUser\uff5c>3+4<\uff5cAssistant\uff5c><think>\n",
    ),
    "deepseek v3.1": Sample(
        "deepseek_v31", "think",
        f"Let me look.{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{dumped(PARIS[1])}{CALL_END}"
        f"{CALL_BEGIN}time.now{SEP}{{}}{CALL_END}{CALLS_END}",
        "Let me look.", calls=(PARIS, NOW), prompt="<\uff5cAssistant\uff5c></think>",
    ),
    "gemma 4": Sample(
        "gemma4", "gemma4",
        "<|channel>thought\nTwo calls.\n<channel|>Sure."
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:get_weather{}<tool_call|>",
        "Sure.", "Two calls.", (("get_weather", {"city": "Paris", "days": 2}), ("get_weather", {})),
        "<|turn>model\n",
    ),
    "phi-4-mini": Sample(
        "phi4", "none", f"<|tool_call|>[{call(*PARIS)}, {call(*NOW)}]<|/tool_call|>", calls=(PARIS, NOW),
        is_as_transformers=False,
    ),
    "granite 3": Sample("granite", "none", f"<|tool_call|>[{call(*PARIS)}]", calls=(PARIS,), is_as_transformers=False),
    "gpt-oss": Sample(
        "harmony", "harmony",
        "<|channel|>analysis<|message|>They want Paris.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{dumped(PARIS[1])}",
        "I look it up.", "They want Paris.", (PARIS,), "<|start|>assistant",
    ),
    "gpt-oss, the recipient first": Sample(
        "harmony", "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{dumped(PARIS[1])}<|call|>",
        calls=(PARIS,), prompt="<|start|>assistant",
    ),
    "gpt-oss, the answer": Sample(
        "harmony", "harmony",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Three.",
        "Three.", "One.\nTwo.", prompt="<|start|>assistant",
    ),
    "no format known, a call required": Sample(
        "json", "none", f"[{call(*PARIS)}, {call(*NOW)}]", calls=(PARIS, NOW), is_as_transformers=False
    ),
}  # fmt: skip

BROKEN: dict[str, tuple[str, str, str]] = {
    "no JSON": ("hermes", "<tool_call>\nget_weather(Paris)\n</tool_call> after", "get_weather(Paris)\n after"),
    "no name": (
        "hermes",
        'A <tool_call>\n{"arguments": {"city": "Paris"}}\n</tool_call>',
        'A \n{"arguments": {"city": "Paris"}}',
    ),
    "ended before its arguments": ("hermes", 'x <tool_call>\n{"name": "get_wea', 'x \n{"name": "get_wea'),
    "an unknown key": (
        "hermes",
        '<tool_call>{"name": "f", "why": 1, "arguments": {}}</tool_call>',
        '{"name": "f", "why": 1, "arguments": {}}',
    ),
    "a marker begun": ("hermes", "a <tool_cal", "a <tool_cal"),
    "a marker alone": ("hermes", "<tool_call>\n ", ""),
    "an end alone": ("hermes", "well </tool_call>\n", "well"),
    "an unknown name": ("llama3_json", call("get_rain", {}, "parameters"), call("get_rain", {}, "parameters")),
    "Python that is no call": ("lfm2", "see <|tool_call_start|>[1 + 2]<|tool_call_end|> there", "see [1 + 2] there"),
    "Python with a place for its arguments": (
        "lfm2",
        '<|tool_call_start|>[get_weather("Paris")]<|tool_call_end|>',
        '[get_weather("Paris")]',
    ),
    "Python that computes": ("lfm2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>", "[f(a=g())]"),
    "Python with an argument twice": ("lfm2", "<|tool_call_start|>[f(a=1, a=2)]<|tool_call_end|>", "[f(a=1, a=2)]"),
    "Python that nests too deep": (
        "lfm2",
        f"<|tool_call_start|>[f(a={'[' * 5000})]<|tool_call_end|>",
        f"[f(a={'[' * 5000})]",
    ),
    "Python with a key twice": (
        "lfm2",
        "<|tool_call_start|>[f(a={'b': 1, 'b': 2})]<|tool_call_end|>",
        "[f(a={'b': 1, 'b': 2})]",
    ),
    "Python with a very large number": (
        "lfm2",
        f"<|tool_call_start|>[f(a=0x{'f' * 5000})]<|tool_call_end|>",
        f"[f(a=0x{'f' * 5000})]",
    ),
    "Python that ends early": ("lfm2", "<|tool_call_start|>[get_weather(city=", "[get_weather(city="),
    "a list of words": ("mistral", "[TOOL_CALLS] see above", "see above"),
    "no arguments": ("mistral_args", "[TOOL_CALLS]get_weather(x)", "get_weather(x)"),
    "no JSON behind a name": ("mistral_args", "[TOOL_CALLS]get_weather[ARGS] Paris", "get_weather Paris"),
    "no function": ("qwen3_coder", "<tool_call>\n{}\n</tool_call>", "{}"),
    "a call without its name": ("gemma4", "<|tool_call>get_weather{}<tool_call|>", "get_weather{}"),
    "a channel nobody knows": ("harmony", "<|channel|>secret<|message|>hm<|end|>", "hm"),
    "blanks": ("hermes", "   \n", "   \n"),
}
"""Texts that are no call in the end: (format, text, content)."""

TEMPLATES: dict[str, tuple[Clues, str, str]] = {
    "Qwen 2.5": (
        Clues("# Tools\n<tools></tools>\nreturn a json object within <tool_call></tool_call> tags:\n<tool_call>\n"
              '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', (), "qwen2"),
        "hermes", "none",
    ),
    "Qwen3": (
        Clues("<tool_call>\n{\"name\": \"' + tool_call.name + '\", \"arguments\": ...}\n</tool_call>"
              "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
              "{%- endif %}", (), "qwen3"), "hermes", "think"),
    "Qwen3-Coder": (
        Clues("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>",
              (), "qwen3_moe"), "qwen3_coder", "none"),
    "GLM-4.5": (
        Clues("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
              "{{ '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}",
              ("<think>", "<tool_call>"), "glm4_moe"), "glm45", "think"),
    "GLM-4.7": (
        Clues("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
              "{{- '</think>' -}}", ("<think>", "<tool_call>"), "glm4_moe"), "glm47", "think"),
    "Seed-OSS": (
        Clues("{%- set toolcall_begin_token = '<seed:tool_call>' %}{%- set think_begin_token = '<seed:think>' %}"
              "{%- set think_end_token = '</seed:think>' %}<function=example_function_name>\n"
              "<parameter=example_parameter_1>value_1</parameter>", (), "seed_oss"), "seed_oss", "seed_oss"),
    "Ministral 3 without a word of tools": (
        Clues("[INST]{{ content }}[/INST]", ("[TOOL_CALLS]", "[ARGS]"), "ministral3"), "mistral_args", "none"),
    "Hermes 3 on Llama": (
        Clues("<|start_header_id|>system<|end_header_id|> <tool_call>\n{'arguments': <args-dict>}\n</tool_call>", (),
              "llama"), "hermes", "none"),
    "Llama 3.1": (
        Clues("{%- if builtin_tools is defined %}<|python_tag|>{{ tool_call.name + '.call(' }}{%- endif %}"
              'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
              (), "llama"), "llama3_json", "none"),
    "Mistral 7B v0.3": (Clues('{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}', (), "mistral"),
                        "mistral", "none"),
    "Magistral": (Clues("{{ '[THINK]' }}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", (), "mistral"),
                  "mistral_args", "mistral"),
    "Mistral without a word of tools": (Clues("[INST]{{ content }}[/INST]", ("[TOOL_CALLS]",), "mistral"),
                                        "mistral", "none"),
    "DeepSeek R1 distilled": (
        Clues("{{'" + CALLS_BEGIN + CALL_BEGIN + "' + tool['type'] + '" + SEP + "' + name + '\\n' + '```json' + '\\n'}}"
              "{{'<\uff5cAssistant\uff5c><think>\\n'}}", (), "qwen2"), "deepseek_v3", "think"),
    "DeepSeek V3.1": (Clues("{{'" + CALL_BEGIN + "'+ name + '" + SEP + "'}}{{'</think>'}}", (), "deepseek_v3"),
                      "deepseek_v31", "think"),
    "LFM2": (
        Clues("List of tools: <|tool_list_start|>[{{ tool }}]<|tool_list_end|>", ("<|tool_call_start|>",), "lfm2"),
        "lfm2", "none",
    ),
    "Kimi K2": (
        Clues("<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>", (), "kimi_k2"), "kimi_k2", "none"
    ),
    "Llama 3.2 in Python": (
        Clues("You SHOULD put them in the format [func_name1(params_name1=params_value1)]", (), "llama"),
        "pythonic", "none",
    ),
    "OLMo 3": (
        Clues("<|im_start|>assistant\n<function_calls>{{ calls }}</function_calls>", (), "olmo3"), "olmo3", "none"
    ),
    "Phi-4-mini in another template": (
        Clues("generated in a single JSON list formatted as functools[{\"name\": [function name]}]", (), "phi3"),
        "functools", "none",
    ),
    "Gemma 3": (Clues("<start_of_turn>model\n{{ content }}<end_of_turn>", (), "gemma3_text"), "none", "none"),
    "Gemma 4": (
        Clues("{{- '<|tool_call>call:' + function['name'] + '{' -}}<|channel>thought\n<channel|>", (), "gemma4"),
        "gemma4", "gemma4",
    ),
    "Phi-4-mini": (Clues("respond in this format: <|tool_call|>{\"name\": \"foo\"}<|/tool_call|>", (), "phi3"),
                   "phi4", "none"),
    "Phi-4-reasoning": (
        Clues("into two main sections: <think> {Thought section} </think>", (), "phi3"), "none", "think"
    ),
    "Granite 3.3": (Clues("respond only with <|tool_call|> followed by a JSON list of tools used.", (), "granite"),
                    "granite", "none"),
    "gpt-oss": (Clues("<|channel|>analysis 'to=' 'functions.' + name + '<|channel|>commentary <|call|>", (), "gpt_oss"),
                "harmony", "harmony"),
    "a base model": (Clues(), "none", "none"),
}  # fmt: skip
"""Properties of checkpoints, and the formats of calls and of reasoning that they use."""
