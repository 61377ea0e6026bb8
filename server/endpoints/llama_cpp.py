"""/infill and /props, by which editors and tools of llama.cpp's server use this one.

The formats are that server's, as its own extensions of Vim and VS Code read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.chunks import AnswerOptions
from inferd.server.endpoints.respond import admit, respond, while_asked
from inferd.server.endpoints.service import Services
from inferd.server.errors import table
from inferd.server.generate.events import ChoiceResult, Event, Finished, ResultBuilder, TextDelta
from inferd.server.generate.request import GenerateRequest, choice_seed
from inferd.server.schema.answers.generation import Extra, RequestTiming
from inferd.server.schema.answers.infill import Infill, InfillChunk, InfillHead, InfillSettings, InfillTimings, Props
from inferd.server.schema.infill import InfillRequest
from inferd.server.transport import sse


class LlamaCppApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def infill(self, request: Request, body: Annotated[InfillRequest, body_of(InfillRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.generating(body.model)
        name = service.intake.check_model(body.model)
        caller = admit(request, service, body.timeout, body.n_cmpl or 1)
        accepted, is_cut = await while_asked(request, caller.deadline, service.intake.infill(body, caller))
        service.metrics.request_arrived("infill")
        options = AnswerOptions(
            name=name,
            is_stream=bool(body.stream),
            include_usage=False,
            continuous_usage=False,
            return_token_ids=bool(body.return_tokens),
            num_prompt_logprobs=None,
            include_metrics=True,
        )
        rendering = InfillRendering(accepted, options, body, is_cut=is_cut)
        return await respond(request, service, accepted, options, rendering)

    async def props(self, request: Request) -> Response:
        """Raises `RequestError`, and `EngineDeadError` before the first engine is ready."""
        service = self._services.of_query(request)
        model = service.model
        special, defaults = model.tokenizer.special_tokens, model.defaults
        answer: Props = {
            "default_generation_settings": {
                "n_ctx": model.max_model_len,
                "params": {
                    "temperature": defaults.temperature,
                    "top_k": defaults.top_k,
                    "top_p": defaults.top_p,
                    "min_p": defaults.min_p,
                    "repeat_penalty": defaults.repetition_penalty,
                },
            },
            "total_slots": service.router.replicas.ready.max_num_seqs,
            "model_alias": model.names[0],
            "model_path": model.path.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": model.template.source if model.template else "",
            "bos_token": str(special.get("bos_token") or ""),
            "eos_token": str(special.get("eos_token") or ""),
            "build_info": f"inferd {service.version}",
        }
        return Response(orjson.dumps(answer), media_type="application/json")


class InfillRendering:
    """Writes a filled gap, as a stream or as a whole."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, accepted: GenerateRequest, options: AnswerOptions, body: InfillRequest, *, is_cut: bool) -> None:
        """`is_cut`: whether the prompt leaves a part of the caller's texts out."""
        self._accepted, self._options, self._body, self._is_cut = accepted, options, body, is_cut
        self._builder = ResultBuilder(accepted)
        self._num_output = [0] * accepted.num_choices

    def begin(self) -> bytes:
        """Nothing, because the first chunk has the first text."""
        return b""

    def event(self, event: Event) -> bytes:
        self.add(event)
        if not isinstance(event, TextDelta) or not (event.text or event.token_ids):
            return b""
        self._num_output[event.choice] += len(event.token_ids)
        head = self._head(event.choice, event.text, event.token_ids, self._num_output[event.choice])
        chunk: InfillChunk = {**head, "stop": False}
        return sse.event(orjson.dumps(chunk))

    def end(self, extra: Extra) -> bytes:
        ends = (
            self._answer(result, self._head(i, "", (), len(result.token_ids)), extra)
            for i, result in enumerate(self._builder.results())
        )
        return b"".join(sse.event(orjson.dumps(end)) for end in ends)

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        return sse.event(orjson.dumps(table.body_of(error)))

    def add(self, event: Event) -> None:
        assert isinstance(event, TextDelta | Finished), "a filled gap is one text"
        self._builder.add(event)

    def plain(self, extra: Extra) -> object:
        answers = []
        for i, result in enumerate(self._builder.results()):
            token_ids = result.token_ids if self._options.return_token_ids else ()
            head = self._head(i, result.text, token_ids, len(result.token_ids))
            answers.append(self._answer(result, head, extra))
        return answers[0] if len(answers) == 1 else answers

    def _head(self, index: int, content: str, token_ids: Sequence[int], num_output: int) -> InfillHead:
        return {
            "index": index,
            "content": content,
            "tokens": token_ids,
            "id_slot": 0,
            "tokens_predicted": num_output,
            "tokens_evaluated": self._accepted.num_prompt_tokens,
        }

    def _answer(self, result: ChoiceResult, head: InfillHead, extra: Extra) -> Mapping[str, object]:
        accepted, num_output = self._accepted, len(result.token_ids)
        is_word = isinstance(result.stop_reason, str) and result.reason == "stop"
        timing = extra.get("metrics")
        answer: Infill = {
            **head,
            "stop": True,
            "model": self._options.name,
            "generation_settings": self._settings(head["index"]),
            "prompt": accepted.prompts[0].text or "",
            "has_new_line": "\n" in result.text,
            "truncated": self._is_cut,
            "stop_type": "word" if is_word else _STOP_TYPES.get(result.reason, "none"),
            "stopping_word": str(result.stop_reason) if is_word else "",
            # The last token was drawn, and no step has read it.
            "tokens_cached": accepted.num_prompt_tokens + max(0, num_output - 1),
            "timings": timing and _timings(accepted.num_prompt_tokens, result.num_cached_tokens, num_output, timing),
        }
        names = self._body.response_fields
        return picked(answer, names) if names else answer

    def _settings(self, index: int) -> InfillSettings:
        accepted, params, prompt = self._accepted, self._accepted.params, self._accepted.prompts[0]
        return {
            "n_predict": prompt.max_tokens,
            "max_tokens": prompt.max_tokens,
            "seed": choice_seed(params.seed, index) if index else accepted.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": self._body.stop or (),
            "ignore_eos": bool(self._body.ignore_eos),
            "stream": self._options.is_stream,
        }


_STOP_TYPES: Any = {"stop": "eos", "length": "limit"}


def _timings(num_prompt: int, num_cached: int, num_output: int, timing: RequestTiming) -> InfillTimings:
    prompt_ms, predicted_ms = timing["time_to_first_token_ms"] or 0.0, timing["generation_time_ms"] or 0.0
    num_computed = num_prompt - num_cached
    return {
        "cache_n": num_cached,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / num_computed if num_computed else 0.0,
        "prompt_per_second": 1e3 * num_computed / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_output,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / num_output if num_output else 0.0,
        "predicted_per_second": 1e3 * num_output / predicted_ms if predicted_ms else 0.0,
    }


def picked(answer: Mapping[str, Any], names: Sequence[str]) -> dict[str, object]:
    """The fields with these names, each under its name. `a/b` is field b of field a. Unknown names are left out."""
    found: dict[str, object] = {}
    for name in names:
        value: Any = answer
        for key in name.split("/"):
            value = value.get(key, _NOTHING) if isinstance(value, Mapping) else _NOTHING
        if value is not _NOTHING:
            found[name] = value
    return found


_NOTHING = object()
