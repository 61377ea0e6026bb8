"""Chat templates are rendered in processes that are bounded, may be killed, and give what rendering here would give."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.api.errors import RequestError, StartError
from inferd.server.errors import table
from inferd.server.generate.prompts import PromptReader
from inferd.server.text import render_workers, rendering
from inferd.server.text.model import ServedModel
from inferd.server.text.render_wire import Limits, RenderQuestion, frame_of, read_question
from inferd.server.text.render_workers import OvertimeError, RenderError, RenderProcess, render_process
from inferd.server.text.template import SLOW, ChatTemplate, Conversation, RenderPool
from inferd.server.text.text_threads import TextThreads
from tests.security.hostile_templates import CALM, HOSTILE
from tests.unit.test_harmony import TEMPLATE as HARMONY
from tests.unit.tool_samples import TOOLS

TINY = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
SAY = {"role": "user", "content": "hi"}
BUSY = "{% for a in range(60) %}{% for b in range(50000) %}{% endfor %}{% endfor %}done"
"""Takes about 0.1 s."""
WAIT_S = 60.0


def question(*messages: dict[str, Any], **fields: Any) -> RenderQuestion:
    tools = fields.pop("tools", None)
    return RenderQuestion(SLOW, messages, tools, fields.pop("documents", None), True, False, fields)


def through(template: ChatTemplate, asked: RenderQuestion) -> str:
    """Rendered by a worker."""
    made = Conversation(asked.messages, asked.tools, kwargs=asked.kwargs, documents=asked.documents)
    return template.render(made)


# -- equality ----------------------------------------------------------------------------------------------------------

CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "f", "arguments": {"a": "\u00e9", "n": [1.5, None]}},
}
TALK = (
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "<|im_start|>\u65e5\u672c \U0001f600 </s>"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "7"},
)
DUMP = "{{ messages }}|{{ messages | tojson }}|{{ tools }}|{{ documents }}|{{ switch }}|{{ bos_token }}"


@pytest.mark.parametrize("source", ["tiny", HARMONY, DUMP], ids=["tiny", "harmony", "dump"])
@pytest.mark.parametrize("tools", [None, list(TOOLS)], ids=["", "tools"])
@pytest.mark.parametrize("num_messages", [2, 4])
def test_a_worker_renders_what_this_process_would(source: str, tools: Any, num_messages: int) -> None:
    if source == "tiny":
        source = (
            json.loads((TINY / "tokenizer_config.json").read_text()).get("chat_template")
            or (TINY / "chat_template.jinja").read_text()
        )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    asked = question(*TALK[:num_messages], tools=tools, switch=False)
    assert through(template, asked) == rendering.render(template.program, asked) != ""


@pytest.fixture(scope="module")
def dump() -> ChatTemplate:
    return ChatTemplate(DUMP, {"bos_token": "<s>"})


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(value=VALUE, said=TEXT)
def test_any_value_of_json_reaches_the_template_as_it_was(dump: ChatTemplate, value: Any, said: str) -> None:
    """Whole numbers of any size, the order of keys, and whether a number is whole."""
    asked = question({"role": "user", "content": said, "more": value}, tools=[{"x": value}], switch=value)
    assert through(dump, asked) == rendering.render(dump.program, asked)
    assert repr(read_question(frame_of(asked)[4:]).messages[0]) == repr(asked.messages[0])


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_ended_and_the_next_conversation_rendered(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], {})
    here = psutil.Process().memory_info().rss
    with pytest.raises((OvertimeError, RequestError), match=r"processor time|MiB of memory|characters of them"):
        template.render(Conversation([SAY]), Limits(cpu_s=0.5))
    assert template.render(Conversation([{"role": "user", "content": CALM}])) == "calm"
    assert psutil.Process().memory_info().rss - here < 64 * 2**20


def test_a_wait_for_the_processor_is_bounded_too() -> None:
    with pytest.raises(OvertimeError, match=r"longer than 0\.05 s"):
        ChatTemplate(HOSTILE["lists"], {}).render(Conversation([SAY]), Limits(cpu_s=30.0, wall_s=0.05))


def test_the_memory_of_one_rendering_is_free_for_the_next() -> None:
    """The compiler does not compute the text, because its length depends on the messages."""
    template = ChatTemplate("{{ ('x' * (messages[0].content | int)) | length }}", {})
    most = {"role": "user", "content": str(2**28)}
    assert {template.render(Conversation([most])) for _ in range(4)} == {str(2**28)}
    with pytest.raises(RequestError, match="more than 512 MiB of memory"):
        template.render(Conversation([{"role": "user", "content": str(2**29 + 2**26)}]))
    assert template.render(Conversation([most])) == str(2**28)


# -- processes that end ------------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[RenderProcess]:
    """A forking process of the test's own, which it may kill."""
    made = RenderProcess()
    yield made
    made.close()


def rendered_by(process: RenderProcess, source: str, limits: Limits = SLOW) -> Callable[[], str]:
    program = ChatTemplate(source, {}).program
    pool = RenderPool(frame_of(program), process)
    asked = RenderQuestion(limits, [SAY], None, None, True, False, {})
    return lambda: pool.run(asked).text


def workers(process: RenderProcess) -> list[psutil.Process]:
    return [] if process.pid is None else psutil.Process(process.pid).children()


def wait_until(what: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return found


def a_busy_one(process: RenderProcess) -> psutil.Process | None:
    """A worker in the middle of a rendering: it has used more processor time than a new one."""
    return next((worker for worker in workers(process) if worker.cpu_times().user > 0.05), None)


def test_a_conversation_whose_worker_was_killed_is_rendered_again(
    process: RenderProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rendered_by(process, BUSY.replace("60", "600")))
        wait_until(lambda: a_busy_one(process)).send_signal(signal.SIGKILL)
        assert running.result(WAIT_S) == "done"
    assert "ended by SIGKILL before it had answered (1 since the start)" in caplog.text


def test_a_conversation_whose_workers_are_all_killed_fails_by_name(process: RenderProcess) -> None:
    render = rendered_by(process, HOSTILE["lists"])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(render)
        killed: set[int] = set()
        while len(killed) < 3:
            worker = wait_until(lambda: next((one for one in workers(process) if one.pid not in killed), None))
            killed.add(worker.pid)
            worker.send_signal(signal.SIGKILL)
        with pytest.raises(RenderError, match="its process ended by SIGKILL, 3 times"):
            running.result(WAIT_S)


def test_a_forking_process_that_was_killed_is_replaced(process: RenderProcess) -> None:
    render = rendered_by(process, "done")
    assert render() == "done"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert render() == "done"


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_forking_process_that_is_stopped_is_replaced(
    process: RenderProcess, is_ready: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is stopped before it has read its libraries."""
    monkeypatch.setattr(render_workers, "_FORK_TIMEOUT_S", 0.3)
    render = rendered_by(process, "done", Limits(cpu_s=10.0, is_nice=True))  # a nice worker is asked once
    if is_ready:
        assert render() == "done"
    else:
        process.start()
    stopped = process.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(render)
        try:
            assert running.result(WAIT_S) == "done"
        finally:
            if not running.done():
                os.kill(stopped, signal.SIGCONT)
    assert process.pid != stopped
    assert "hangs; it is replaced" in caplog.text


def test_a_worker_that_cannot_be_started_is_started_after_a_pause(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses the forking process twice."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            process._command = command

    command, process._command = process._command, ("/no/such/command",)
    monkeypatch.setattr("inferd.server.text.template.time.sleep", pause)
    assert rendered_by(process, "done")() == "done"
    assert len(pauses) == 2 and min(pauses) > 0.0


def test_no_worker_outlives_the_forking_process(process: RenderProcess) -> None:
    """Not even one in a call that never returns: the kernel ends it."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rendered_by(process, HOSTILE["lists"]))
        worker = wait_until(lambda: a_busy_one(process))
        assert process.pid is not None
        process._command = ("false",)  # so that the conversation is not rendered again
        os.kill(process.pid, signal.SIGKILL)
        worker.wait(WAIT_S)
        with pytest.raises(RenderError):
            running.result(WAIT_S)


def test_workers_end_with_their_pool(process: RenderProcess) -> None:
    program = frame_of(ChatTemplate("done", {}).program)
    pool = RenderPool(program, process)
    pool.run(question(SAY))
    (worker,) = workers(process)
    pool.close()
    worker.wait(WAIT_S)


# -- a reader of prompts -----------------------------------------------------------------------------------------------

SLOW_IF_TWO = "{% if messages|length > 1 %}" + HOSTILE["lists"] + "{% endif %}done"


async def reading(template: str, work: Callable[[PromptReader], Any], render_cpu_s: float = SLOW.cpu_s) -> None:
    model = ServedModel.load(TINY, ("tiny",), max_model_len=64, vocab_size=3_072)
    threads = TextThreads()
    prompts = PromptReader(replace(model, template=ChatTemplate(template, {})), threads, render_cpu_s)
    try:
        await work(prompts)
    finally:
        prompts.close()
        threads.close()


def test_messages_that_take_too_long_to_render_are_refused_and_others_are_rendered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line of the log tells of all refusals of a minute."""

    async def work(prompts: PromptReader) -> None:
        for _ in range(3):
            with pytest.raises(RequestError) as caught:
                await prompts.render(Conversation([SAY, SAY]), add_special=False)
            assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")
            assert "more than 0.05 s of processor time" in caught.value.message
        assert (await prompts.render(Conversation([SAY]), add_special=False))[1] == "done"

    with caplog.at_level(logging.WARNING):
        asyncio.run(reading(SLOW_IF_TWO, work, render_cpu_s=0.05))
    assert caplog.text.count("tiny: the chat template did not render a request's messages") == 1
    assert "Traceback" not in caplog.text and "Exception in thread" not in caplog.text


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process that renders can be started."""
    process = RenderProcess(("/no/such/command",))
    monkeypatch.setattr("inferd.server.text.template.render_process", lambda: process)


def test_a_fault_of_the_server_is_no_fault_of_the_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller may try again."""

    async def work(prompts: PromptReader) -> None:
        with pytest.raises(RequestError, match="no process can be started for it") as caught:
            await prompts.render(Conversation([SAY]), add_special=False)
        assert table.row_of(caught.value).status == 503
        assert "Retry-After" in table.headers_of(caught.value)

    async def run() -> None:
        model = ServedModel.load(TINY, ("tiny",), max_model_len=64, vocab_size=3_072)
        broken(monkeypatch)
        threads = TextThreads()
        prompts = PromptReader(replace(model, template=ChatTemplate("done", {})), threads)
        try:
            await work(prompts)
        finally:
            prompts.close()
            threads.close()

    asyncio.run(run())
    assert "tiny: cannot render a request's messages: no process can be started" in caplog.text


def test_a_server_that_cannot_render_at_its_start_does_not_assume_what_the_template_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    with pytest.raises(StartError, match="no process can be started for it"):
        ServedModel.load(TINY, ("tiny",), max_model_len=64, vocab_size=3_072)


def test_quick_conversations_pass_slow_ones_and_the_end_waits_for_none() -> None:
    """There are more slow ones than workers."""

    async def work(prompts: PromptReader) -> None:
        slow = [asyncio.ensure_future(prompts.render(Conversation([SAY, SAY]), add_special=False)) for _ in range(4)]
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await prompts.render(Conversation([SAY]), add_special=False))[1] == "done"
        assert not any(task.done() for task in slow)
        prompts.close()
        ended = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(end, (RequestError, asyncio.CancelledError)) for end in ended)

    asyncio.run(asyncio.wait_for(reading(SLOW_IF_TWO, work, render_cpu_s=300.0), WAIT_S))


def test_the_forking_process_imports_little() -> None:
    """It starts beside the server and the engine, and every worker has what it imported."""
    code = (
        "from inferd.server.tools.single_files import skip_code_of; skip_code_of('transformers', 'transformers.utils');"
        "import inferd.server.text.rendering, sys; print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "transformers.utils.chat_template_utils" in loaded
    assert not loaded & {"torch", "fastapi", "pydantic", "httpx", "tokenizers", "transformers.utils.hub"}


def test_one_forking_process_serves_all_models() -> None:
    ChatTemplate("a", {}).render(Conversation([SAY]))
    pid = render_process().pid
    ChatTemplate("b", {}).render(Conversation([SAY]))
    assert render_process().pid == pid is not None
