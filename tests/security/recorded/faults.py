"""Requests with one fault, or several, in every field of every route, from fixed seeds.

`tests/reliability/fuzzing` adds some with faults at random: it reads the tables of today, so that what it writes is the
same only for as long as they are. The requests are stored for that reason.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.api.client_requests import REQUESTS as OF_CLIENTS
from tests.e2e.test_boundaries import HOSTILE, at_bounds
from tests.reliability import fuzzing
from tests.security.recorded.asking import Case
from tests.security.recorded.heads import in_bytes, in_heads, in_queries, with_keys
from tests.security.recorded.interface import SEED, Interface, base, body_of, post
from tests.security.recorded.valid import CHAT, MESSAGES, NESTED, RESPONSES, TEXT

HOSTILE_A_FIELD, BOUNDS_A_FIELD, FAULTS_A_PLACE = 11, 10, 5
NUM_PAIRS, NUM_FUZZED, NUM_FUZZED_PAIRS, NUM_WARNED, NUM_STARTING, NUM_SIZED = 1_500, 1_500, 60, 700, 250, 1_000
MAX_PLACES_FAULTS = 2_600
MAX_BYTES = 300_000
"""Longest body, but for the longest lists."""

REMOVED: dict[str, tuple[str, ...]] = {
    "ChatRequest": ("audio", "lora_path", "chat_template", "web_search_options"),
    "CompletionRequest": (
        "lora_path", "chat_template", "tools", "tool_choice", "reasoning_effort", "include_reasoning",
        "thinking_token_budget",
    ),
    "MessagesRequest": (
        "billing_policy", "compaction", "container", "diagnostics", "fallbacks", "inference_geo", "mcp_servers",
        "thread", "user_profile_id", "workspace_id",
    ),
    "ResponsesRequest": (
        "access_programs", "chat_template", "context_management", "conversation", "image", "logprobs", "lora_path",
        "max_completion_tokens", "max_tokens", "max_tool_calls", "messages", "n", "prompt", "reasoning_effort",
        "response_format",
    ),
    "EmbeddingRequest": ("embed_dtype", "endianness", "messages"),
}  # fmt: skip
"""Names that clients know and that are refused with the way out. They are in no document."""
GUIDED = tuple(
    f"guided_{way}" for way in ("choice", "decoding_backend", "grammar", "json", "regex", "whitespace_pattern")
)
REMOVED |= {name: REMOVED[name] + GUIDED for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest")}
REMOVED["CountTokensRequest"] = REMOVED["MessagesRequest"]
NEVER_KNOWN = (
    "best_of", "suffix", "use_beam_search", "extra_body", "response_formats", "__class__", "", "\u0000", "a" * 999,
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them, with ids of their own."""
    routes = Interface()
    parts = {
        "field": _fields(routes), "name": _names(routes), "nested": _nested(), "sized": _sized(),
        "longest": _longest(), "pair": _pairs(routes), "bytes": in_bytes(routes), "head": in_heads(routes),
        "query": in_queries(routes), "fuzzed": _fuzzed(), "warn": _warned(routes), "starting": _starting(routes),
        "keyed": with_keys(routes),
    }  # fmt: skip
    for part, made in parts.items():
        for number, case in enumerate(made):
            if (len(case["body"] or b"") <= MAX_BYTES or part == "longest") and not _is_short_of_time(case):
                yield Case(f"{part}-{number}", **case)


def _is_short_of_time(case: dict[str, Any]) -> bool:
    """Whether it asks to be ended within seconds: whether it is answered first depends on the machine."""
    try:
        value = json.loads(case["body"] or b"{}")
    except (ValueError, RecursionError):
        return False
    timeout = value.get("timeout") if isinstance(value, dict) else None
    return type(timeout) in (int, float) and 0 < timeout < 60


def _without_null(schema: Any) -> Any:
    """A schema as `at_bounds` reads it: null stands for "not given" wherever a value need not be."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_null(item) for key, item in schema.items()}
    if isinstance(plain.get("type"), list):
        plain["type"] = next(kind for kind in plain["type"] if kind != "null")
    return plain


WHOLE_AS_DECIMALS = ("null", "1.0", "-1.0", "[1.0]", "[[1, 2.0]]", '"1"', "1e400")


def _texts(rng: random.Random, schema: dict[str, Any]) -> list[tuple[str, str]]:
    """(fault, JSON text) of one field: values of other kinds, and some at its bounds and beyond them."""
    bounds = list(dict.fromkeys(at_bounds(_without_null(schema))))
    if len(bounds) > BOUNDS_A_FIELD:
        bounds = rng.sample(bounds, BOUNDS_A_FIELD)
    hostile = (*WHOLE_AS_DECIMALS, *rng.sample(HOSTILE, HOSTILE_A_FIELD))
    return [("hostile", text) for text in dict.fromkeys(hostile)] + [("bounds", text) for text in bounds]


def _fields(routes: Interface) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"{SEED} fields")
    for path, name, properties in routes.types():
        yield post(path, "", "none", body_of(base(name)))
        for field, schema in properties.items():
            others = base(name, field)
            for fault, text in _texts(rng, schema):
                yield post(path, field, fault, body_of([*others, f"{json.dumps(field)}:{text}"]))
            yield post(path, field, "missing", body_of(others))
            yield post(path, field, "twice", body_of([*others, f'"{field}":null', f'"{field}":null']))


def _misspelt(rng: random.Random, name: str) -> list[str]:
    """Names with a typing error. The answer suggests the likeliest spelling."""
    at = rng.randrange(len(name))
    return [name[:at] + name[at + 1 :], name + "s", name.title().replace("_", ""), name.upper(), name.replace("_", "-")]


def _names(routes: Interface) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"{SEED} names")
    for path, name, properties in routes.types():
        for field in properties:
            for wrong in rng.sample(_misspelt(rng, field), 2):
                yield post(path, field, "misspelt", body_of([*base(name), f'"{wrong}":1']))
        for field in (*REMOVED.get(name, ()), *NEVER_KNOWN):
            for value in ("null", '"x"'):
                yield post(path, field, "unknown", body_of([*base(name), f"{json.dumps(field)}:{value}"]))
            yield post(path, field, "unknown, first", body_of([f"{json.dumps(field)}:1", *base(name)]))
        for field, schema in properties.items():
            if (told := schema.get("description", "")).startswith("Another name of `"):
                real = told.split("`")[1]
                for one, other in (("true", "false"), ("null", "true"), ('"a"', '"b"'), ("1", "null")):
                    for order in ((field, real), (real, field)):
                        both = [f'"{order[0]}":{one}', f'"{order[1]}":{other}']
                        yield post(path, field, "two names", body_of([*base(name), *both]))


REPLACEMENTS: tuple[Any, ...] = (
    None, True, 0, 1, 1.0, 1.5, -1, "", "x", [], {}, [None], [[]], {"x": 1}, {"type": "x"}, 10**400, 2**63,
    float("nan"), float("inf"), "\ud800", "\u0000", ["x", 1], "a" * 2_000,
)  # fmt: skip


def _nested() -> Iterator[dict[str, Any]]:
    """One fault at every place of bodies that are taken and say much."""
    rng = random.Random(f"{SEED} nested")
    bodies = [*NESTED, *((asked.path, asked.body) for asked in OF_CLIENTS)]
    for path, body in NESTED:
        yield post(path, "", "none", json.dumps(body).encode())
    made = [
        post(path, _shown(place), fault, json.dumps(value).encode())
        for path, body in bodies
        for place in _places(body)
        for fault, value in _spoilt(rng, body, place)
    ]
    yield from made if len(made) <= MAX_PLACES_FAULTS else rng.sample(made, MAX_PLACES_FAULTS)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


def _shown(place: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")


def _spoilt(rng: random.Random, body: Any, place: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for replacement in rng.sample(REPLACEMENTS, FAULTS_A_PLACE):
        value, owner = _owner(body, place)
        owner[place[-1]] = replacement
        yield "replaced", value
    value, owner = _owner(body, place)
    if isinstance(owner, list):
        owner.insert(place[-1], rng.choice(REPLACEMENTS))
        yield "inserted", value
        return
    kept = owner.pop(place[-1])
    yield "missing", value
    value, owner = _owner(body, place)
    owner[rng.choice((*_misspelt(rng, place[-1]), "x", "cache_control", "id"))] = copy.deepcopy(kept)
    yield "unknown", value


def _owner(body: Any, place: tuple[Any, ...]) -> tuple[Any, Any]:
    """A copy of the body, and in it the object or list that holds `place`."""
    value = copy.deepcopy(body)
    owner = value
    for key in place[:-1]:
        owner = owner[key]
    return value, owner


COUNTS = (0, 16, 17, 64, 65, 128, 129, 256, 257, 512, 513, 1_024, 1_025, 2_048, 2_049)


def _sized() -> Iterator[dict[str, Any]]:
    """Lists, texts and objects of as many items, characters and keys as may bound any of them, and one more."""
    rng = random.Random(f"{SEED} sized")
    made = [
        post(path, _shown(place), f"of size {count}", json.dumps(value).encode())
        for path, body in NESTED
        for place in _places(body)
        for count in COUNTS
        for value in _resized(body, place, count)
    ]
    yield from rng.sample(made, NUM_SIZED)


def _resized(body: Any, place: tuple[Any, ...], count: int) -> Iterator[Any]:
    value, owner = _owner(body, place)
    match owner[place[-1]]:
        case list() as items if items:
            owner[place[-1]] = (items * count)[:count]
        case str() as text if text:
            owner[place[-1]] = (text * count)[:count]
        case dict() as pairs if len(pairs) < count and "type" not in pairs:
            pairs.update({str(i): "x" for i in range(count - len(pairs))})
        case _:
            return
    yield value


def _longest() -> Iterator[dict[str, Any]]:
    user = {"role": "user", "content": "x"}
    for path, field, item in (
        (CHAT, "messages", user), (MESSAGES, "messages", user), (RESPONSES, "input", user),
        ("/tokenize", "messages", user), (TEXT, "prompt", 5), (TEXT, "allowed_token_ids", 5),
        ("/v1/embeddings", "input", 5), ("/detokenize", "tokens", 5),
    ):  # fmt: skip
        given = {"max_tokens": 2} if path == MESSAGES else {"prompt": "x"} if field == "allowed_token_ids" else {}
        for count in (10_000, 10_001, 65_536, 65_537, 100_001):
            yield post(path, field, f"of size {count}", json.dumps({**given, field: [item] * count}).encode())


def _pairs(routes: Interface) -> Iterator[dict[str, Any]]:
    """Two or three faults. Which of them the answer names is part of the interface."""
    rng = random.Random(f"{SEED} pairs")
    types = list(routes.types())
    for _ in range(NUM_PAIRS):
        path, name, properties = rng.choice(types)
        members = dict(member.split(":", 1) for member in base(name))
        fields = rng.sample(list(properties), min(len(properties), rng.choice((2, 2, 3))))
        for field in fields:
            members[json.dumps(field)] = rng.choice(_texts(rng, properties[field]))[1]
        if rng.random() < 0.3:
            unknown = rng.choice((*REMOVED.get(name, ()), *NEVER_KNOWN, rng.choice(_misspelt(rng, fields[0]))))
            fields.append(unknown)
            members[json.dumps(unknown)] = rng.choice(("1", "null", "{}"))
        if rng.random() < 0.15:
            members.pop(rng.choice(list(members)))
        pairs = list(members.items())
        rng.shuffle(pairs)
        body = body_of([f"{key}:{text}" for key, text in pairs])
        yield post(path, " + ".join(fields)[:80], "several", body)


def _fuzzed() -> Iterator[dict[str, Any]]:
    """Several faults at random, as the fuzzer writes them."""
    made = [*fuzzing.requests(SEED, NUM_FUZZED), *fuzzing.pairs(SEED, NUM_FUZZED_PAIRS)]
    for asked in made:
        path = asked.path.partition("?")[0]
        route = f"{asked.method} {path if len(path) < 40 and 'responses/' not in path else 'elsewhere'}"
        yield post(
            path, "", "fuzzed", b"", route=route, method=asked.method, path=asked.path, headers=tuple(asked.headers),
            body=asked.body,
        )  # fmt: skip


def _warned(routes: Interface) -> Iterator[dict[str, Any]]:
    """Faults at a server that leaves unknown names out and tells which."""
    rng = random.Random(f"{SEED} warned")
    unknown = [case for case in (*_names(routes), *_nested(), *_pairs(routes)) if case["fault"] != "replaced"]
    for case in rng.sample(unknown, NUM_WARNED):
        yield {**case, "server": "warn"}


def _starting(routes: Interface) -> Iterator[dict[str, Any]]:
    """Faults at a server without an engine yet. It names some of them now, and others only once it is ready."""
    rng = random.Random(f"{SEED} starting")
    for case in rng.sample([*_nested(), *_pairs(routes)], NUM_STARTING):
        yield {**case, "server": "starting"}
    for path, name, _ in routes.with_body():
        for body in (body_of(base(name)), body_of([*base(name), '"model":"none"']), b"{}", b"{"):
            yield post(path, "", "none", body, server="starting")
