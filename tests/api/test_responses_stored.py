"""Stored responses of /v1/responses: continue, list, cancel and delete; keys, limits and background jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import openai
import pytest

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.engine.api.wire.messages import Failure
from inferd.server.config.settings import Settings
from inferd.server.endpoints.responses.background import Background, Job, RunningResponse
from inferd.server.errors.messages import internal_error
from tests.api.conftest import app_settings

from .conftest import ScriptedRouter, serving
from .test_responses import CALL, WEATHER, prompt_of, wait_for

Serve = Callable[[Settings], str]
GO_ON: Any = {"role": "user", "content": "Go on."}


def test_a_conversation_goes_on(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="Hello Ada."), script(text="Ada, you said."))
    first = client.responses.create(model="tiny", input="I am Ada.", instructions="Be brief.")
    second = client.responses.create(model="tiny", input="Who am I?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert prompt_of(router) == (
        "<|im_start|>user\nI am Ada.<|im_end|>\n<|im_start|>assistant\nHello Ada.<|im_end|>\n"
        "<|im_start|>user\nWho am I?<|im_end|>\n<|im_start|>assistant\n"
    ), "instructions are not carried over"
    client.responses.delete(first.id)
    client.responses.create(model="tiny", input="Again?", previous_response_id=second.id)
    assert "I am Ada." in prompt_of(router), "a response holds its own history"
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == ["message"] * 3


def test_a_call_is_answered_by_its_output_alone(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=f"I look.\n{CALL}"), script(text="18 C."))
    first = client.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
    [call] = [item for item in first.output if item.type == "function_call"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}]
    second = client.responses.create(model="tiny", input=output, tools=[WEATHER], previous_response_id=first.id)
    assert second.output_text == "18 C."
    assert f"I look.\n{CALL}<|im_end|>\n" in prompt_of(router)
    asked: Any = {"role": "user", "content": "Weather?"}
    dumped: Any = [item.model_dump() for item in first.output]
    referred: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    for answered in (first.output, dumped, referred):
        client.responses.create(model="tiny", input=[asked, *answered, *output], tools=[WEATHER])
        assert router.submits[-1].prompt_ids == router.submits[1].prompt_ids


def test_a_call_that_was_cut_off_can_be_continued(client: openai.OpenAI, router: Any, script: Any) -> None:
    """The model reads what it wrote of it."""
    router.will(script(text=CALL))
    num_tokens = len(router.model.tokenizer.encode(CALL.partition("Par")[0], False))
    first = client.responses.create(model="tiny", input="?", tools=[WEATHER], max_output_tokens=num_tokens)
    assert (first.status, first.output[0].type) == ("incomplete", "function_call")
    begun = first.output[0].arguments
    assert begun and not begun.endswith("}")
    client.responses.create(model="tiny", input="Go on.", previous_response_id=first.id)
    by_reference = router.submits[-1].prompt_ids
    client.responses.create(model="tiny", input=[{"role": "user", "content": "?"}, first.output[0], GO_ON])
    assert router.submits[-1].prompt_ids == by_reference
    assert begun in router.model.tokenizer.decode(by_reference, skip_special=False)


def test_input_items_are_listed_in_pages(client: openai.OpenAI, http: httpx.Client) -> None:
    given: Any = [{"role": "user", "content": f"{i}", "id": f"msg_{i}"} for i in range(25)]
    answer = client.responses.create(model="tiny", input=given)
    listed = client.responses.input_items.list
    assert [item.id for item in listed(answer.id)] == [f"msg_{i}" for i in reversed(range(25))], "pages follow pages"
    page = listed(answer.id, limit=3, order="asc", after="msg_4")
    assert [item.id for item in page.data] == ["msg_5", "msg_6", "msg_7"]
    assert page.has_more
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"),
                         ("after=msg_99", "after"), ("before=x", "before")):  # fmt: skip
        response = http.get(f"/v1/responses/{answer.id}/input_items?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_the_query_of_a_get(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.create(model="tiny", input="x")
    assert client.responses.retrieve(answer.id, include=["message.output_text.logprobs"]).id == answer.id
    assert http.get(f"/v1/responses/{answer.id}?stream=false").status_code == 200
    for query, param in (("stream=true", "stream"), ("starting_after=3", "starting_after"), ("x=1", "x")):
        response = http.get(f"/v1/responses/{answer.id}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="x", store=False)
    assert (answer.model_extra or {})["store"] is False
    with pytest.raises(openai.NotFoundError, match="not found") as caught:
        client.responses.retrieve(answer.id)
    assert caught.value.code == "response_not_found"


def test_deleting(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.create(model="tiny", input="x")
    deleted = http.delete(f"/v1/responses/{answer.id}")
    assert deleted.json() == {"id": answer.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


def test_a_path_is_refused_with_every_method_that_it_has(http: httpx.Client) -> None:
    response = http.put("/v1/responses/resp_1")
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


def test_a_key_sees_its_own_alone(serve: Serve, router: Any) -> None:
    url = serve(app_settings(api_key=("a", "b"), access_log=False))
    ours, theirs = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) for key in ("a", "b"))
    given: Any = [{"role": "user", "content": "secret", "id": "msg_secret"}]
    answer = ours.responses.create(model="tiny", input=given)
    router.reset()
    attempts: list[Callable[[], Any]] = [
        lambda: theirs.responses.retrieve(answer.id),
        lambda: theirs.responses.delete(answer.id),
        lambda: theirs.responses.cancel(answer.id),
        lambda: theirs.responses.input_items.list(answer.id),
        lambda: theirs.responses.create(model="tiny", input="x", previous_response_id=answer.id),
        lambda: theirs.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_secret"}]),
    ]
    for attempt in attempts:
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as caught:
            attempt()
        assert caught.value.code in ("response_not_found", "previous_response_not_found", "invalid_value")
    assert router.submits == []
    assert ours.responses.retrieve(answer.id).id == answer.id


def test_a_server_that_keeps_nothing(serve: Serve) -> None:
    url = serve(app_settings(stored_responses=0, access_log=False))
    answer = httpx.post(f"{url}/v1/responses", json={"input": "x"}).json()
    assert (answer["status"], answer["store"]) == ("completed", False)
    refused = httpx.post(f"{url}/v1/responses", json={"input": "x", "background": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert "--stored-responses" in refused.json()["error"]["message"]


def test_many_at_once_are_kept_apart(url: str, router: Any, script: Any) -> None:
    """Sixteen chains of three at the same time, some deleted meanwhile. Each sees only its own history."""

    async def chain(client: openai.AsyncOpenAI, i: int) -> None:
        previous: Any = openai.omit
        for turn in range(3):
            asked: Any = {"model": "tiny", "input": f"<{i}:{turn}>", "previous_response_id": previous}
            if turn == 1:
                *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
                answer = last.response
            else:
                answer = await client.responses.create(**asked)
            previous = answer.id
        listed = [item async for item in await client.responses.input_items.list(previous, order="asc")]
        said = [item.content[0].text for item in listed if getattr(item, "role", "") == "user"]
        assert said == [f"<{i}:{turn}>" for turn in range(3)]
        await client.responses.delete(previous)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(previous)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
            await asyncio.gather(*(chain(client, i) for i in range(16)))

    router.will(script(text="Yes.", cuts=(1,)))
    asyncio.run(run())


def test_what_runs_in_the_background_is_seen_and_cancelled(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="One two", ends=False))
    answer = client.responses.create(model="tiny", input="x", background=True)
    assert (answer.status, answer.output, answer.usage) == ("queued", [], None)
    for _ in range(1_000):
        seen = client.responses.retrieve(answer.id)
        if seen.status == "in_progress":
            break
    assert (seen.status, seen.output) == ("in_progress", [])
    with pytest.raises(openai.BadRequestError, match="in_progress") as caught:
        client.responses.create(model="tiny", input="y", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"
    assert len(client.responses.input_items.list(answer.id).data) == 1
    cancelled = client.responses.cancel(answer.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text in ("One two", "One")
    router.wait_for(lambda: len(router.aborted) == 1)
    assert client.responses.retrieve(answer.id).status == "cancelled"
    assert client.responses.cancel(answer.id).status == "cancelled", "once more is no mistake"


def test_what_was_answered_at_once_cannot_be_cancelled(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(answer.id)


def test_deleting_ends_what_runs(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(ends=False))
    answer = client.responses.create(model="tiny", input="x", background=True)
    client.responses.delete(answer.id)
    router.wait_for(lambda: len(router.aborted) == 1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize(
    ("failing", "code", "words"),
    [
        ({"failure": Failure("numerical_error", "Not finite.")}, "server_error", "Not finite."),
        ({"failure": Failure("slow_down", "Too much.")}, "rate_limit_exceeded", "Too much."),
        ({"dies": True}, "server_error", "engine stopped"),
        ({"breaks": True}, "server_error", "had an error"),
    ],
)
def test_a_failure_in_the_background(
    client: openai.OpenAI, router: Any, script: Any, failing: Any, code: str, words: str
) -> None:
    router.will(script(text="One two", **failing))
    answer = wait_for(client, client.responses.create(model="tiny", input="x", background=True).id)
    assert (answer.status, answer.error.code) == ("failed", code)
    assert words in answer.error.message
    assert "/secret" not in answer.model_dump_json()


def test_a_deadline_in_the_background(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(ends=False))
    asked = client.responses.create(model="tiny", input="x", background=True, extra_body={"timeout": 0.05})
    answer = wait_for(client, asked.id)
    assert answer.status == "failed"
    assert answer.error is not None
    assert "timeout" in answer.error.message


def test_only_so_many_run_in_the_background(serve: Callable[..., str], router: Any, script: Any) -> None:
    """Counts the responses of one key. Those of other keys do not count."""
    router.will(script(ends=False))
    url = serve(app_settings(api_key=("sk-1", "sk-2"), access_log=False))
    one, other = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("sk-1", "sk-2"))
    with ThreadPoolExecutor(8) as pool:
        running = list(pool.map(lambda _: one.responses.create(model="tiny", input="x", background=True), range(100)))
        with pytest.raises(openai.RateLimitError) as caught:
            one.responses.create(model="tiny", input="x", background=True)
        assert caught.value.code == "slow_down"
        beside = other.responses.create(model="tiny", input="x", background=True)
        assert other.responses.cancel(beside.id).status == "cancelled"
        assert one.responses.cancel(running[0].id).status == "cancelled"
        running[0] = one.responses.create(model="tiny", input="x", background=True)
        statuses = set(pool.map(lambda response: one.responses.cancel(response.id).status, running))
    assert statuses == {"cancelled"}


def test_only_so_many_of_all_keys_run_in_the_background(
    serve: Callable[..., str], router: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.server.endpoints.responses.background.MAX_RUNNING_IN_ALL", 2)
    router.will(script(ends=False))
    url = serve(app_settings(api_key=("sk-1", "sk-2"), access_log=False))

    def ask(key: str) -> httpx.Response:
        body = {"input": "x", "background": True}
        return httpx.post(f"{url}/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"})

    assert [ask(key).status_code for key in ("sk-1", "sk-1", "sk-2")] == [200, 200, 503]


def test_responses_in_the_background_hold_only_so_many_bytes(
    serve: Callable[..., str], router: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that the model does not read count too, such as reasoning without an answer."""
    monkeypatch.setattr("inferd.server.endpoints.responses.background.MAX_RUNNING_BYTES", 300_000)
    monkeypatch.setattr("inferd.server.endpoints.responses.background.MAX_RUNNING_BYTES_IN_ALL", 500_000)
    router.will(script(ends=False))
    url = serve(app_settings(api_key=("sk-1", "sk-2", "sk-3"), access_log=False))

    def ask(key: str, num_chars: int) -> httpx.Response:
        thought = {"type": "reasoning_text", "text": "x" * num_chars}
        items = [{"type": "reasoning", "summary": [], "content": [thought]}, {"role": "user", "content": "x"}]
        body = {"input": items, "background": True}
        return httpx.post(f"{url}/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"})

    first = ask("sk-1", 200_000)
    assert first.status_code == 200, "one that runs alone may have any size"
    assert [ask("sk-1", 1_000).json()["error"]["code"], ask("sk-2", 10_000).status_code] == ["slow_down", 200]
    assert ask("sk-3", 100_000).status_code == 503
    headers = {"Authorization": "Bearer sk-1"}
    httpx.post(f"{url}/v1/responses/{first.json()['id']}/cancel", headers=headers).raise_for_status()
    assert [ask(key, 100_000).status_code for key in ("sk-1", "sk-3")] == [200, 200]


def test_a_router_that_refuses_leaves_nothing_behind(client: openai.OpenAI, router: Any) -> None:
    router.refusal = RequestError("server_is_overloaded", "Full.")
    for _ in range(101):
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="tiny", input="x", background=True)


def test_a_server_that_ends_ends_what_runs(model: Any, script: Any) -> None:
    router = ScriptedRouter(model)
    router.will(script(ends=False))
    with serving(model, router, app_settings(access_log=False)) as url:
        assert httpx.post(f"{url}/v1/responses", json={"input": "x", "background": True}).json()["status"] == "queued"
    assert len(router.aborted) == 1


class FaultyResponse:
    """A response that contradicts its events."""

    id = "resp_1"

    def __init__(self, *, fails: bool) -> None:
        self.ends: list[str] = []
        self._fails = fails

    def finish(self) -> None:
        raise RuntimeError("a fault of ours")

    def fail(self, error: RequestError | EngineDeadError) -> None:
        self.ends.append(str(error))
        if not self._fails:
            raise RuntimeError("another")


@pytest.mark.parametrize("fails", [True, False])
def test_one_that_cannot_be_finished_has_failed_and_is_kept_however(fails: bool) -> None:
    """A client that finds it in the store does not see it as still running."""

    async def no_events() -> AsyncGenerator[Any, None]:
        for event in ():
            yield event

    kept = asyncio.Event()
    response = FaultyResponse(fails=fails)

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
        nothing = cast("Any", lambda: None)
        job = Job(
            tenant="",
            response=cast("RunningResponse", response),
            events=no_events(),
            close=nothing,
            snapshot=nothing,
            keep=kept.set,
            num_bytes=1,
        )
        Background().start(job)
        await asyncio.wait_for(kept.wait(), 20)

    asyncio.run(scene())
    assert response.ends == [str(internal_error())]


def test_long_conversations_are_put_together_off_the_loop(client: openai.OpenAI, router: Any) -> None:
    """The result is the same on a thread and on the event loop, which handles short ones."""
    given: Any = [{"role": "user", "content": "x", "id": f"msg_{i}"} for i in range(1_000)]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model="tiny", input=given)
    wide: Any = [{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": [], "content": [
        {"type": "reasoning_text", "text": "long " * 20_000}]}]  # fmt: skip
    first = client.responses.create(model="tiny", input=wide)
    second = client.responses.create(model="tiny", input="Again", previous_response_id=first.id)
    assert len(client.responses.input_items.list(second.id).data) == 4
    listed = client.responses.input_items.list(second.id, order="asc").data
    referred: Any = [{"type": "item_reference", "id": item.id} for item in listed]
    client.responses.create(model="tiny", input=referred)
    assert router.submits[-1].prompt_ids == router.submits[-2].prompt_ids
