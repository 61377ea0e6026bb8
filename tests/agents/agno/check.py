"""Agno over Chat Completions and over Responses."""

from __future__ import annotations

from functools import partial

from agent import MEND, MENDED, MODEL, Project, call, edit_file, plan, read_file, run_tests, when
from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from checks import BASE_URL, KEY, check, run

MODELS = {"chat": OpenAILike, "responses": OpenAIResponses}


def a_task(api: str) -> None:
    project = Project(api)
    project.enter()
    model = MODELS[api](id=MODEL, base_url=BASE_URL, api_key=KEY)
    tools = [read_file, edit_file, run_tests]
    agent = Agent(model=model, tools=tools, db=InMemoryDb(), add_history_to_context=True, telemetry=False)
    answer = agent.run(f"Mend calc.py. {MEND}", session_id="1").content
    assert answer.endswith("It is mended."), answer
    project.check_mended()
    again = plan([call("read_file", path="calc.py")], when(MENDED, "It was mended."))
    answer = "".join(
        event.content
        for event in agent.run(f"And again. {again}", session_id="1", stream=True)
        if event.event == "RunContent" and event.content
    )
    assert answer.endswith("It was mended."), answer


for name in MODELS:
    asked = partial(a_task, name)
    asked.__doc__ = f"{name}: a task, and the same session again, streamed"
    check(asked)

run()
