"""Every route there is, as data: method, path, who may call it, what it reads and what it is for.

The application, /openapi.json and the documentation are made from this table; a route that is not in it is not served.
"""

from __future__ import annotations

from starlette.routing import compile_path

from inferd.server.endpoints.body import ModelQuery, ResetQuery
from inferd.server.endpoints.embedding_routes import CATALOGS, IN_OTHER_FORMS
from inferd.server.endpoints.route import Access, Area, Route
from inferd.server.errors.table import Error
from inferd.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from inferd.server.schema.answers import (
    anthropic,
    embeddings,
    generation,
    infill,
    operation,
    response_events,
    responses,
    scores,
    tokens,
)
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.classes import ClassifyRequest, PredictRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.embeddings import EmbeddingRequest
from inferd.server.schema.infill import InfillRequest
from inferd.server.schema.responses import InputItemsQuery, ResponsesRequest, RetrieveQuery
from inferd.server.schema.scores import RerankRequest, ScoreRequest
from inferd.server.schema.sleep import SleepingQuery, SleepQuery, WakeQuery
from inferd.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

_GENERATE, _TOKENS, _MODELS = Area.GENERATING, Area.TOKENS, Area.MODELS
_OPERATE, _ADMIN = Area.OPERATION, Area.ADMINISTRATION

_NO_PROFILER = "This server has no profiler. /state and /metrics show how close the steps come to the device's peaks."

CHAT = Route(
    "POST",
    "/v1/chat/completions",
    Access.KEY,
    _GENERATE,
    "Answer a conversation, as a whole or as a stream.",
    generation.ChatCompletion,
    ChatRequest,
    events=generation.ChatCompletionChunk | Error,
    operation="chat",
)
CHAT_RENDER = Route(
    "POST",
    "/v1/chat/completions/render",
    Access.KEY,
    _GENERATE,
    'Show the prompt that the model would read, `{"token_ids": [...]}`, without generating.',
    tokens.RenderedPrompt,
    ChatRequest,
)
COMPLETIONS = Route(
    "POST",
    "/v1/completions",
    Access.KEY,
    _GENERATE,
    "Continue one text or several.",
    generation.Completion,
    CompletionRequest,
    events=generation.CompletionChunk | Error,
    operation="text_completion",
)
COMPLETIONS_RENDER = Route(
    "POST",
    "/v1/completions/render",
    Access.KEY,
    _GENERATE,
    'Show the prompts that the model would read, one `{"token_ids": [...]}` each.',
    list[tokens.RenderedPrompt],
    CompletionRequest,
)
INFILL = Route(
    "POST",
    "/infill",
    Access.KEY,
    _GENERATE,
    "Fill the gap between two texts, as editors ask llama.cpp's server.",
    infill.Infill | list[infill.Infill],
    InfillRequest,
    events=infill.InfillChunk | infill.Infill | Error,
    operation="text_completion",
)
MESSAGES = Route(
    "POST",
    "/v1/messages",
    Access.KEY,
    _GENERATE,
    "Answer a conversation, in the format of Anthropic's API.",
    anthropic.Message,
    MessagesRequest,
    events=anthropic.StreamedEvent,
    operation="chat",
)
COUNT_TOKENS = Route(
    "POST",
    "/v1/messages/count_tokens",
    Access.KEY,
    _TOKENS,
    'Count the tokens that `/v1/messages` would read, `{"input_tokens": n}`.',
    tokens.TokenCount,
    CountTokensRequest,
)
EMBEDDINGS = Route(
    "POST", "/v1/embeddings", Access.KEY, _GENERATE, "Turn texts into vectors.",
    embeddings.Embeddings, EmbeddingRequest, operation="embeddings",
)  # fmt: skip
RERANKS = tuple(
    Route(
        "POST", path, Access.KEY, _GENERATE,
        "Sort documents by how well they answer a query, as Cohere, Jina, vLLM and text-embeddings-inference do.",
        scores.Reranked | list[scores.Rank], RerankRequest, operation="rerank",
    )
    for path in ("/v1/rerank", "/v2/rerank", "/rerank")
)  # fmt: skip
SCORES = tuple(
    Route(
        "POST", path, Access.KEY, _GENERATE, "Score pairs of texts, as vLLM does.",
        scores.Scores, ScoreRequest, operation="score",
    )
    for path in ("/v1/score", "/score")
)  # fmt: skip
CLASSIFIES = tuple(
    Route(
        "POST", path, Access.KEY, _GENERATE, "Classify texts, as vLLM does.",
        scores.Classified, ClassifyRequest, operation="classify",
    )
    for path in ("/v1/classify", "/classify")
)  # fmt: skip
PREDICT = Route(
    "POST", "/predict", Access.KEY, _GENERATE, "Classify texts and pairs, as text-embeddings-inference does.",
    list[scores.Prediction] | list[list[scores.Prediction]], PredictRequest, operation="classify",
)  # fmt: skip
RESPONSES = Route(
    "POST",
    "/v1/responses",
    Access.KEY,
    _GENERATE,
    "Answer a conversation, as a whole, as a stream or in the background.",
    responses.ResponseObject,
    ResponsesRequest,
    events=response_events.StreamedEvent,
    operation="chat",
)
RESPONSE = Route(
    "GET",
    "/v1/responses/{response_id}",
    Access.KEY,
    _GENERATE,
    "Get a stored response.",
    responses.ResponseObject,
    query=RetrieveQuery,
)
DELETE_RESPONSE = Route(
    "DELETE",
    "/v1/responses/{response_id}",
    Access.KEY,
    _GENERATE,
    "Delete a response, and cancel it if it runs.",
    responses.DeletedResponse,
)
CANCEL_RESPONSE = Route(
    "POST",
    "/v1/responses/{response_id}/cancel",
    Access.KEY,
    _GENERATE,
    "Cancel a response that runs in the background.",
    responses.ResponseObject,
)
RESPONSE_ITEMS = Route(
    "GET",
    "/v1/responses/{response_id}/input_items",
    Access.KEY,
    _GENERATE,
    "List the items before a response's output.",
    responses.InputItemList,
    query=InputItemsQuery,
)
TOKENIZE = Route(
    "POST",
    "/tokenize",
    Access.KEY,
    _TOKENS,
    "Get the token ids of a text or a conversation.",
    tokens.Tokenized,
    TokenizeRequest,
)
DETOKENIZE = Route(
    "POST", "/detokenize", Access.KEY, _TOKENS, "Get the text of token ids.", tokens.Detokenized, DetokenizeRequest
)
TOKENIZER_INFO = Route(
    "GET",
    "/tokenizer_info",
    Access.KEY,
    _TOKENS,
    "Get the checkpoint's tokenizer configuration, chat template included.",
    dict[str, object],
    query=ModelQuery,
)
MODELS = Route(
    "GET",
    "/v1/models",
    Access.KEY,
    _MODELS,
    "List the names of each served model and its adapters, with its context length.",
    operation.ModelList,
)
MODEL = Route("GET", "/v1/models/{model_id:path}", Access.KEY, _MODELS, "Get one of them.", operation.Model)
LOAD_MODEL = Route(
    "POST",
    "/v1/models/{model_id:path}/load",
    Access.ADMIN,
    _ADMIN,
    "Load a model that was unloaded, is asleep, or failed. Answers when it takes requests.",
    operation.Model,
)
UNLOAD_MODEL = Route(
    "POST",
    "/v1/models/{model_id:path}/unload",
    Access.ADMIN,
    _ADMIN,
    "Stop a model's engine and free its memory. A 409 if it has requests. The next request loads it again.",
    operation.Model,
)
HEALTH = Route(
    "GET",
    "/health",
    Access.PUBLIC,
    _OPERATE,
    "200 if the server accepts requests, otherwise 503, also after SIGTERM. Says `recovering` between engines.",
    operation.Readiness,
)
READY = Route("GET", "/ready", Access.PUBLIC, _OPERATE, "The same as `/health`.", operation.Readiness)
LIVE = Route("GET", "/live", Access.PUBLIC, _OPERATE, "200 as long as the server process answers.", operation.Liveness)
VERSION = Route("GET", "/version", Access.PUBLIC, _OPERATE, "The version of inferd.", operation.Version)
METRICS = Route("GET", "/metrics", Access.PUBLIC, _OPERATE, "Prometheus metrics.", str)
STATE = Route(
    "GET",
    "/state",
    Access.PUBLIC,
    _OPERATE,
    "What runs and waits, and how well the device is used.",
    operation.State,
)
LOADS = Route(
    "GET",
    "/v1/loads",
    Access.PUBLIC,
    _OPERATE,
    "Load of each replica of a model, as SGLang's gateway reads it.",
    operation.Loads,
    query=ModelQuery,
)
SERVER_INFO = Route(
    "GET",
    "/server_info",
    Access.PUBLIC,
    _OPERATE,
    "What is served, for gateways.",
    operation.ServerInfo,
    query=ModelQuery,
)
MODEL_INFO = Route(
    "GET",
    "/model_info",
    Access.PUBLIC,
    _OPERATE,
    "The model's kind, for gateways.",
    operation.ModelInfo,
    query=ModelQuery,
)
PROPS = Route(
    "GET",
    "/props",
    Access.KEY,
    _MODELS,
    "Properties of a model: context, chat template, default sampling. In the form of llama.cpp's server.",
    infill.Props,
    query=ModelQuery,
)
OPENAPI = Route("GET", "/openapi.json", Access.PUBLIC, _OPERATE, "This interface as OpenAPI 3.1.", dict[str, object])
DOCS = Route("GET", "/docs", Access.PUBLIC, _OPERATE, "This interface as a page to read and to try.", str)
DOCS_FILES = tuple(
    Route("GET", f"/docs/{name}", Access.PUBLIC, _OPERATE, "A file of that page.", bytes)
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
)
"""One row a file, because public paths are compared whole."""
CONFIG = Route(
    "GET",
    "/config",
    Access.ADMIN,
    _ADMIN,
    "Every setting with its value, its source, and the value in use.",
    operation.Config,
)
RESET_PREFIX_CACHE = Route(
    "POST",
    "/reset_prefix_cache",
    Access.ADMIN,
    _ADMIN,
    "Clear the prefix cache, except prefixes that running requests use.",
    operation.Done,
    query=ResetQuery,
)
LOAD_LORA = Route(
    "POST",
    "/v1/load_lora_adapter",
    Access.ADMIN,
    _ADMIN,
    "Load a LoRA adapter from a directory of the server, and serve it under its name.",
    str,
    LoadAdapterRequest,
)
UNLOAD_LORA = Route(
    "POST",
    "/v1/unload_lora_adapter",
    Access.ADMIN,
    _ADMIN,
    "Unload a LoRA adapter. Requests that use it finish, and new ones get a 404.",
    str,
    UnloadAdapterRequest,
)
SLEEP = Route(
    "POST",
    "/sleep",
    Access.ADMIN,
    _ADMIN,
    "Put one model or all to sleep: stop the engines, and refuse requests until `/wake_up`.",
    operation.Done,
    query=SleepQuery,
)
WAKE_UP = Route(
    "POST",
    "/wake_up",
    Access.ADMIN,
    _ADMIN,
    "Wake one model or all. Answers when requests are taken.",
    operation.Done,
    query=WakeQuery,
)
IS_SLEEPING = Route(
    "GET",
    "/is_sleeping",
    Access.PUBLIC,
    _OPERATE,
    "Whether a model is asleep, or all of them.",
    operation.Sleeping,
    query=SleepingQuery,
)
# No key opens these: they ask for an admin key least of all.
START_PROFILE = Route("POST", "/start_profile", Access.KEY, _ADMIN, "Start a profile.", None, missing=_NO_PROFILER)
STOP_PROFILE = Route("POST", "/stop_profile", Access.KEY, _ADMIN, "Stop the profile.", None, missing=_NO_PROFILER)

ROUTES = (
    CHAT, CHAT_RENDER, COMPLETIONS, COMPLETIONS_RENDER, INFILL, MESSAGES, COUNT_TOKENS,
    RESPONSES, RESPONSE, DELETE_RESPONSE, CANCEL_RESPONSE, RESPONSE_ITEMS,
    EMBEDDINGS, *IN_OTHER_FORMS, *RERANKS, *SCORES, *CLASSIFIES, PREDICT, TOKENIZE, DETOKENIZE, TOKENIZER_INFO, MODELS,
    MODEL, PROPS, *CATALOGS,
    HEALTH, READY, LIVE, VERSION, METRICS, STATE,
    LOADS, SERVER_INFO, MODEL_INFO, OPENAPI, DOCS, *DOCS_FILES, CONFIG, RESET_PREFIX_CACHE,
    LOAD_MODEL, UNLOAD_MODEL, LOAD_LORA, UNLOAD_LORA, SLEEP, WAKE_UP, IS_SLEEPING, START_PROFILE, STOP_PROFILE,
)  # fmt: skip

PLAYGROUND = Route("GET", "/", Access.PUBLIC, _OPERATE, "A page to chat with the model and to watch the engine.", str)
PLAYGROUND_FILES = tuple(
    Route("GET", f"/playground/{name}", Access.PUBLIC, _OPERATE, "A file of that page.", bytes)
    for name in (
        "app.js", "api.js", "ask.js", "conversation.js", "answer.js", "markdown.js", "formatter.js", "parser.js",
        "tokens.js", "compare.js", "options.js", "engine.js", "neighbours.js", "vectors.js", "page.css", "icon.svg",
        "preact.js", "marked.js", "purify.js",
    )
)  # fmt: skip
PAGE = (PLAYGROUND, *PLAYGROUND_FILES)
"""The page at / and its files. They are no part of the interface, so /openapi.json does not list them."""

_PATTERNS = tuple((compile_path(route.path)[0], route) for route in ROUTES + PAGE)


def methods_of(path: str) -> list[str]:
    """The methods of a path in alphabetical order. A path with GET also has HEAD. A model's id may have slashes, so
    `/v1/models/a/load` is also the path of a model: then only the routes of the longest template count."""
    matching = [route for pattern, route in _PATTERNS if pattern.match(path)]
    longest = max((len(route.path) for route in matching), default=0)
    found = {route.method for route in matching if len(route.path) == longest}
    return sorted(found | ({"HEAD"} if "GET" in found else set()))
