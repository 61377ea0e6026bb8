"""Real answers of every route have the types that the table of routes names, and the schemas of /openapi.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import EngineStats, Failure, StepOutput
from inferd.server.auth.keys_file import append_entry, digest_of, entry_of
from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints import embedding_routes, routes
from inferd.server.endpoints.app import Backend
from inferd.server.endpoints.route import Access, Area, Route
from inferd.server.endpoints.routes import ROUTES
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from inferd.server.tools.detect import Clues, detect
from tests.api.conftest import app_settings

from .conftest import NAME, WAIT_S, Script, ScriptedRouter, coder, serving

ADMIN = "an-admin-key"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Get the weather.", "parameters": PARAMETERS}
TEXT = "Hello there, this is an answer."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"input": "Paris"}}\n</tool_call>'
THOUGHT = f"<think>Hm.</think>I look.\n{CALL}"
BUILT_IN: Any = {
    "shell": {"commands": ["ls"]},
    "local_shell": {"command": ["ls"]},
    "apply_patch": {"type": "create_file", "path": "a", "diff": "+a"},
    "tool_search": {"query": "x"},
    "s__c": {"input": "x"},
    "s__f": {},
}
FAILURE = Failure("numerical_error", "The model computed NaN.")
MESSAGES = [{"role": "user", "content": "Hi"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@dataclass
class Asking:
    """Asks one server and keeps the answers."""

    http: httpx.Client
    router: ScriptedRouter
    bodies: dict[Route, list[Any]] = field(default_factory=lambda: defaultdict(list))
    events: dict[Route, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, route: Route, path: str = "", **body: Any) -> Any:
        """The body of the answer, or its events."""
        response = self.http.request(route.method, path or route.path, json=body or None)
        assert response.status_code == 200, response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
            events = [json.loads(one) for one in data if one != "[DONE]"]
            self.events[route] += events
            return events
        answer = {str: response.text, bytes: response.content}.get(route.answer) or response.json()
        self.bodies[route].append(answer)
        return answer

    def generate(self, route: Route, script: Script, **body: Any) -> Any:
        """The body of a plain answer. The same is streamed, too."""
        self.router.will(script)
        options = {"stream_options": USAGE} if route in (routes.CHAT, routes.COMPLETIONS) else {}
        self.ask(route, **body, stream=True, **options)
        return self.ask(route, **body)

    def fail(self, route: Route, **body: Any) -> None:
        """A stream that ends with an error."""
        self.router.will(Script(text=TEXT, failure=FAILURE))
        self.ask(route, **body, stream=True)
        self.router.will(Script(text=TEXT))


def ask_for_chat(asking: Asking) -> None:
    scores = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    asking.generate(routes.CHAT, Script(text=TEXT), messages=MESSAGES, n=2, stop="answer", **scores)
    asking.ask(routes.CHAT, messages=MESSAGES, prompt_logprobs=1)
    tools = [{"type": "function", "function": FUNCTION}]
    asking.generate(routes.CHAT, Script(text=THOUGHT), messages=MESSAGES, tools=tools, include_metrics=True)
    tools = [{"type": "custom", "custom": {"name": "get_weather"}}]
    asking.generate(routes.CHAT, Script(text=WRITTEN), messages=MESSAGES, tools=tools)
    asking.fail(routes.CHAT, messages=MESSAGES)
    asking.ask(routes.CHAT_RENDER, messages=MESSAGES)
    asking.ask(routes.TOKENIZE, messages=MESSAGES)


def ask_for_text(asking: Asking) -> None:
    scores = {"logprobs": 2, "echo": True, "return_token_ids": True, "max_tokens": 3}
    asking.generate(routes.COMPLETIONS, Script(text=TEXT), prompt=["a b c", "d"], n=2, **scores)
    asking.ask(routes.COMPLETIONS, prompt="a b", prompt_logprobs=1, stop="is")
    asking.generate(routes.COMPLETIONS, Script(text=TEXT), prompt="a b", include_metrics=True)
    asking.fail(routes.COMPLETIONS, prompt="a")
    asking.generate(routes.INFILL, Script(text=TEXT), input_prefix="a", input_suffix="b", stop="answer")
    asking.generate(routes.INFILL, Script(text=TEXT), input_prefix="a", n_cmpl=2)
    asking.fail(routes.INFILL, input_prefix="a")
    asking.ask(routes.COMPLETIONS_RENDER, prompt=["a", "b"])
    asking.ask(routes.EMBEDDINGS, input=["a", "b"])
    asking.ask(routes.EMBEDDINGS, input="a", encoding_format="base64")
    ask_for_scores(asking)
    ask_for_vectors(asking)
    asking.ask(routes.DETOKENIZE, tokens=asking.ask(routes.TOKENIZE, prompt="a b", return_token_strs=True)["tokens"])


def ask_for_scores(asking: Asking) -> None:
    for route in routes.RERANKS:
        asking.ask(route, query="a", documents=["b", "c"], return_documents=True)
        asking.ask(route, query="a", texts=["b", "c"], return_text=True)
    for route in routes.SCORES:
        asking.ask(route, text_1="a", text_2=["b", "c"])
    asking.router.num_labels = 2
    for route in routes.CLASSIFIES:
        asking.ask(route, input=["a", "b"])
    asking.ask(embedding_routes.TEI_INFO)
    asking.ask(routes.PREDICT, inputs="a")
    asking.ask(routes.PREDICT, inputs=[["a"], ["a", "b"]])
    asking.router.num_labels = 1
    asking.ask(embedding_routes.TEI_INFO)


def ask_for_vectors(asking: Asking) -> None:
    asking.router.gives_token_embeddings = True
    asking.ask(routes.EMBEDDINGS, input=["a", "b"], return_multivector=True)
    asking.ask(routes.EMBEDDINGS, input="a", output_dtype="int8")
    asking.ask(embedding_routes.POOLING, input=["a", "b"])
    asking.ask(embedding_routes.POOLING, input="a b", task="token_embed")
    asking.ask(embedding_routes.COHERE_V1, texts=["a", "b"])
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    for route in (embedding_routes.COHERE_V1, embedding_routes.COHERE_V2):
        asking.ask(route, texts=["a", "b"], embedding_types=types, input_type="search_query")
    asking.ask(embedding_routes.TEI_EMBED, inputs=["a", "b"])
    asking.ask(embedding_routes.TEI_EMBED_ALL, inputs=["a b", "c"])
    asking.ask(embedding_routes.OLLAMA_EMBED, input=["a", "b"])
    asking.ask(embedding_routes.OLLAMA_EMBEDDINGS, prompt="a")
    asking.ask(embedding_routes.LLAMA_CPP, content=["a", "b"])
    asking.ask(embedding_routes.OLLAMA_SHOW, model=NAME)


def ask_for_messages(asking: Asking) -> None:
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 100}
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    asking.generate(routes.MESSAGES, Script(text=THOUGHT), **asked, tools=[tool])
    asking.generate(routes.MESSAGES, Script(text=TEXT), **asked, stop_sequences=["answer"])
    asking.fail(routes.MESSAGES, **asked)
    asking.ask(routes.COUNT_TOKENS, model=NAME, messages=MESSAGES)


def ask_for_responses(asking: Asking) -> None:
    asked: dict[str, Any] = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "metadata": {"a": "b"}}
    included = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    asked |= {"include": included, "top_logprobs": 2, "reasoning": {"effort": "low", "summary": "auto"}}
    first = asking.generate(routes.RESPONSES, Script(text=THOUGHT), **asked)
    spoken = [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "No."}]
    items = [
        {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "18 C"},
        {"role": "assistant", "content": spoken},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    ]
    text = {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}}
    asked = {"input": items, "previous_response_id": first["id"], "max_output_tokens": 2, "text": text}
    second = asking.generate(routes.RESPONSES, Script(text='{"city": "x"}'), **asked)
    members = [{"type": "custom", "name": "c"}, {"type": "function", "name": "f"}]
    for name, arguments in BUILT_IN.items():
        tool = {"type": name, "execution": "client"} if name == "tool_search" else {"type": name}
        tool = {"type": "namespace", "name": "s", "tools": members} if name.startswith("s__") else tool
        call = json.dumps({"name": name, "arguments": arguments})
        script = Script(text=f"<tool_call>\n{call}\n</tool_call>")
        third = asking.generate(routes.RESPONSES, script, input="Hi", tools=[tool])
        items = [*third["output"], {"role": "user", "content": "x"}]
        fourth = asking.ask(routes.RESPONSES, input=items)
        asking.ask(routes.RESPONSE_ITEMS, f"/v1/responses/{fourth['id']}/input_items")
    asking.ask(routes.RESPONSE_ITEMS, f"/v1/responses/{second['id']}/input_items?limit=100")
    asking.fail(routes.RESPONSES, input="Hi")
    asking.router.will(Script(text=TEXT, failure=FAILURE))
    failing = asking.ask(routes.RESPONSES, input="Hi", background=True)["id"]
    while asking.ask(routes.RESPONSE, f"/v1/responses/{failing}")["status"] in ("queued", "in_progress"):
        pass
    asking.router.will(Script(text=TEXT, ends=False))
    endless = asking.ask(routes.RESPONSES, input="Hi", background=True)["id"]
    asking.ask(routes.CANCEL_RESPONSE, f"/v1/responses/{endless}/cancel")
    asking.ask(routes.DELETE_RESPONSE, f"/v1/responses/{endless}")


def ask_the_operators_routes(asking: Asking) -> None:
    asking.router.stats = EngineStats(prefix_query_tokens=2, prefix_hit_tokens=1)
    asking.ask(routes.LOADS)
    asking.router.stats = EngineStats()
    for route in ROUTES:
        if route.method == "GET" and "{" not in route.path:
            asking.ask(route)
    asking.ask(routes.MODEL, f"/v1/models/{NAME}")
    asking.ask(routes.RESET_PREFIX_CACHE)
    asking.ask(routes.MODEL, "/v1/models/second")
    for route, path in ((routes.LOAD_MODEL, "load"), (routes.UNLOAD_MODEL, "unload")):
        asking.ask(route, f"/v1/models/second/{path}")
    asking.ask(routes.SLEEP)
    asking.ask(routes.MODEL, "/v1/models/second")
    asking.ask(routes.STATE)
    asking.ask(routes.WAKE_UP)
    asking.router.state = State.RECOVERING
    asking.ask(routes.READY)
    asking.router.fail("Its engines died.")
    asking.ask(routes.STATE)
    asking.router.state, asking.router.failure, asking.router.has_engine = State.STARTING, "", False
    asking.ask(routes.STATE)


def state_with_tenants(model: ServedModel, keys_file: Path) -> Any:
    """The `/state` of a server with a keys file."""
    append_entry(keys_file, entry_of(sha256=digest_of("alice").hex(), name="alice"))
    with serving(model, ScriptedRouter(model), app_settings(keys_file=keys_file)) as url:
        return httpx.get(f"{url}{routes.STATE.path}", timeout=WAIT_S).json()


def models_that_embed(model: ServedModel) -> Any:
    """The `/info` and `/api/tags` of a server whose model was made to embed."""
    embedder = replace(model, embeds=SentenceFolder())
    with serving(embedder, ScriptedRouter(embedder, num_labels=0), app_settings()) as url:
        return [
            httpx.get(f"{url}{route.path}", timeout=WAIT_S).json()
            for route in (embedding_routes.TEI_INFO, embedding_routes.OLLAMA_TAGS)
        ]


def metrics_of_a_step(router: ScriptedRouter) -> Metrics:
    """Metrics of a server whose last minute had a step."""
    metrics = Metrics(NAME)
    metrics.engine_ready(router.ready)
    step = StepOutput(deltas=(), stats=EngineStats(), step_phase="decode", step_own_s=0.01, step_flops=9, step_bytes=9)
    metrics.step(step)
    metrics.first_token(0.1)
    metrics.tokens(2, 0.02)
    return metrics


@pytest.fixture(scope="module")
def asked(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    """The answers of a model that reasons, and that calls as Hermes does."""
    served = replace(coder(model), format=detect(Clues(), "hermes", "think"))
    router = ScriptedRouter(served)
    settings = Settings(access_log=False, admin_key=(ADMIN,))
    headers = {"Authorization": f"Bearer {ADMIN}"}
    second = ScriptedRouter(replace(served, names=("second",)), State.FAILED, "It has a NaN.")
    others = [Backend(second.model, second, metrics_of_a_step(router), app_settings())]  # type: ignore[arg-type]
    with (
        serving(served, router, settings, metrics=metrics_of_a_step(router), others=others) as url,
        httpx.Client(base_url=url, timeout=WAIT_S, headers=headers) as http,
    ):
        asking = Asking(http, router)
        ask_for_chat(asking)
        ask_for_text(asking)
        ask_for_messages(asking)
        ask_for_responses(asking)
        ask_the_operators_routes(asking)
        asking.bodies[routes.STATE].append(state_with_tenants(model, tmp_path_factory.mktemp("keys") / "keys"))
        info, tags = models_that_embed(model)
        asking.bodies[embedding_routes.TEI_INFO].append(info)
        asking.bodies[embedding_routes.OLLAMA_TAGS].append(tags)
        yield asking


@pytest.fixture(scope="module")
def document(asked: Asking) -> dict[str, Any]:
    answer: dict[str, Any] = asked.bodies[routes.OPENAPI][0]
    return answer


def answers(asked: Asking) -> Iterator[tuple[Route, str, TypeAdapter[Any], list[Any]]]:
    """(route, media type, type, answers) of all bodies, and of all events."""
    for route, bodies in asked.bodies.items():
        yield route, "", TypeAdapter(route.answer), bodies
    for route, events in asked.events.items():
        yield route, "text/event-stream", TypeAdapter(route.events), events


@pytest.fixture(scope="module")
def validator(document: dict[str, Any]) -> Draft202012Validator:
    """A validator whose references lead into the document."""
    return Draft202012Validator(document)


def schema_in(document: dict[str, Any], route: Route, media: str) -> dict[str, Any]:
    operation = document["paths"][route.path.replace(":path}", "}")][route.method.lower()]
    content = operation["responses"]["200"]["content"]
    schema: dict[str, Any] = content[media or next(iter(content))]["schema"]
    return schema


def test_every_route_answers_what_it_says(
    asked: Asking, document: dict[str, Any], validator: Draft202012Validator
) -> None:
    # `tests/e2e/test_lora` asks these two: the server of this test has no room for adapters.
    asked_elsewhere = {routes.LOAD_LORA, routes.UNLOAD_LORA}
    assert set(asked.bodies) == {route for route in ROUTES if not route.missing} - asked_elsewhere
    assert set(asked.events) == {route for route in ROUTES if route.events is not None}
    for route, media, adapter, found in answers(asked):
        documented = validator.evolve(schema=schema_in(document, route, media))
        for answer in found:
            adapter.validate_python(answer, strict=True)
            if route not in routes.DOCS_FILES:
                documented.validate(answer)


def fields_in(validator: Draft202012Validator, schema: dict[str, Any], value: Any) -> Iterator[tuple[str, str]]:
    """(object of the document, field) of each field in `value`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = validator.schema["components"]["schemas"][name]
        yield from ((name, key) for key in value)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if validator.evolve(schema=option).is_valid(value):
            yield from fields_in(validator, option, value)
    if isinstance(value, list) and "items" in schema:
        for item in value:
            yield from fields_in(validator, schema["items"], item)
    if isinstance(value, dict):
        rest = schema.get("additionalProperties")
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, rest if isinstance(rest, dict) else {})
            yield from fields_in(validator, inner, item)


def test_every_documented_field_of_an_answer_is_real(
    asked: Asking, document: dict[str, Any], validator: Draft202012Validator
) -> None:
    requests = {route.fields.__name__ for route in ROUTES if route.fields is not None}
    told = {
        (name, key)
        for name, schema in document["components"]["schemas"].items()
        if name not in requests
        for key in schema.get("properties", ())
    }
    seen = {
        field
        for route, media, _, found in answers(asked)
        if route not in (routes.OPENAPI, routes.TOKENIZER_INFO, *routes.DOCS_FILES)
        for answer in found
        for field in fields_in(validator, schema_in(document, route, media), answer)
    }
    assert told <= seen, "documented, but in no answer"


def wrong(value: dict[str, Any], required: Collection[str]) -> Iterator[dict[str, Any]]:
    """Copies of an object with one key more, one key less, or one value of another type."""
    yield {**value, "planted": 1}
    for key in value:
        yield {**value, key: object()}
    for key in required:
        yield {other: value[other] for other in value if other != key}


def is_valid(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("route", "inner"),
    [
        (routes.CHAT, "usage"), (routes.COMPLETIONS, "usage"), (routes.RESPONSES, "reasoning"),
        (routes.MESSAGES, "usage"), (routes.EMBEDDINGS, "usage"), (routes.STATE, "kv_cache"),
        (routes.SCORES[0], "usage"), (routes.CLASSIFIES[0], "usage"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_seen(
    asked: Asking, document: dict[str, Any], validator: Draft202012Validator, route: Route, inner: str
) -> None:
    body = asked.bodies[route][0]
    documented = validator.evolve(schema=schema_in(document, route, ""))
    adapter = TypeAdapter(route.answer)
    assert is_valid(adapter, body) and documented.is_valid(body)
    required = document["components"]["schemas"][route.answer.__name__]["required"]
    inside = ({**body, inner: one} for one in wrong(body[inner], body[inner]))
    for planted in (*wrong(body, required), *inside):
        assert not is_valid(adapter, planted), planted
        assert not documented.is_valid(planted), planted


def test_a_route_names_its_answer() -> None:
    with pytest.raises(AssertionError, match="has an answer"):
        Route("GET", "/new", Access.KEY, Area.TOKENS, "A new route.", None)
    with pytest.raises(TypeError, match="answer"):
        Route("GET", "/new", Access.KEY, Area.TOKENS, "A new route.")  # type: ignore[call-arg]
